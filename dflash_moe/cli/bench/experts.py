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
from dflash_moe.cli.bench.run import JsonOption, PlotOption, measuring
from dflash_moe.config import MAX_THREADS
from dflash_moe.errors import ConfigError
from dflash_moe.topology.spec import BACKENDS

# No larger batch is measured.
MAX_TOKENS = 4096


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
    named: dict[str, Any] = {
        key: tuple(part.strip() for part in text.split(","))
        for key, text in (("formats", formats), ("numerics", numerics))
        if text
    }
    if backend != "cpu":
        _on_device(backend, named, tokens, repeat, with_torch, json_out)
        return
    params = ExpertsParams(repeat=repeat, with_torch=with_torch and _has_torch(), **named)
    if tokens:
        sizes = options.numbers(tokens, "--tokens", MAX_TOKENS)
        params = dataclasses.replace(params, tokens=sizes, zipf_tokens=(), cache_tokens=())
    if threads:
        params = dataclasses.replace(params, threads=options.numbers(threads, "--threads", MAX_THREADS))
    if full:
        larger = ExpertShape(hidden_size=2048, moe_intermediate_size=768)
        params = dataclasses.replace(params, shapes=(*params.shapes, larger), repeat=max(repeat, 11))
    with measuring(json_out, lambda result: print_experts(result.rows), plot) as recorder:
        run_experts(params, recorder=recorder)


def _on_device(
    backend: str, named: Mapping[str, Any], tokens: str, repeat: int, with_torch: bool, json_out: Path | None
) -> None:
    from dflash_moe.bench.device_experts import DeviceParams, run_device_experts

    params = DeviceParams(backend, repeat=repeat, with_torch=with_torch, **named)
    if backend == "sim":
        params = dataclasses.replace(params, tokens=(1, 8), zipf_tokens=(), num_layers=1)
    if tokens:
        params = dataclasses.replace(params, tokens=options.numbers(tokens, "--tokens", MAX_TOKENS), zipf_tokens=())
    with measuring(json_out, lambda result: print_device_experts(result.rows)) as recorder:
        run_device_experts(params, recorder=recorder)


def print_device_experts(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints every row, with its share of the ceilings where they were measured."""
    options.show_rows(
        rows,
        ("device", "{device}"),
        ("kernel", "{kernel}"),
        ("format", "{format}"),
        ("tokens", "{tokens:,}"),
        ("rows/expert", "{rows_per_expert:.1f}"),
        ("routing", "{routing}"),
        ("ms", lambda row: f"{row['median_s'] * 1e3:.3f}"),
        ("ms on device", lambda row: f"{row['device_median_s'] * 1e3:.3f}"),
        ("GFLOP/s", "{gflops:.1f}"),
        ("of product", lambda row: f"{row['of_peak_gflops']:.0%}" if "of_peak_gflops" in row else "-"),
        ("GB/s", lambda row: f"{row['bytes_per_s'] / 1e9:.2f}"),
        ("of copy", lambda row: f"{row['of_peak_bytes']:.0%}" if "of_peak_bytes" in row else "-"),
    )


def print_experts(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints every row with its share of both peaks."""
    order = ("threads", "hidden_size", "weights_from", "routing", "tokens", "format")
    options.show_rows(
        sorted(rows, key=lambda row: tuple(row[key] for key in order)),
        ("kernel", lambda row: row["kernel"] if row["backend"] == "cpu" else f"torch {row['kernel']}"),
        ("format", "{format}"),
        ("tokens", "{tokens:,}"),
        ("rows/expert", "{rows_per_expert:.1f}"),
        ("routing", "{routing}"),
        ("weights", "{weights_from}"),
        ("threads", "{threads}"),
        ("ms", lambda row: f"{row['median_s'] * 1e3:.3f}"),
        ("G(FL)OP/s", "{gflops:.1f}"),
        ("of peak", "{of_peak_gflops:.0%}"),
        ("GB/s", lambda row: f"{row['bytes_per_s'] / 1e9:.2f}"),
        ("of peak", "{of_peak_bytes:.0%}"),
    )


def _has_torch() -> bool:
    import importlib.util

    return importlib.util.find_spec("torch") is not None
