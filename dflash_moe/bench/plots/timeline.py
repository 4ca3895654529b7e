"""Draws a timeline of `bench prefill --timeline`: the slices of one layer, in a lane for the host
and in lanes for each worker.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_moe.bench.plots.axes import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, Named, heading, seconds_text

FIELDS = (
    "worker", "call", "num_rows", "encode_start_ns", "published_ns", "arrived_ns", "combined_ns", "worker_received_ns",
    "worker_started_ns", "worker_finished_ns",
)  # fmt: skip
HOST_STAGES = (("encode", "encode_start_ns", "published_ns", BLUE),)
WORKER_STAGES = (
    ("request travels", "published_ns", "worker_received_ns", SKY),
    ("waits at the worker", "worker_received_ns", "worker_started_ns", GREY),
    ("computes", "worker_started_ns", "worker_finished_ns", ORANGE),
    ("reply travels", "worker_finished_ns", "arrived_ns", GREEN),
)
COMBINE = ("combine", PURPLE)
# So many slices of one worker are drawn in lanes of their own; more share the lanes in turn.
MAX_LANES = 8
# These are the heights of a lane and of the space between two workers.
LANE, GAP = 1.0, 0.7
# A computation that takes this fraction of the width has room for its number of rows.
LABELLED = 0.06
# With more slices than this, outlines would be all there is to see.
OUTLINED = 200


def draw_timelines(named: Named, plt: Any) -> Any:
    """Draws a panel for each recorded mode below each other, each with a time axis of its own."""
    timelines = named[1]["timelines"]
    heights = [sum(_num_lanes(own) * LANE + GAP for own in _by_worker(one).values()) + 1.5 for one in timelines]
    figure, axes = plt.subplots(
        len(timelines), 1, figsize=(13, 0.32 * sum(heights) + 1.6 * len(timelines) + 1.0), squeeze=False, layout="constrained",
        height_ratios=heights,
    )  # fmt: skip
    figure.suptitle("One layer's slices\n" + heading(*named), fontsize=10)
    for axis, timeline in zip(axes[:, 0], timelines, strict=True):
        _draw(axis, timeline)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=len(unique), fontsize=8, frameon=False)
    return figure


def _draw(axis: Any, timeline: Mapping[str, Any]) -> None:
    slices = timeline["slices"]
    # Times are recorded in nanoseconds and drawn in milliseconds.
    scale = 1e-6
    wall_ns = max(one["combined_ns"] for one in slices)
    outline = 0.2 if len(slices) <= OUTLINED else 0.0
    ticks, names = [0.0], ["host"]
    for one in slices:
        for label, start, end, color in HOST_STAGES:
            _bar(axis, 0.0, one[start] * scale, one[end] * scale, color, label, outline)
    # A call is combined when its last reply is there.
    for call in dict.fromkeys(one["call"] for one in slices):
        own = [one for one in slices if one["call"] == call]
        last, combined = max(one["arrived_ns"] for one in own), min(one["combined_ns"] for one in own)
        _bar(axis, 0.0, last * scale, combined * scale, COMBINE[1], COMBINE[0], outline)
    top = LANE + GAP
    for worker, own in _by_worker(timeline).items():
        lanes = _num_lanes(own)
        for at, one in enumerate(own):
            height = top + (at % lanes) * LANE
            for label, start, end, color in WORKER_STAGES:
                _bar(axis, height, one[start] * scale, one[end] * scale, color, label, outline)
            if one["worker_finished_ns"] - one["worker_started_ns"] >= LABELLED * wall_ns:
                middle = (one["worker_started_ns"] + one["worker_finished_ns"]) / 2 * scale
                axis.annotate(f"{one['num_rows']} rows", (middle, height), ha="center", va="center", fontsize=7)
        ticks.append(top + (lanes - 1) * LANE / 2)
        names.append(worker)
        top += lanes * LANE + GAP
    axis.set_yticks(ticks, names)
    # The axis points down, so that the host is on top.
    axis.set_ylim(top - GAP + 0.2, -0.8)
    axis.set_xlim(left=0)
    axis.set_xlabel("milliseconds after the first encode", fontsize=8)
    axis.grid(visible=True, axis="x", alpha=0.25)
    axis.set_axisbelow(True)
    axis.set_title(_title(timeline), fontsize=9)


def _title(timeline: Mapping[str, Any]) -> str:
    slices = timeline["slices"]
    wall = (max(one["combined_ns"] for one in slices) - min(one["encode_start_ns"] for one in slices)) / 1e9
    left_out = f", {timeline['slices_left_out']} not shown" if timeline.get("slices_left_out") else ""
    aligned = {name: offset for name, offset in timeline.get("clock_offsets_ns", {}).items() if offset}
    clocks = f"; clock of {', '.join(aligned)} aligned by its shortest round trip" if aligned else ""
    return (
        f"{timeline['mode']} {timeline['dtype']}, {timeline['prompt_tokens']:,} tokens, layer {timeline['layer']}: "
        f"{len(slices)} slices{left_out}, {seconds_text(wall)}{clocks}"
    )


def _bar(axis: Any, height: float, start: float, end: float, color: str, label: str, outline: float) -> None:
    axis.barh(
        height,
        max(end - start, 0.0),
        left=start,
        height=0.78 * LANE,
        color=color,
        label=label,
        edgecolor=BLACK,
        linewidth=outline,
    )


def _by_worker(timeline: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for one in timeline["slices"]:
        found.setdefault(one["worker"], []).append(one)
    return found


def _num_lanes(own: Sequence[Mapping[str, Any]]) -> int:
    return min(MAX_LANES, len(own))
