"""`python -m bench.lab doorbell` and `step`: options and tables; doorbell.py and device_steps.py in
bench/lab/ measure.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from dflash_moe.cli import options
from dflash_moe.cli.bench.run import JsonOption, measuring
from dflash_moe.errors import ConfigError, DflashError

BACKENDS = ("cuda", "hip", "sim")
# A device step takes no more rows (kMostStepTokens of the core).
MAX_STEP_TOKENS = 64

BackendOption = Annotated[str, typer.Option(help=f"The card's kind: {', '.join(BACKENDS)}.")]
DeviceOption = Annotated[int, typer.Option(min=0, help="The card's number.")]


def doorbell(
    backend: BackendOption = "cuda",
    device: DeviceOption = 0,
    rounds: Annotated[
        int,
        typer.Option(
            min=0, max=1 << 20, help="Rounds of each ping-pong [default: 10,000; 50 if simulated].", show_default=False
        ),
    ] = 0,
    json_out: JsonOption = None,
) -> None:
    """Which memory a card takes from the host, and what ringing a processor from it costs
    (1 minute).
    """
    from bench.lab.doorbell import DoorbellParams, run_doorbell

    _check_backend(backend)
    with measuring(json_out, lambda result: print_doorbell(result.rows)) as recorder:
        run_doorbell(DoorbellParams(backend, device, rounds), recorder=recorder)


def print_doorbell(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints registrations in milliseconds and then ping-pongs in microseconds. What failed follows
    with the words of the driver.
    """
    memory = options.Table("memory", "registers", "MiB", "ms")
    trips = options.Table("who answers", "memory", "rounds", "p50", "p99", "least", "mark", "works")
    for row in rows:
        works = "yes" if row["passed"] else "no"
        if "echo" not in row:
            size = f"{row['bytes'] / 2**20:.1f}" if row["passed"] and row["bytes"] else "-"
            memory.add_row(row["memory"], works, size, f"{row['median_s'] * 1e3:.2f}" if row["passed"] else "-")
            continue
        figures = [f"{row[key]:.2f}" if key in row else "-" for key in ("p50_us", "p99_us", "min_us")]
        mark = f"{row['mark_us']:g}" if row["mark_us"] is not None else "-"
        trips.add_row(row["echo"], row["memory"], str(row["rounds"]), *figures, mark, works)
    options.show(memory)
    options.show(trips)
    for row in rows:
        if "error" in row:
            typer.echo(f"{row['name']}: {row['error']}")


def step(
    backend: BackendOption = "cuda",
    device: DeviceOption = 0,
    tokens: Annotated[str, typer.Option(metavar="N[,N...]", help="Comma-separated batch sizes, in tokens.")] = "1,8",
    repeat: Annotated[int, typer.Option(min=1, help="Measured rounds; the paths are interleaved in each.")] = 5,
    json_out: JsonOption = None,
) -> None:
    """What a decode step's exchange adds to each layer on a card, with CPU and GPU workers, beside
    staged calls (1 minute).
    """
    from bench.lab.device_steps import StepParams, run_device_steps

    _check_backend(backend)
    batches = options.numbers(tokens, "--tokens", MAX_STEP_TOKENS)
    with measuring(json_out, lambda result: print_steps(result.rows)) as recorder:
        result = run_device_steps(StepParams(backend, device, tokens=batches, repeat=repeat), recorder=recorder)
    if any(row.get("same_bits") is False for row in result.rows):
        raise DflashError("a device step gave other bits than staged calls; see column bits")


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ConfigError(f"--backend {backend!r} is not allowed; allowed: {', '.join(BACKENDS)}")


def print_steps(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints every row in microseconds for each layer. A failure takes the place of its figures."""
    heads = ("layer", "compute", "added p50", "p99", "mark", "queueing", "opening", "bits")
    table = options.Table("experts in", "path", "tokens", *heads)
    for row in rows:
        if "added_p50_us" not in row:
            table.add_row(row["worker"], row.get("path", "-"), str(row.get("tokens", "-")), *"--------")
            continue
        mark = f"{row['mark_us']:g}" if row["mark_us"] is not None else "-"
        bits = {True: "same", False: "DIFFER", None: "-"}[row["same_bits"]]
        keys = ("layer_us", "compute_us", "added_p50_us", "added_p99_us", "queue_us", "open_us")
        figures = [f"{row[key]:.1f}" for key in keys]
        table.add_row(row["worker"], row["path"], str(row["tokens"]), *figures[:4], mark, *figures[4:], bits)
    options.show(table)
    for row in rows:
        if "error" in row:
            typer.echo(f"{row['name']}: {row['error']}")
