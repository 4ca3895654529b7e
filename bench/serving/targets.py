"""What the server must reach beside other servers and beside the engine alone, and the summaries
that say whether it did.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
PEERS = ("llama", "vllm")
# Tokens a second of ours by those of the better peer, by format and streams.
AT_LEAST = {
    ("16bit", 1): 1.0, ("16bit", 4): 1.1, ("16bit", 16): 1.4, ("q8_0", 1): 1.1, ("q8_0", 4): 1.8, ("q8_0", 16): 2.4,
}  # fmt: skip
# Tokens a second through the server by those of the same requests in the engine's process.
SHARES = {1: 0.95, 4: 0.95, 16: 0.9}
MOST_FRONT_US = 60.0
# From the end of a step until a client of the same machine has its tokens.
MOST_DELAY_MS = 20.0
# The 99th percentile of gaps beside what is large, by that without.
MOST_GAP_RATIO = 1.2
# Tokens a second of answers that keep to a schema, by those of free ones.
FORMS = "forms"
LEAST_FORMS_RATIO = 0.9


def against_peers(found: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns a line for each mark whose rows were measured."""
    rows = {str(row["name"]): row for row in found}
    lines = []
    for (fmt, streams), mark in AT_LEAST.items():
        if ours := rows.get(f"streams{streams}-{fmt}-ours"):
            lines += _beside(rows, ours, f"streams{streams}-{fmt}", "tokens/s", _speed, at_least=mark)
            if inside := rows.get(f"scheduler-{fmt}"):
                share = ours["tokens_per_s"] / inside["total_tokens_per_s"][str(streams)]
                lines.append(at_least(f"share of the engine's own tokens/s: {ours['name']}", share, SHARES[streams]))
            front_us = ours["server_cpu_us_per_token"]["front"]
            lines.append(at_most(f"the front's CPU a token, us: {ours['name']}", front_us, MOST_FRONT_US))
            if streams == 1:
                lines += _beside(rows, ours, f"streams1-{fmt}", "first token, p50", _first_s, at_most=1.0)
    for fmt in ("16bit", "q8_0"):
        if ours := rows.get(f"arrivals-{fmt}-ours"):
            lines += _beside(rows, ours, f"arrivals-{fmt}", "gaps, p99", _gap_s)
        if row := rows.get(f"leaving-{fmt}-ours"):
            delay_ms = 1e3 * row["delay_s"]["p95"]
            lines.append(at_most(f"from a step to its reader, p95, ms: {row['name']}", delay_ms, MOST_DELAY_MS))
    return [*lines, failures(found)]


def _beside(rows: Mapping[str, Row], ours: Row, of: str, name: str, value: Any, **mark: float) -> list[dict[str, Any]]:
    """Returns the line of one value of ours by that of the better peer; "better" is what the mark
    says, and the smaller one where there is none.
    """
    there = [rows[f"{of}-{peer}"] for peer in PEERS if f"{of}-{peer}" in rows]
    if not there:
        return []
    best = (max if "at_least" in mark else min)(there, key=value)
    ratio = value(ours) / value(best)
    found = {"what": f"{name}: {ours['name']}", "against": best["name"], "ratio": ratio, "share_of_read": None, **mark}
    if mark:
        found["met"] = ratio >= mark["at_least"] if "at_least" in mark else ratio <= mark["at_most"]
    return [found]


def interference(found: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the lines of streams beside what is large, and of streams that keep to a schema."""
    rows = {str(row["name"]): row for row in found}
    alone = rows["alone"]
    lines = [
        at_most(f"gaps, p99, by those alone: {name}", _gap_s(row) / _gap_s(alone), MOST_GAP_RATIO)
        for name, row in rows.items()
        if name not in ("alone", FORMS)
    ]
    if forms := rows.get(FORMS):
        lines.append(at_least("tokens/s with a schema by those without", _speed(forms) / _speed(alone), LEAST_FORMS_RATIO))
    return [*lines, failures(found)]


def failures(found: Sequence[Row]) -> dict[str, Any]:
    """Returns the line of requests that were not answered as they should be."""
    return at_most("requests that failed", sum(row["failed"] + row["refused"] for row in found if "failed" in row), 0)


def at_most(what: str, value: float, most: float) -> dict[str, Any]:
    """Returns the line of a value that is to be small."""
    return {"what": what, "value": value, "at_most": most, "met": value <= most}


def at_least(what: str, value: float, least: float) -> dict[str, Any]:
    """Returns the line of a value that is to be large."""
    return {"what": what, "value": value, "at_least": least, "met": value >= least}


def _speed(row: Row) -> float:
    return float(row["tokens_per_s"])


def _first_s(row: Row) -> float:
    return float(row["ttft_s"]["p50"])


def _gap_s(row: Row) -> float:
    return float(row["itl_s"]["p99"])
