"""Writes the tables of llama.cpp as a host of our workers.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable

from bench.documents.recorded import Recorded
from bench.documents.text import digits, markdown, ratio, seconds

HOSTS = {"local": "llama.cpp alone", "rpc": "its RPC", "ours": "our worker", "fast": "our worker, fast"}


def hosts(recorded: Recorded) -> str:
    """Writes every format, phase and kind of host, with the ratios that the campaign made."""
    ratios = {(line["format"], line["phase"], line["name"]): line for line in recorded.summary("llama_hosts")}
    lines = []
    for row in recorded.rows("llama_hosts", lambda row: row["phase"] != "call"):
        made = ratios.get((row.get("format", ""), row["phase"], row["name"]), {})
        lines.append(
            (
                row.get("format", "f16"),
                row["phase"] if row["phase"] != "slots" else f"{row['slots']} slots",
                HOSTS[row["name"]],
                digits(row["tokens_per_s"]),
                digits(made["against_rpc"]) if "against_rpc" in made else "-",
                digits(made["against_local"]) if "against_local" in made else "-",
            )
        )
    return markdown(("format", "phase", "experts by", "tokens/s", "x RPC", "x alone"), lines)


def exchange(recorded: Recorded) -> str:
    """Writes calls and bytes of every row that calls workers, and what a call adds."""
    lines = []
    for row in recorded.rows("llama_hosts", lambda row: "messages" in row):
        lines.append(
            (
                row["format"],
                row["phase"],
                HOSTS[row["name"]],
                f"{row['calls']:,}",
                f"{row['messages']:,}",
                ratio(row["bytes_over_floor"]),
                digits(row["excess_bytes_per_layer"]),
            )
        )
    return markdown(
        ("format", "phase", "experts by", "calls", "requests", "x floor", "bytes over the floor, layer and forward"),
        lines,
    )


def added(recorded: Recorded) -> str:
    """Writes what a call adds to the worker's own time."""
    rows = recorded.rows("llama_hosts", lambda row: row["phase"] == "call")
    return markdown(
        ("calls", "added, p50", "added, p95"),
        ((f"{len(row['samples_s']):,}", seconds(row["median_s"]), seconds(row["p95_s"])) for row in rows),
    )


def architectures(recorded: Recorded) -> str:
    """Writes the distance of logits for each architecture."""
    rows = recorded.rows("llama_check")
    return markdown(
        ("architecture", "calls", "NMSE of logits"),
        ((row["name"], str(row["calls"]), f"{row['nmse']:.0e}") for row in rows),
    )


TABLES: dict[str, Callable[[Recorded], str]] = {
    "llama-hosts": hosts,
    "llama-exchange": exchange,
    "llama-added": added,
    "llama-architectures": architectures,
}
