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
    options.show_rows(
        (row for row in rows if "floor_us" in row),
        ("transport", "{name}"),
        ("bytes each way", "{payload_bytes:,}"),
        ("p50 us", "{p50_us:.2f}"),
        ("p99 us", "{p99_us:.2f}"),
        ("floor us", "{floor_us:.2f}"),
        ("x floor", lambda row: f"{row['p50_us'] / row['floor_us']:.2f}"),
        ("GB/s", lambda row: f"{row['bytes_per_s'] / 1e9:.2f}"),
        ("memcpy GB/s", lambda row: f"{row['memcpy_bytes_per_s'] / 1e9:.2f}"),
    )
    if encrypted := [row for row in rows if "without_us" in row]:
        # What encryption adds, measured in turns with the same transport in clear.
        options.show_rows(
            encrypted,
            ("encrypted", "{adds_to}"),
            ("bytes each way", "{payload_bytes:,}"),
            ("p50 us", "{p50_us:.2f}"),
            ("in clear us", "{without_us:.2f}"),
            ("added us", lambda row: f"{row['p50_us'] - row['without_us']:.2f}"),
            ("libssl alone us", "{floor_us:.2f}"),
        )
    if calls := [row for row in rows if "added_p50_us" in row]:
        options.show_rows(
            calls,
            ("expert call over", "{transport}"),
            ("tokens", "{tokens}"),
            ("p50 us", lambda row: f"{row['median_s'] * 1e6:.1f}"),
            ("worker us", "{worker_p50_us:.1f}"),
            ("added p50 us", "{added_p50_us:.1f}"),
            ("added p99 us", "{added_p99_us:.1f}"),
        )


def print_processes(processes: Sequence[Mapping[str, Any]]) -> None:
    """Prints what each process has resident. `resident_memory` of bench/model_host.py makes the
    rows.
    """
    options.show_rows(
        processes,
        ("process", "{name}"),
        ("experts a layer", "{experts_per_layer}"),
        ("weights MiB", lambda process: f"{process['weight_bytes'] / MIB:.0f}"),
        ("anonymous MiB", lambda process: f"{process['anonymous_bytes'] / MIB:.0f}"),
        ("file-backed MiB", lambda process: f"{process['file_bytes'] / MIB:.0f}"),
    )


def print_prefill(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints time, calls and bytes of the prefill, and of the decode after it."""
    options.show_rows(
        rows,
        ("mode", "{mode}"),
        ("dtype", "{dtype}"),
        ("prompt", "{prompt_tokens:,}"),
        ("prefill s", "{median_s:.3f}"),
        ("tokens/s", "{tokens_per_s:.0f}"),
        ("calls", "{calls:,}"),
        ("request MiB", lambda row: f"{row['request_bytes'] / MIB:.3f}"),
        ("reply MiB", lambda row: f"{row['reply_bytes'] / MIB:.3f}"),
        ("of floor", lambda row: f"{1 / row['wire_efficiency']:.4f}" if row["wire_efficiency"] else "-"),
        ("decode tokens/s", lambda row: f"{row['decode_tokens_per_s']:.1f}" if "decode_tokens_per_s" in row else "-"),
        ("decode calls", "{decode_calls:,}"),
    )
    for reason in dict.fromkeys(row["mode_reason"] for row in rows if row["mode"] == "auto"):
        typer.echo(f"{reason}\n")


def print_summary(summary: Sequence[Mapping[str, Any]]) -> None:
    """Prints how `auto` did against the better fixed mode, and its prediction against the
    measurement.
    """
    if not summary:
        return

    def slowest(entry: Mapping[str, Any], key: str) -> str:
        """Returns a time of the worker that took longest."""
        measured = [found for found in entry["predictions"].values() if found["measured_s"] is not None]
        found = max(measured, key=lambda one: float(one["measured_s"]), default=None)
        return f"{found[key] * 1e3:.1f} ms" if found else "-"

    options.show_rows(
        summary,
        ("prompt", "{prompt_tokens:,}"),
        ("dtype", "{dtype}"),
        ("better fixed mode", "{better_fixed}"),
        ("its time / auto's", "{median_ratio:.3f}"),
        ("rounds", "{rounds}"),
        ("auto predicted", lambda entry: slowest(entry, "predicted_s")),
        ("measured", lambda entry: slowest(entry, "measured_s")),
    )


def print_decode(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the latency of a token, and the calls and bytes for each."""
    options.show_rows(
        rows,
        ("mode", "{mode}"),
        ("dtype", "{dtype}"),
        ("tokens/s", "{tokens_per_s:.1f}"),
        ("p50 ms", lambda row: f"{row['p50_s'] * 1e3:.2f}"),
        ("p95 ms", lambda row: f"{row['p95_s'] * 1e3:.2f}"),
        ("p99 ms", lambda row: f"{row['p99_s'] * 1e3:.2f}"),
        ("calls/token", "{calls_per_token:.1f}"),
        ("bytes/token", lambda row: f"{row['request_bytes_per_token'] + row['reply_bytes_per_token']:,.0f}"),
        ("floor/token", "{floor_bytes_per_token:,.0f}"),
        ("MB read/token", lambda row: f"{row['read_bytes_per_token'] / 1e6:.2f}"),
        ("of read", lambda row: "-" if row["share_of_read"] is None else f"{row['share_of_read']:.0%}"),
    )


def print_comparison(verdicts: Sequence[Mapping[str, Any]]) -> None:
    """Prints one line for each pair of rows that were compared."""
    options.show_rows(
        verdicts,
        ("row", "{name}"),
        ("against", "{against}"),
        ("time ratio", lambda found: "-" if found["ratio"] is None else f"{found['ratio']:.3f}"),
        ("95 % interval", lambda found: "-" if found["low"] is None else f"{found['low']:.3f}..{found['high']:.3f}"),
        ("verdict", "{verdict}"),
        ("why", "{why}"),
    )
