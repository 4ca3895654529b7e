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
    options.show_rows(
        rows,
        ("row", "{name}"),
        ("kills", "{kills}"),
        ("failed calls", "{failed_calls}"),
        ("wrong bits", "{wrong_bits}"),
        ("stall ms p50 / p99", "{stall_p50_ms:.1f} / {stall_p99_ms:.1f}"),
        ("back s p50 / max", "{back_p50_s:.1f} / {back_max_s:.1f}"),
        ("left over", "{left_processes} processes, {left_descriptors} descriptors"),
    )
    for row in rows:
        if row["first_error"]:
            options.say(f"first error: {row['first_error']}")
