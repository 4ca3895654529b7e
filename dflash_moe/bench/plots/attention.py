"""Draws `attention`: the time of a call over the context, and the share of the read speed or of the
peak that it reaches.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_moe.bench.plots.axes import CYCLE, MARKERS, Named, bars, heading, quiet

FIELDS = ("kv_dtype", "rows", "context", "threads", "us", "share_of_read", "share_of_peak")
APPEND_FIELDS = ("kv_dtype", "through", "calls", "us")


def draw_attention(results: Sequence[Named], plt: Any) -> Any:
    """Draws three panels for each file: decode rows, chunks of a prefill, and storing tokens."""
    figure, axes = plt.subplots(len(results), 4, figsize=(19, 4.4 * len(results) + 0.8), squeeze=False, layout="constrained")
    figure.suptitle("\n".join(["Paged attention", *(heading(*one) for one in results)]), fontsize=10)
    for (times, shares, chunks, appends), (_, found) in zip(axes, results, strict=True):
        _decode(times, shares, [row for row in found["rows"] if row["name"] == "decode"])
        _chunks(chunks, [row for row in found["rows"] if row["name"] == "prefill"])
        _appends(appends, [row for row in found["rows"] if is_append(row)])
    return figure


def is_append(row: Mapping[str, Any]) -> bool:
    """Says whether the row is about storing tokens."""
    return str(row.get("name", "")).startswith("append")


def _decode(times: Any, shares: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    series = list(dict.fromkeys((row["kv_dtype"], row["threads"]) for row in rows))
    threads = sorted({count for _, count in series})
    dtypes = list(dict.fromkeys(dtype for dtype, _ in series))
    for dtype, count in series:
        own = sorted((row for row in rows if (row["kv_dtype"], row["threads"]) == (dtype, count)), key=_context)
        style = {
            "color": CYCLE[dtypes.index(dtype) % len(CYCLE)],
            "marker": MARKERS[threads.index(count) % len(MARKERS)],
            "linestyle": "-" if count == threads[0] else "--",
            "markersize": 5,
            "label": f"{dtype}, {count} thread{'' if count == 1 else 's'}",
        }
        contexts = [_context(row) for row in own]
        times.plot(contexts, [row["us"] for row in own], **style)
        shares.plot(contexts, [100 * row["share_of_read"] for row in own], **style)
    times.set(xscale="log", yscale="log", xlabel="context (tokens)", ylabel="one row in one layer (us)")
    shares.set(xscale="log", xlabel="context (tokens)", ylabel="share of the read speed (%)", ylim=(0, None))
    for axis in (times, shares):
        quiet(axis)
        if series:
            axis.legend(fontsize=8)


def _context(row: Mapping[str, Any]) -> int:
    return int(row["context"])


def _chunks(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        axis.set_visible(False)
        return
    values = [100 * row["share_of_peak"] for row in rows]
    names = [f"{row['kv_dtype']}\n{row['threads']} thr." for row in rows]
    bars(axis, values, [CYCLE[0]] * len(rows), [f"{value:.0f}" for value in values], names)
    sizes = " and ".join(dict.fromkeys(f"{row['rows']} of {row['context']:,} tokens" for row in rows))
    axis.set(ylabel=f"share of the multiply-add peak (%), {sizes}")


def _appends(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        axis.set_visible(False)
        return
    values = [row["us"] for row in rows]
    names = [f"{row['kv_dtype']}\n{row['through']}\n{row['calls']}" for row in rows]
    colors = [CYCLE[2] if row["calls"] == 1 else CYCLE[1] for row in rows]
    bars(axis, values, colors, [f"{value:.0f}" for value in values], names)
    axis.set(ylabel="storing the tokens of a step in one layer (us), by calls", yscale="log")
