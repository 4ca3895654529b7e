"""`python -m bench.lab attention`: options and tables; the measuring is bench/lab/attention.py.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_moe.cli import options
from dflash_moe.cli.bench.run import JsonOption, PlotOption, measuring
from dflash_moe.config import MAX_THREADS

if TYPE_CHECKING:
    from dflash_moe.bench.results import BenchResult

# No model of today has a context window as long.
MAX_CONTEXT = 1 << 20


def attention(
    contexts: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Comma-separated numbers of tokens that one query row sees.")
    ] = "64,256,1024,4096,16384",
    dtypes: Annotated[str, typer.Option(help="Comma-separated dtypes of keys and values: bf16, f16, f32.")] = "bf16,f16,f32",
    threads: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Numbers of threads [default: 1 and all usable cores].", show_default=False)
    ] = "",
    repeat: Annotated[int, typer.Option(min=1, help="Measured rounds; all cases are interleaved in each.")] = 5,
    json_out: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Paged attention against the peaks of this machine: decode rows over many contexts, a chunk of
    512 of 4,096 tokens, and storing 64 tokens (5 minutes at most).
    """
    from bench.lab.attention import AttentionParams, run_attention

    params = AttentionParams(
        contexts=options.numbers(contexts, "--contexts", MAX_CONTEXT),
        dtypes=options.words(dtypes),
        threads=options.numbers(threads, "--threads", MAX_THREADS) if threads else (),
        repeat=repeat,
    )
    with measuring(json_out, _show, plot) as recorder:
        run_attention(params, recorder=recorder)


def _show(result: BenchResult) -> None:
    print_attention(result.rows)
    print_appends(result.rows, result.summary)


def print_attention(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints every row of the operator with its shares of both peaks."""
    heads = ("rows", "context", "threads", "us", "GB/s", "of read", "GFLOP/s", "of peak")
    table = options.Table("case", "kv dtype", *heads)
    for row in rows:
        if "context" in row:
            table.add_row(
                row["name"], row["kv_dtype"], str(row["rows"]), f"{row['context']:,}", str(row["threads"]), f"{row['us']:.1f}",
                f"{row['bytes_per_s'] / 1e9:.2f}", f"{row['share_of_read']:.0%}",
                f"{row['gflops']:.1f}", f"{row['share_of_peak']:.0%}",
            )  # fmt: skip
    options.show(table)


def print_appends(rows: Sequence[Mapping[str, Any]], ratios: Sequence[Mapping[str, Any]]) -> None:
    """Prints what storing tokens costs, and how much faster one call is."""
    faster = {(found["kv_dtype"], found["through"]): found["speedup"] for found in ratios}
    table = options.Table("storing", "kv dtype", "through", "tokens", "calls", "us", "one call is faster")
    for row in rows:
        if "through" in row:
            speedup = faster.get((row["kv_dtype"], row["through"])) if row["calls"] == 1 else None
            table.add_row(
                row["name"], row["kv_dtype"], row["through"], str(row["tokens"]), str(row["calls"]), f"{row['us']:.1f}",
                f"{speedup:.1f} x" if speedup else "-",
            )  # fmt: skip
    if table.row_count:
        options.show(table)
