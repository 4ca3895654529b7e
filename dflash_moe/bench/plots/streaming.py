"""Draws `streaming`: tokens a second, and percentiles of the first token, of gaps between tokens
and of whole requests.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_moe.bench.plots.axes import BLUE, CYCLE, Named, bars, dots, heading, quiet

FIELDS = ("samples_s", "tokens_per_s")
TIMES = {"ttft_s": "to the first token", "itl_s": "between tokens", "latency_s": "of a request"}
PERCENTILES = ("p50", "p95", "p99")
# The three bars of a row share so much of its place.
WIDTH = 0.8


def draw_streaming(results: Sequence[Named], plt: Any) -> Any:
    """Draws four panels for each file."""
    figure, axes = plt.subplots(len(results), 4, figsize=(17, 3.4 * len(results) + 1.0), squeeze=False, layout="constrained")
    figure.suptitle("\n".join(["Server: requests as clients see them", *(heading(*one) for one in results)]), fontsize=10)
    for (speeds, *panels), (_, found) in zip(axes, results, strict=True):
        rows = found["rows"]
        values = [row["tokens_per_s"] for row in rows]
        samples = [[1 / seconds for seconds in row["samples_s"]] for row in rows]
        labels = [row["name"] for row in rows]
        tops = [max(one) for one in samples]
        bars(speeds, values, [BLUE] * len(rows), [f"{value:.0f}" for value in values], labels, tops=tops)
        for place, one in enumerate(samples):
            dots(speeds, place, one)
        speeds.set_ylabel("tokens/s, all requests")
        for axis, (key, text) in zip(panels, TIMES.items(), strict=True):
            _percentiles(axis, rows, key)
            axis.set_ylabel(f"{text}, ms")
    return figure


def _percentiles(axis: Any, rows: Sequence[Mapping[str, Any]], key: str) -> None:
    each = WIDTH / len(PERCENTILES)
    for at, (name, color) in enumerate(zip(PERCENTILES, CYCLE, strict=False)):
        places = [place + each * (at - (len(PERCENTILES) - 1) / 2) for place in range(len(rows))]
        seconds = [row[key][name] if row.get(key) else 0.0 for row in rows]
        axis.bar(places, [1e3 * one for one in seconds], width=0.94 * each, color=color, alpha=0.85, label=name)
        for place, one in zip(places, seconds, strict=True):
            top = place, 1e3 * one
            axis.annotate(f"{1e3 * one:.3g}", top, xytext=(0, 3), textcoords="offset points", ha="center", fontsize=6)
    axis.set_xticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
    axis.legend(fontsize=7, frameon=False)
    quiet(axis)
