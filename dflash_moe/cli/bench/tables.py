"""Prints the tables of bench results on stdout, with one function for each case.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from dflash_moe.cli import options

MIB = 1 << 20


def print_ipc(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the round trips, and then what expert calls add to them."""
    table = options.table("transport", "bytes each way", "p50 us", "p99 us", "floor us", "x floor", "GB/s", "memcpy GB/s")
    for row in rows:
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
    _print_encryption([row for row in rows if "without_us" in row])
    calls = options.table("expert call over", "tokens", "p50 us", "worker us", "added p50 us", "added p99 us")
    for row in rows:
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


def _print_encryption(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints what encryption adds, measured in turns with the same transport in clear."""
    if not rows:
        return
    table = options.table("encrypted", "bytes each way", "p50 us", "in clear us", "added us", "libssl alone us")
    for row in rows:
        table.add_row(
            row["adds_to"],
            f"{row['payload_bytes']:,}",
            f"{row['p50_us']:.2f}",
            f"{row['without_us']:.2f}",
            f"{row['p50_us'] - row['without_us']:.2f}",
            f"{row['floor_us']:.2f}",
        )
    options.show(table)


def print_processes(processes: Sequence[Mapping[str, Any]]) -> None:
    """Prints what each process has resident. `resident_memory` of bench/model_host.py makes the
    rows.
    """
    table = options.table("process", "experts a layer", "weights MiB", "anonymous MiB", "file-backed MiB")
    for process in processes:
        sizes = (process["weight_bytes"], process["anonymous_bytes"], process["file_bytes"])
        table.add_row(process["name"], str(process["experts_per_layer"]), *(f"{size / MIB:.0f}" for size in sizes))
    options.show(table)


def print_prefill(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints time, calls and bytes of the prefill, and of the decode after it."""
    table = options.table(
        "mode",
        "dtype",
        "prompt",
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
            f"{row['prompt_tokens']:,}",
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


def print_summary(summary: Sequence[Mapping[str, Any]]) -> None:
    """Prints how `auto` did against the better fixed mode, and its prediction against the
    measurement.
    """
    if not summary:
        return
    table = options.table("prompt", "dtype", "better fixed mode", "its time / auto's", "rounds", "auto predicted", "measured")
    for entry in summary:
        predicted = [found for found in entry["predictions"].values() if found["measured_s"] is not None]
        slowest = max(predicted, key=lambda found: float(found["measured_s"]), default=None)
        table.add_row(
            f"{entry['prompt_tokens']:,}",
            entry["dtype"],
            entry["better_fixed"],
            f"{entry['median_ratio']:.3f}",
            str(entry["rounds"]),
            f"{slowest['predicted_s'] * 1e3:.1f} ms" if slowest else "-",
            f"{slowest['measured_s'] * 1e3:.1f} ms" if slowest else "-",
        )
    options.show(table)


def print_decode(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the latency of a token, and the calls and bytes for each."""
    table = options.table(
        "mode",
        "dtype",
        "tokens/s",
        "p50 ms",
        "p95 ms",
        "p99 ms",
        "calls/token",
        "bytes/token",
        "floor/token",
        "MB read/token",
        "of read",
    )
    for row in rows:
        table.add_row(
            row["mode"],
            row["dtype"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['p50_s'] * 1e3:.2f}",
            f"{row['p95_s'] * 1e3:.2f}",
            f"{row['p99_s'] * 1e3:.2f}",
            f"{row['calls_per_token']:.1f}",
            f"{row['request_bytes_per_token'] + row['reply_bytes_per_token']:,.0f}",
            f"{row['floor_bytes_per_token']:,.0f}",
            f"{row['read_bytes_per_token'] / 1e6:.2f}",
            "-" if row["share_of_read"] is None else f"{row['share_of_read']:.0%}",
        )
    options.show(table)


def print_comparison(verdicts: Sequence[Mapping[str, Any]]) -> None:
    """Prints one line for each pair of rows that were compared."""
    table = options.table("row", "against", "time ratio", "95 % interval", "verdict", "why")
    for found in verdicts:
        interval = f"{found['low']:.3f}..{found['high']:.3f}" if found["low"] is not None else "-"
        ratio = f"{found['ratio']:.3f}" if found["ratio"] is not None else "-"
        table.add_row(found["name"], found["against"], ratio, interval, found["verdict"], found["why"])
    options.show(table)
