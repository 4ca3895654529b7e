"""`dflash-moe bench experts`: options and table; the measuring is dflash_moe/bench/experts.py.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_moe.cli import options
from dflash_moe.cli.bench.run import JsonOption, PlotOption, measuring, store_plot
from dflash_moe.config import MAX_THREADS
from dflash_moe.errors import ConfigError
from dflash_moe.topology.spec import BACKENDS

# No larger batch is measured.
MAX_TOKENS = 4096


def register(bench: typer.Typer) -> None:
    """Adds the command to the group `bench`."""
    bench.command(name="experts")(experts)


def experts(
    backend: Annotated[str, typer.Option(help=f"Whose kernels: {', '.join(BACKENDS)}.")] = "cpu",
    full: Annotated[bool, typer.Option("--full", help="A second, larger layer and more rounds (about an hour).")] = False,
    formats: Annotated[
        str,
        typer.Option(
            help="Comma-separated weight formats [default: f32, f16, bf16, int8_g32, int4_g32, q8_0, q4_k, q6_k, mxfp4].",
            show_default=False,
        ),
    ] = "",
    numerics: Annotated[
        str,
        typer.Option(
            help="Comma-separated numerics classes, each for what it takes [default: all of this processor].",
            show_default=False,
        ),
    ] = "",
    tokens: Annotated[
        str,
        typer.Option(
            metavar="N[,N...]",
            help="Comma-separated batch sizes, in tokens [default: 1 to 2,048, some with Zipf routing or from caches].",
            show_default=False,
        ),
    ] = "",
    threads: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Numbers of threads [default: 1 and all usable cores].", show_default=False)
    ] = "",
    repeat: Annotated[int, typer.Option(min=1, help="Measured rounds; all cases are interleaved in each.")] = 5,
    with_torch: Annotated[bool, typer.Option("--torch/--no-torch", help="Also measure torch where it is installed.")] = True,
    json_out: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Expert kernels against the peaks of this machine: multiply-adds and weight bytes a second (15
    minutes at most).
    """
    from dflash_moe.bench.expert_batch import ExpertShape
    from dflash_moe.bench.experts import ExpertsParams, run_experts

    if backend not in BACKENDS:
        raise ConfigError(f"--backend {backend!r} is not allowed; allowed: {', '.join(BACKENDS)}")
    if backend != "cpu":
        _on_device(backend, formats, numerics, tokens, repeat, with_torch, json_out)
        return
    params = ExpertsParams(repeat=repeat, with_torch=with_torch and _has_torch())
    if formats:
        params = dataclasses.replace(params, formats=tuple(part.strip() for part in formats.split(",")))
    if numerics:
        params = dataclasses.replace(params, numerics=tuple(part.strip() for part in numerics.split(",")))
    if tokens:
        sizes = options.numbers(tokens, "--tokens", MAX_TOKENS)
        params = dataclasses.replace(params, tokens=sizes, zipf_tokens=(), cache_tokens=())
    if threads:
        params = dataclasses.replace(params, threads=options.numbers(threads, "--threads", MAX_THREADS))
    if full:
        larger = ExpertShape(hidden_size=2048, moe_intermediate_size=768)
        params = dataclasses.replace(params, shapes=(*params.shapes, larger), repeat=max(repeat, 11))
    with measuring(json_out, lambda result: print_experts(result.rows)) as recorder:
        run_experts(params, recorder=recorder)
    store_plot(recorder, plot)


def _on_device(
    backend: str, formats: str, numerics: str, tokens: str, repeat: int, with_torch: bool, json_out: Path | None
) -> None:
    from dflash_moe.bench.device_experts import DeviceParams, run_device_experts

    params = DeviceParams(backend, repeat=repeat, with_torch=with_torch)
    if backend == "sim":
        params = dataclasses.replace(params, tokens=(1, 8), zipf_tokens=(), num_layers=1)
    if formats:
        params = dataclasses.replace(params, formats=tuple(part.strip() for part in formats.split(",")))
    if tokens:
        params = dataclasses.replace(params, tokens=options.numbers(tokens, "--tokens", MAX_TOKENS), zipf_tokens=())
    if numerics:
        params = dataclasses.replace(params, numerics=tuple(part.strip() for part in numerics.split(",")))
    with measuring(json_out, lambda result: print_device_experts(result.rows)) as recorder:
        run_device_experts(params, recorder=recorder)


def print_device_experts(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints every row, with its share of the ceilings where they were measured."""
    columns = ("device", "kernel", "format", "tokens", "rows/expert", "routing", "ms", "ms on device")
    table = options.table(*columns, "GFLOP/s", "of product", "GB/s", "of copy")
    for row in rows:
        shares = [f"{row[key]:.0%}" if key in row else "-" for key in ("of_peak_gflops", "of_peak_bytes")]
        table.add_row(
            row["device"], row["kernel"], row["format"], f"{row['tokens']:,}", f"{row['rows_per_expert']:.1f}", row["routing"],
            f"{row['median_s'] * 1e3:.3f}", f"{row['device_median_s'] * 1e3:.3f}",
            f"{row['gflops']:.1f}", shares[0], f"{row['bytes_per_s'] / 1e9:.2f}", shares[1],
        )  # fmt: skip
    options.show(table)


def print_experts(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints every row with its share of both peaks."""
    columns = ("kernel", "format", "tokens", "rows/expert", "routing", "weights", "threads", "ms")
    table = options.table(*columns, "G(FL)OP/s", "of peak", "GB/s", "of peak")
    order = ("threads", "hidden_size", "weights_from", "routing", "tokens", "format")
    for row in sorted(rows, key=lambda row: tuple(row[key] for key in order)):
        table.add_row(
            row["kernel"] if row["backend"] == "cpu" else f"torch {row['kernel']}",
            row["format"],
            f"{row['tokens']:,}",
            f"{row['rows_per_expert']:.1f}",
            row["routing"],
            row["weights_from"],
            str(row["threads"]),
            f"{row['median_s'] * 1e3:.3f}",
            f"{row['gflops']:.1f}",
            f"{row['of_peak_gflops']:.0%}",
            f"{row['bytes_per_s'] / 1e9:.2f}",
            f"{row['of_peak_bytes']:.0%}",
        )
    options.show(table)


def _has_torch() -> bool:
    import importlib.util

    return importlib.util.find_spec("torch") is not None
