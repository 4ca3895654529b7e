"""`dflash-moe bench limits`: options and tables; the measuring is dflash_moe/bench/limits.py.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_moe.cli import options
from dflash_moe.cli.bench.run import JsonOption, PlotOption, measuring
from dflash_moe.cli.bench.tables import MIB
from dflash_moe.config import MAX_REQUESTS

if TYPE_CHECKING:
    from dflash_moe.bench.results import BenchResult

MAX_ROWS = 1 << 16


@options.with_settings()
def limits(
    model: options.ModelOption,
    topology: options.TopologyOption = None,
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="Measure the model's first N layers alone [default: all].", show_default=False),
    ] = None,
    sequences: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Comma-separated numbers of sequences that decode together.")
    ] = "1,4,16",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each sequence before the decoded ones.")] = 128,
    new_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each sequence that are decoded and timed in every round.")
    ] = 16,
    prefill: Annotated[
        str,
        typer.Option(
            metavar="N[,N...]", help="Comma-separated lengths of a chunk, in tokens; an empty list leaves prefill out."
        ),
    ] = "128,512,2048,8192",
    repeat: Annotated[
        int,
        typer.Option(min=1, help="Measured rounds; all cases of a host are interleaved in each."),
    ] = 5,
    with_local: Annotated[
        bool, typer.Option("--local/--no-local", help="Also measure all experts in the host process.")
    ] = True,
    json_out: JsonOption = None,
    plot: PlotOption = None,
    **overrides: Any,
) -> None:
    """Where a token and a prefill chunk go: each product and operator against reading its bytes and
    its arithmetic.
    """
    from dflash_moe.bench.limits import LimitsParams, run_limits

    params = LimitsParams(
        model=options.model_directory(model),
        sequences=options.numbers(sequences, "--sequences", MAX_REQUESTS),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        prefill=options.numbers(prefill, "--prefill", MAX_ROWS) if prefill else (),
        layers=layers,
        repeat=repeat,
        with_local=with_local,
    )
    with measuring(json_out, print_limits, plot) as recorder:
        run_limits(params, options.load_topology(topology), recorder=recorder, overrides=overrides)


def print_limits(result: BenchResult) -> None:
    """Prints a table for each row, one of all rows, and what lies on huge pages."""
    for row in result.rows:
        typer.echo(f"{row['name']}: {1e3 * row['step_s']:.2f} ms a step, {row['tokens_per_s']:.1f} tokens/s")
        options.show_rows(
            row["parts"],
            ("part", "{part}"),
            ("calls", "{calls:.0f}"),
            ("ms", lambda part: f"{1e3 * part['seconds']:.3f}"),
            ("fork, wait", lambda part: _ms(part["fork_wait_s"])),
            ("MB", lambda part: _or_dash(part["num_bytes"] / 1e6, "{:.2f}")),
            ("M multiply-adds", lambda part: _or_dash(part["multiply_adds"] / 1e6, "{:.2f}")),
            ("class", lambda part: part["numerics"] or "-"),
            ("bytes ms", lambda part: _ms(part["read_s"])),
            ("instructions ms", lambda part: _ms(part["multiply_s"])),
            ("bound by", lambda part: part["bound_by"] or "-"),
            ("share", lambda part: _share(part["share"])),
        )
    options.show_rows(
        result.rows,
        ("row", "{name}"),
        ("ms", lambda row: f"{1e3 * row['step_s']:.2f}"),
        ("first ms", lambda row: f"{1e3 * row['first_s']:.2f}"),
        ("tokens/s", "{tokens_per_s:.1f}"),
        ("MB", lambda row: f"{row['num_bytes'] / 1e6:.1f}"),
        ("fork, wait", lambda row: f"{row['fork_wait_s'] / row['step_s']:.1%}"),
        ("Python", lambda row: f"{row['python_s'] / row['step_s']:.1%}"),
        ("rest", lambda row: f"{row['rest_s'] / row['step_s']:.1%}"),
        ("bounds ms", lambda row: _ms(row["bound_s"])),
        ("share", lambda row: _share(row["share"])),
    )
    for name, found in result.params["huge_pages"].items():
        typer.echo(f"{name}: {_huge(found)}")


def _ms(seconds: float | None) -> str:
    return _or_dash(seconds and 1e3 * seconds, "{:.3f}")


def _share(share: float | None) -> str:
    return _or_dash(share, "{:.0%}")


def _or_dash(value: float | None, form: str) -> str:
    return form.format(value) if value else "-"


def _huge(found: Mapping[str, int | None]) -> str:
    anonymous, huge = found["anonymous_bytes"] or 0, found["huge_bytes"]
    if huge is None:
        return "this system does not say what lies on huge pages"
    if not huge:
        return "nothing lies on huge pages"
    return f"{huge / MIB:,.0f} of {anonymous / MIB:,.0f} MiB lie on huge pages"
