"""Draws `limits`: what the parts of a step take of its time, and how much of that is their bounds.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_moe.bench.plots.axes import CYCLE, Named, heading, quiet

FIELDS = ("step_s", "rest_s", "samples_s")
PART_FIELDS = ("part", "seconds")
# So many parts have a colour; the others are drawn as one.
NAMED_PARTS = len(CYCLE) - 1


def draw_limits(results: Sequence[Named], plt: Any) -> Any:
    """Draws a panel for each file, with a bar for each row. A part is drawn full as far as its
    bound goes, and pale beyond.
    """
    widest = max(len(found["rows"]) for _, found in results)
    figure, axes = plt.subplots(
        len(results), 1, figsize=(2.5 + 1.3 * widest, 4.6 * len(results)), squeeze=False, layout="constrained"
    )
    figure.suptitle("\n".join(["Where a step goes", *(heading(*one) for one in results)]), fontsize=10)
    for (axis,), (_, found) in zip(axes, results, strict=True):
        _panel(axis, found["rows"])
    return figure


def _panel(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    shares = [_shares(row) for row in rows]
    total: dict[str, float] = {}
    for one in shares:
        for name, (part, _) in one.items():
            total[name] = total.get(name, 0.0) + part
    named = sorted(total, key=lambda name: -total[name])[:NAMED_PARTS]
    below = [0.0] * len(rows)
    for name, color in zip([*named, "others"], CYCLE, strict=False):
        chosen = [name] if name in named else [one for one in total if one not in named]
        for place, one in enumerate(shares):
            part, bound = (sum(one.get(each, (0.0, 0.0))[at] for each in chosen) for at in (0, 1))
            full = min(part, bound)
            axis.bar(place, full, bottom=below[place], color=color, width=0.72)
            label = name if place == 0 else None
            axis.bar(place, part - full, bottom=below[place] + full, color=color, width=0.72, alpha=0.4, label=label)
            below[place] += part
    for place, row in enumerate(rows):
        share = row.get("share")
        text = f"{1e3 * row['step_s']:.1f} ms" + (f"\nbounds {share:.0%}" if isinstance(share, float) else "")
        axis.annotate(text, (place, below[place]), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=8)
    axis.set_xticks(range(len(rows)), [row["name"].replace(", ", "\n") for row in rows], fontsize=8)
    axis.set_ylim(0, 118)
    axis.set_ylabel("% of a step; full colour: its bound")
    axis.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    quiet(axis)


def _shares(row: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Returns the time of each part and its bound, in percent of the step."""
    scale = 100 / row["step_s"]
    return {part["part"]: (scale * part["seconds"], scale * (part.get("bound_s") or 0.0)) for part in row["parts"]}
