"""Draws `prefill` and `decode`: a bar for each mode with every sample as a dot, calls, and bytes
against the floor.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_moe.bench.plots.axes import (
    BLACK,
    GREY,
    MIB,
    MODE_COLORS,
    ORANGE,
    SKY,
    Named,
    bars,
    count_text,
    dots,
    heading,
    quiet,
    seconds_text,
)  # fmt: skip

PREFILL_FIELDS = (
    "mode", "dtype", "samples_s", "median_s", "calls", "request_bytes", "reply_bytes", "floor_bytes",
)  # fmt: skip
DECODE_FIELDS = (
    "mode", "dtype", "samples_s", "median_s", "p95_s", "p99_s", "calls_per_token", "request_bytes_per_token",
    "reply_bytes_per_token", "floor_bytes_per_token",
)  # fmt: skip
# One panel has this width and height, in inches.
PANEL = (4.9, 3.4)
# The labels of bars narrower than this, in inches, touch each other.
BAR_INCHES = 0.75


def draw_prefill(results: Sequence[Named], plt: Any) -> Any:
    """Draws a line of three panels for each file and length of prompt: seconds, calls, and MiB both
    ways against the floor.
    """
    lines = []
    for name, found in results:
        # Files whose rows do not carry the length have it among their parameters.
        default = found["params"].get("prompt_tokens", 0)
        default = default if isinstance(default, int) else 0
        for length in dict.fromkeys(row.get("prompt_tokens", default) for row in found["rows"]):
            lines.append((name, found, length, [row for row in found["rows"] if row.get("prompt_tokens", default) == length]))
    figure, axes = _grid(plt, lines, "Prefill: time, calls and bytes per mode")
    for (times, calls, moved), (_, _, length, rows) in zip(axes, lines, strict=True):
        labels, colors = _labels(rows)
        highest = max(max(row["samples_s"]) for row in rows)
        factor, unit = (1.0, "seconds") if highest >= 1 else (1e3, "milliseconds")
        tops = [factor * max(row["samples_s"]) for row in rows]
        texts = [seconds_text(row["median_s"]) for row in rows]
        bars(times, [factor * row["median_s"] for row in rows], colors, texts, labels, tops=tops)
        for place, row in enumerate(rows):
            dots(times, place, [factor * one for one in row["samples_s"]])
        times.set_ylabel(f"{length:,} tokens\nprefill, {unit}")
        _head_room(times, factor * highest)
        bars(calls, [row["calls"] for row in rows], colors, [count_text(row["calls"]) for row in rows], labels)
        calls.set_ylabel("calls (log)")
        calls.set_yscale("log")
        calls.set_ylim(1, 4 * max(row["calls"] for row in rows))
        _bytes_panel(moved, rows, labels, scale=MIB, unit="MiB moved", suffix="_bytes")
    _column_titles(
        axes,
        ("bar and number: median; dots: all samples", "one request and one reply each", "line: floor of an ideal ragged call"),
    )
    return figure


def draw_decode(results: Sequence[Named], plt: Any) -> Any:
    """Draws a line of three panels for each file: the latency of a token, its calls, and its KiB
    against the floor.
    """
    lines = [(name, found, 0, found["rows"]) for name, found in results]
    figure, axes = _grid(plt, lines, "Decode: one token in every mode")
    for (times, calls, moved), (_, _, _, rows) in zip(axes, lines, strict=True):
        labels, colors = _labels(rows)
        milliseconds = [[1e3 * one for one in row["samples_s"]] for row in rows]
        boxes = times.boxplot(
            milliseconds, positions=range(len(rows)), widths=0.6, showfliers=False, patch_artist=True, whis=(5, 95),
            medianprops={"color": BLACK},
        )  # fmt: skip
        for box, color in zip(boxes["boxes"], colors, strict=True):
            box.set(facecolor=color, alpha=0.85)
        for place, row in enumerate(rows):
            times.plot(place, 1e3 * row["p99_s"], marker="_", markersize=14, color=BLACK)
            top = 1e3 * max(row["p99_s"], row["p95_s"])
            times.annotate(
                f"{seconds_text(row['median_s'])}",
                (place, top),
                xytext=(0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        times.set_xticks(range(len(rows)), labels, fontsize=8)
        times.set_ylabel("a token, milliseconds")
        _head_room(times, max(1e3 * row["p99_s"] for row in rows))
        quiet(times)
        per_token = [row["calls_per_token"] for row in rows]
        bars(calls, per_token, colors, [f"{value:g}" for value in per_token], labels)
        calls.set_ylabel("calls per token")
        _head_room(calls, max(per_token))
        _bytes_panel(moved, rows, labels, scale=1024, unit="KiB per token", suffix="_bytes_per_token")
    titles = ("box: 25-75 %, whiskers 5-95 %, dash: p99; number: median", "calls", "line: floor of an ideal ragged call")
    _column_titles(axes, titles)
    return figure


def _bytes_panel(
    axis: Any, rows: Sequence[Mapping[str, Any]], labels: Sequence[str], *, scale: int, unit: str, suffix: str
) -> None:
    """Draws requests and replies stacked, the floor as a line across the bar, and the ratio to it
    above.
    """
    places = range(len(rows))
    requests, replies, floors = ([row[key + suffix] / scale for row in rows] for key in ("request", "reply", "floor"))
    axis.bar(places, requests, color=SKY, width=0.72, label="requests")
    axis.bar(places, replies, bottom=requests, color=ORANGE, width=0.72, alpha=0.7, label="replies")
    for place, request, reply, floor in zip(places, requests, replies, floors, strict=True):
        axis.hlines(floor, place - 0.42, place + 0.42, color=BLACK, linewidth=1.4, label="floor" if place == 0 else None)
        text = f"{(request + reply) / floor:.3f} x" if floor else "-"
        axis.annotate(
            text, (place, max(floor, request + reply)), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=8
        )
    axis.set_xticks(list(places), labels, fontsize=8)
    axis.set_xlim(-0.6, len(rows) - 0.4)
    axis.set_ylabel(unit)
    _head_room(
        axis, max(map(max, zip(floors, (a + b for a, b in zip(requests, replies, strict=True)), strict=True))), room=1.32
    )
    axis.legend(loc="upper center", ncols=3, fontsize=7, frameon=False)
    quiet(axis)


def _grid(plt: Any, lines: Sequence[tuple[str, Mapping[str, Any], int, Sequence[Any]]], title: str) -> tuple[Any, Any]:
    widest = max(len(rows) for *_, rows in lines)
    width = 3 * max(PANEL[0], BAR_INCHES * widest + 1.0)
    figure, axes = plt.subplots(
        len(lines), 3, figsize=(width, PANEL[1] * len(lines) + 1.0), squeeze=False, layout="constrained"
    )
    headings = dict.fromkeys(heading(name, found) for name, found, *_ in lines)
    figure.suptitle("\n".join([title, *headings]), fontsize=10)
    return figure, axes


def _labels(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    return [f"{row['mode']}\n{row['dtype']}" for row in rows], [MODE_COLORS.get(row["mode"], GREY) for row in rows]


def _head_room(axis: Any, highest: float, room: float = 1.18) -> None:
    axis.set_ylim(0, highest * room if highest > 0 else 1)


def _column_titles(axes: Any, titles: Sequence[str]) -> None:
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=8)
