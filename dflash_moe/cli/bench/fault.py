"""`dflash-moe bench fault`: options and table; the measuring is dflash_moe/bench/fault.py.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_moe.cli import options
from dflash_moe.cli.bench.run import JsonOption, measuring

if TYPE_CHECKING:
    from dflash_moe.bench.results import BenchResult


def register(bench: typer.Typer) -> None:
    """Adds the command to the group `bench`."""
    bench.command(name="fault")(fault)


@options.with_settings()
def fault(
    model: Annotated[
        str | None, typer.Option(help="Checkpoint directory or file [default: a tiny random model].", show_default=False)
    ] = None,
    topology: options.TopologyOption = None,
    kills: Annotated[int, typer.Option(min=1, help="Number of kills, one after the other.")] = 40,
    tokens: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Comma-separated sizes of calls, in tokens, of which each call draws one.")
    ] = "1,16,256",
    seed: Annotated[int, typer.Option(help="Number from which workers, moments and sizes are drawn.")] = 0,
    json_out: JsonOption = None,
    **overrides: Any,
) -> None:
    """Kills workers under load: failed calls, wrong bits, stalls, and how soon workers are back
    (without a topology: two local workers that hold all experts).
    """
    from dflash_moe.bench.fault import FaultParams, default_topology, run_fault

    params = FaultParams(
        kills=kills,
        model=None if model is None else options.model_directory(model),
        tokens=options.numbers(tokens, "--tokens", 1 << 20),
        seed=seed,
    )
    made = default_topology() if topology is None else options.load_topology(topology)
    with measuring(json_out, lambda result: _show(result)) as recorder:
        result = run_fault(params, made, recorder=recorder, overrides=overrides)
    row = result.rows[0]
    if row["failed_calls"] or row["wrong_bits"] or row["left_processes"] or row["kills"] < kills:
        raise typer.Exit(1)


def _show(result: BenchResult) -> None:
    print_fault(result.rows)


def print_fault(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints what came of the kills, and the first error where there was one."""
    columns = ("kills", "failed calls", "wrong bits", "stall ms p50 / p99", "back s p50 / max", "left over")
    table = options.table("row", *columns)
    for row in rows:
        table.add_row(
            row["name"], str(row["kills"]), str(row["failed_calls"]), str(row["wrong_bits"]),
            f"{row['stall_p50_ms']:.1f} / {row['stall_p99_ms']:.1f}", f"{row['back_p50_s']:.1f} / {row['back_max_s']:.1f}",
            f"{row['left_processes']} processes, {row['left_descriptors']} descriptors",
        )  # fmt: skip
    options.show(table)
    for row in rows:
        if row["first_error"]:
            options.say(f"first error: {row['first_error']}")
