"""Writes numbers as the documents have them, and Markdown tables.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def seconds(value: float) -> str:
    """Returns three digits in the unit that fits: "0.21 us", "96 ms", "12.8 s"."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if value * factor < 999.5:
            return f"{digits(value * factor)} {unit}"
    return f"{digits(value)} s"


def digits(value: float) -> str:
    """Returns about three significant digits with at most two decimals and separated thousands, so
    that the columns of a table stay readable.
    """
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(share: float) -> str:
    """Returns a text such as "81%"."""
    return f"{100 * share:.0f}%"


def ratio(value: float) -> str:
    """Returns a text such as "1.004"."""
    return f"{value:.3f}"


def mebibytes(num_bytes: float) -> str:
    """Returns a text such as "203.7", without the unit, which the head has."""
    return f"{num_bytes / 2**20:,.1f}"


def gigabytes_per_s(bytes_per_s: float) -> str:
    """Returns a text such as "47.5", without the unit."""
    return f"{bytes_per_s / 1e9:.1f}"


def payload(num_bytes: int) -> str:
    """Returns a text such as "64 B", "8 KiB" or "4 MiB"."""
    for size, unit in ((2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= size and num_bytes % size == 0:
            return f"{num_bytes // size} {unit}"
    return f"{num_bytes:,} B"


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table. Every line has as many cells as the head."""
    rows = [list(head), ["---"] * len(head), *map(list, lines)]
    if any(len(row) != len(head) for row in rows):
        raise ValueError(f"a line does not fit the head {list(head)}")
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
