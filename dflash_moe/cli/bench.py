"""`dflash-moe bench ...`: thin commands over dflash_moe.bench; tables on stdout, progress on stderr, everything in the JSON.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_moe.cli import options
from dflash_moe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflash_moe.bench.results import BenchResult

JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the result (all samples, machine, commit) here.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="Draw the result into this PNG (needs matplotlib).")]
MIB = 1 << 20


def register(app: typer.Typer) -> None:
    bench = typer.Typer(help="Measure this machine: transports and the prefill table of the modes.", no_args_is_help=True)
    bench.command(name="ipc")(ipc)
    bench.command(name="prefill")(prefill)
    app.add_typer(bench, name="bench")


def ipc(
    full: Annotated[bool, typer.Option("--full", help="More payload sizes and rounds (about 20 minutes).")] = False,
    json_out: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Round trips of every transport beside their raw floors, and what an expert call adds (5 minutes at most)."""
    from dflash_moe.bench.ipc import PAYLOADS_FULL, IpcParams, run_ipc

    options.prepare_outputs(json_out, plot)
    params = IpcParams(payloads=PAYLOADS_FULL, batches=15) if full else IpcParams()
    result = run_ipc(params, progress=options.say)
    print_ipc(result)
    _store(result, json_out, plot)


@options.with_settings
def prefill(
    model: options.ModelOption,
    topology: options.TopologyOption = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the random prompt in tokens.")] = 2048,
    new_tokens: Annotated[int, typer.Option(min=0, help="Tokens decoded after the prefill.")] = 32,
    modes: Annotated[str, typer.Option(help="Comma-separated list of modes.")] = "stream,batched,auto",
    dtypes: Annotated[str, typer.Option(help="Comma-separated list of wire dtypes; empty: the model's own.")] = "",
    repeat: Annotated[int, typer.Option(min=1, help="Measured rounds; the modes are interleaved in each.")] = 3,
    with_local: Annotated[
        bool, typer.Option("--local/--no-local", help="Also measure all experts in the host process.")
    ] = True,
    json_out: JsonOption = None,
    plot: PlotOption = None,
    **overrides: Any,
) -> None:
    """Prefill and decode in every mode and wire dtype: time, calls, bytes both ways against the floor."""
    from dflash_moe.bench.prefill import PrefillParams, run_prefill

    params = PrefillParams(
        model=options.model_directory(model),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        modes=_allowed(modes, "--modes", ("stream", "batched", "auto")),
        dtypes=_allowed(dtypes, "--dtypes", ("f32", "f16", "bf16")) if dtypes else (),
        repeat=repeat,
        with_local=with_local,
    )
    for taken in ("mode", "dtype", "reply_dtype"):
        if overrides.pop(taken, None) is not None:
            raise ConfigError(f"--{taken.replace('_', '-')}: bench prefill measures lists; use --modes and --dtypes")
    result = run_prefill(params, options.load_topology(topology), progress=options.say, overrides=overrides)
    print_processes(result.params["processes"])
    print_prefill(result.rows)
    _store(result, json_out, plot)


def print_ipc(result: BenchResult) -> None:
    table = options.table("transport", "bytes each way", "p50 us", "p99 us", "floor us", "x floor", "GB/s", "memcpy GB/s")
    for row in result.rows:
        if "floor_us" not in row:
            continue
        table.add_row(
            row["name"],
            f"{row['payload_bytes']:,}",
            f"{row['p50_us']:.2f}",
            f"{row['p99_us']:.2f}",
            f"{row['floor_us']:.2f}",
            f"{row['p50_us'] / row['floor_us']:.2f}",
            f"{row['bytes_per_s'] / 1e9:.2f}",
            f"{row['memcpy_bytes_per_s'] / 1e9:.2f}",
        )
    options.show(table)
    calls = options.table("expert call over", "tokens", "p50 us", "worker us", "added p50 us", "added p99 us")
    for row in result.rows:
        if "added_p50_us" in row:
            calls.add_row(
                row["transport"],
                str(row["tokens"]),
                f"{row['median_s'] * 1e6:.1f}",
                f"{row['worker_p50_us']:.1f}",
                f"{row['added_p50_us']:.1f}",
                f"{row['added_p99_us']:.1f}",
            )
    if calls.row_count:
        options.show(calls)


def print_processes(processes: Sequence[dict[str, Any]]) -> None:
    """What each process has resident; `resident_memory` of bench/prefill.py makes the rows."""
    table = options.table("process", "experts a layer", "weights MiB", "anonymous MiB", "file-backed MiB")
    for process in processes:
        sizes = (process["weight_bytes"], process["anonymous_bytes"], process["file_bytes"])
        table.add_row(process["name"], str(process["experts_per_layer"]), *(f"{size / MIB:.0f}" for size in sizes))
    options.show(table)


def print_prefill(rows: Sequence[dict[str, Any]]) -> None:
    table = options.table(
        "mode",
        "dtype",
        "prefill s",
        "tokens/s",
        "calls",
        "request MiB",
        "reply MiB",
        "of floor",
        "decode tokens/s",
        "decode calls",
    )
    for row in rows:
        table.add_row(
            row["mode"],
            row["dtype"],
            f"{row['median_s']:.3f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['calls']:,}",
            f"{row['request_bytes'] / MIB:.3f}",
            f"{row['reply_bytes'] / MIB:.3f}",
            f"{1 / row['wire_efficiency']:.4f}" if row["wire_efficiency"] else "-",
            f"{row['decode_tokens_per_s']:.1f}" if "decode_tokens_per_s" in row else "-",
            f"{row['decode_calls']:,}",
        )
    options.show(table)
    for reason in dict.fromkeys(row["mode_reason"] for row in rows if row["mode"] == "auto"):
        typer.echo(f"{reason}\n")


def _allowed(text: str, flag: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    chosen = tuple(part.strip().lower() for part in text.split(",") if part.strip())
    for one in chosen:
        if one not in allowed:
            raise ConfigError(f"{flag} {text!r}: {one!r} is not allowed; choose from {', '.join(allowed)}")
    if not chosen:
        raise ConfigError(f"{flag} {text!r}: the list is empty; choose from {', '.join(allowed)}")
    return chosen


def _store(result: BenchResult, json_out: Path | None, plot: Path | None) -> None:
    if json_out is not None:
        result.write(json_out)
    if plot is not None:
        from dflash_moe.bench.plot import draw

        draw(result.as_json(), plot)
