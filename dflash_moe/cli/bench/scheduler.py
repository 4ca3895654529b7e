"""`dflash-moe bench scheduler`: options and tables; the measuring is dflash_moe/bench/scheduler.py.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_moe.cli import options
from dflash_moe.cli.bench.run import JsonOption, PlotOption, measuring
from dflash_moe.config import MAX_REQUESTS

if TYPE_CHECKING:
    from dflash_moe.bench.results import BenchResult


@options.with_settings()
def scheduler(
    model: options.ModelOption,
    topology: options.TopologyOption = None,
    batch: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Comma-separated numbers of requests that are submitted together.")
    ] = "1,4,16",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of each random prompt, in tokens.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each request behind its prompt.")] = 64,
    warmup: Annotated[int, typer.Option(min=0, help="Rounds before the measured ones.")] = 1,
    repeat: Annotated[int, typer.Option(min=1, help="Measured rounds; the numbers of requests are interleaved in each.")] = 3,
    with_loop: Annotated[
        bool, typer.Option("--with-loop", help="Also measure one request without an engine, in the same rounds.")
    ] = False,
    json_out: JsonOption = None,
    plot: PlotOption = None,
    **overrides: Any,
) -> None:
    """The engine alone: tokens a second, first token and later ones for several requests at a time,
    and what a step takes beside the model.
    """
    from dflash_moe.bench.scheduler import SchedulerParams, run_scheduler

    params = SchedulerParams(
        model=options.model_directory(model),
        batch=options.numbers(batch, "--batch", MAX_REQUESTS),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        warmup=warmup,
        repeat=repeat,
        with_loop=with_loop,
    )
    with measuring(json_out, _show, plot) as recorder:
        run_scheduler(params, options.load_topology(topology), recorder=recorder, overrides=overrides)


def _show(result: BenchResult) -> None:
    print_scheduler(result.rows)
    print_steps([row for row in result.rows if "per_step_s" in row])
    print_ratios(result.summary)


def print_scheduler(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints what requests got: medians, and means behind them."""
    options.show_rows(
        rows,
        ("row", "{name}"),
        ("prefill tokens/s", "{prefill_tokens_per_s:.0f}"),
        ("decode tokens/s", "{decode_tokens_per_s:.1f}"),
        ("of total", "{total_tokens_per_s:.1f}"),
        ("decode s", lambda row: _both(row["decode_s"], 1)),
        ("TTFT ms", lambda row: _both(row["ttft_s"], 1e3)),
        ("TPOT ms", lambda row: _both(row["tpot_s"], 1e3)),
        ("latency s", lambda row: _both(row["latency_s"], 1)),
    )


def _both(seconds: Mapping[str, float], factor: float) -> str:
    digits = 3 if factor == 1 else 2
    return f"{factor * seconds['p50']:.{digits}f} / {factor * seconds['mean']:.{digits}f}"


def print_steps(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints what a step takes on the average: the model, and the parts of the engine."""
    if not rows:
        return
    options.show_rows(
        rows,
        ("row", "{name}"),
        ("steps", "{steps:,}"),
        ("sequences x steps", lambda row: " ".join(f"{size}x{count}" for size, count in row["batch_sizes"].items())),
        ("preempted", "{preemptions}"),
        ("calls", "{calls:,}"),
        ("model ms", lambda row: f"{1e3 * row['per_step_s']['forward_s']:.2f}"),
        ("plan us", lambda row: f"{1e6 * row['per_step_s']['plan_s']:.0f}"),
        ("sample us", lambda row: f"{1e6 * row['per_step_s']['sample_s']:.0f}"),
        ("commit us", lambda row: f"{1e6 * row['per_step_s']['commit_s']:.0f}"),
        ("deliver us", lambda row: f"{1e6 * row['per_step_s']['deliver_s']:.0f}"),
        ("engine", "{engine_share:.2%}"),
    )


def print_ratios(summary: Sequence[Mapping[str, Any]]) -> None:
    """Prints how each row compares with that of one request."""
    if not summary:
        return
    options.show_rows(
        summary,
        ("row", "{name}"),
        ("against", "{against}"),
        ("its TPOT / other's", "{tpot_ratio:.3f}"),
        ("its decode tokens/s / other's", "{throughput_ratio:.2f}"),
        ("tokens", lambda entry: "equal" if entry["same_tokens"] else "DIFFERENT"),
    )
