"""Draws `scheduler`: decode tokens a second, time to the first token and between tokens, and what
the engine takes of a step.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_moe.bench.plots.axes import BLUE, CYCLE, GREY, Named, bars, dots, heading, quiet, seconds_text

FIELDS = ("batch", "samples_s", "decode_tokens", "decode_tokens_per_s")
TIMES = ("ttft_s", "tpot_s")
PARTS = ("plan_s", "sample_s", "commit_s", "deliver_s")


def draw_scheduler(results: Sequence[Named], plt: Any) -> Any:
    """Draws four panels for each file."""
    figure, axes = plt.subplots(len(results), 4, figsize=(17, 3.4 * len(results) + 1.0), squeeze=False, layout="constrained")
    figure.suptitle("\n".join(["Engine: requests submitted together", *(heading(*one) for one in results)]), fontsize=10)
    for (speeds, first, later, parts), (_, found) in zip(axes, results, strict=True):
        rows = found["rows"]
        labels = [row["name"] for row in rows]
        colors = [BLUE if "per_step_s" in row else GREY for row in rows]
        values = [row["decode_tokens_per_s"] for row in rows]
        samples = [[row["decode_tokens"] / seconds for seconds in row["samples_s"]] for row in rows]
        bars(speeds, values, colors, [f"{value:.0f}" for value in values], labels, tops=[max(one) for one in samples])
        for place, one in enumerate(samples):
            dots(speeds, place, one)
        speeds.set_ylabel("decode tokens/s, all requests")
        for axis, key, text in ((first, "ttft_s", "to the first token"), (later, "tpot_s", "a later token")):
            medians = [row[key]["p50"] for row in rows]
            texts = [seconds_text(median) for median in medians]
            bars(axis, [1e3 * median for median in medians], colors, texts, labels)
            axis.set_ylabel(f"{text}, ms (median)")
        _parts(parts, [row for row in rows if "per_step_s" in row])
    return figure


def _parts(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        axis.set_visible(False)
        return
    below = [0.0] * len(rows)
    for part, color in zip(PARTS, CYCLE, strict=False):
        heights = [1e6 * row["per_step_s"][part] for row in rows]
        axis.bar(
            range(len(rows)),
            heights,
            bottom=below,
            color=color,
            width=0.72,
            alpha=0.85,
            label=part.removesuffix("_s"),
        )
        below = [low + height for low, height in zip(below, heights, strict=True)]
    for place, (row, top) in enumerate(zip(rows, below, strict=True)):
        axis.annotate(
            f"{row['engine_share']:.1%}",
            (place, top),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    axis.set_xticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
    axis.set_ylim(0, 1.18 * max(max(below), 1e-9))
    axis.set_ylabel("a step beside the model (us)")
    axis.legend(fontsize=7, frameon=False)
    quiet(axis)
