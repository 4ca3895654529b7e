"""Picture of `experts`: a roofline per backend and number of threads. Left of the ridge bytes bound, right of it operations.

A row's place: operations per byte of the distinct experts it touched, against operations per second. Its roof is the lower
of the peaks measured in the same run.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_moe.bench.plot_axes import BLACK, CYCLE, GREY, MARKERS, Named, heading

FIELDS = ("format", "tokens", "gflops", "bytes_per_s", "peak_gflops", "peak_bytes_per_s")
TOKENS_LABELLED = 14  # more points of one series would write over each other


def draw_experts(results: Sequence[Named], plt: Any) -> Any:
    """A panel per file and (backend, threads); a colour per series, hollow marks for weights from cache and for torch."""
    panels = [(name, found, key, rows) for name, found in results for key, rows in _panels(found["rows"]).items()]
    figure, axes = plt.subplots(1, len(panels), figsize=(8.2 * len(panels), 6.2), squeeze=False, layout="constrained")
    figure.suptitle("\n".join(["Expert layer: roofline", *(heading(*one) for one in results)]), fontsize=10)
    for axis, (_, _, key, rows) in zip(axes[0], panels, strict=True):
        _roofs(axis, rows)
        for at, (series, own) in enumerate(_series(rows).items()):
            _points(axis, series, own, at)
        axis.set(xscale="log", yscale="log", xlabel="operations per byte of touched experts", ylabel="GFLOP/s")
        axis.set_title(", ".join(part for part in key if part), fontsize=9)
        axis.grid(visible=True, which="major", alpha=0.25)
        axis.legend(fontsize=7, loc="lower right")
    return figure


def _panels(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    panels: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        threads = row.get("threads")
        key = (str(row.get("backend", "")), f"{threads} thread{'' if threads == 1 else 's'}" if threads else "")
        panels.setdefault(key, []).append(row)
    return panels


def _series(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, bool, bool], list[Mapping[str, Any]]]:
    """(format, torch?, from cache?) -> its rows by tokens."""
    series: dict[tuple[str, bool, bool], list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: int(row["tokens"])):
        key = (str(row["format"]), str(row["name"]).startswith("torch"), row.get("weights_from") == "cache")
        series.setdefault(key, []).append(row)
    return series


def _points(axis: Any, series: tuple[str, bool, bool], rows: Sequence[Mapping[str, Any]], at: int) -> None:
    name, is_torch, from_cache = series
    color = CYCLE[at % (len(CYCLE) - 1)]
    xs = [1e9 * row["gflops"] / row["bytes_per_s"] for row in rows]
    ys = [row["gflops"] for row in rows]
    suffix = (" torch" if is_torch else "") + (" from cache" if from_cache else "")
    axis.plot(
        xs, ys, linestyle=":" if is_torch else "-", linewidth=0.8, marker=MARKERS[at % len(MARKERS)], markersize=6, color=color,
        markerfacecolor="none" if is_torch or from_cache else color, label=name + suffix,
    )  # fmt: skip
    if at == 0 and len(rows) <= TOKENS_LABELLED:
        for x, y, row in zip(xs, ys, rows, strict=True):
            axis.annotate(
                f"T={row['tokens']}", (x, y), xytext=(0, -13), textcoords="offset points", fontsize=7, color=color, ha="center"
            )


def _roofs(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """One roof per distinct arithmetic peak (float32, integer), from the medians over rows."""
    intensities = [1e9 * row["gflops"] / row["bytes_per_s"] for row in rows]
    low, high = min(intensities) / 3, max(intensities) * 3
    ordered = sorted(row["peak_bytes_per_s"] for row in rows)
    bytes_per_s = ordered[len(ordered) // 2]
    peaks: list[float] = []
    for row in sorted(rows, key=lambda row: float(row["peak_gflops"])):
        if not peaks or row["peak_gflops"] > 1.5 * peaks[-1]:  # the same peak varies by less between rows
            peaks.append(row["peak_gflops"])
    for peak in peaks:
        ridge = max(low, min(high, 1e9 * peak / bytes_per_s))
        axis.plot([low, ridge, high], [low * bytes_per_s / 1e9, peak, peak], color=BLACK, linewidth=1.2, zorder=1)
        axis.annotate(
            f"peak {peak:.0f} GFLOP/s",
            (high, peak),
            xytext=(-2, 4),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=GREY,
        )
    slope_x = low * 1.3
    place = (slope_x, slope_x * bytes_per_s / 1e9)
    text = f"read {bytes_per_s / 1e9:.1f} GB/s"
    axis.annotate(text, place, xytext=(6, -8), textcoords="offset points", fontsize=8, color=GREY)
