"""What all pictures share: colours, titles, dots and numbers on bars. It needs matplotlib, and only
painters import it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# These colours of Okabe and Ito, "Color Universal Design", are told apart with any common colour
# vision.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY, BLACK = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C8C8C", "#000000",
)  # fmt: skip
CYCLE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
MODE_COLORS = {"stream": ORANGE, "batched": BLUE, "auto": GREEN, "local": GREY}
MIB = 1 << 20
# The dots of a bar spread over this fraction of its place, to either side.
DOT_SPREAD = 0.22

# A result with the name of its file.
Named = tuple[str, Mapping[str, Any]]


def heading(name: str, found: Mapping[str, Any]) -> str:
    """Returns the model, topology, machine and commit of a result in one or two lines."""
    params, machine = found["params"], found["machine"]
    parts = [name] if name != "this run" else []
    if params.get("model"):
        parts.append(f"model {params['model']}")
    if workers := params.get("workers"):
        parts.append(topology_text(workers) if isinstance(workers, list) else f"{workers} workers")
    lines = [" · ".join(parts)] if parts else []
    commit = str(found["commit"])[:10] + (" (changed tree)" if found.get("dirty") else "")
    cores = f", {machine['cores_usable']} cores" if "cores_usable" in machine else ""
    unfinished = "" if found.get("complete", True) else " · INCOMPLETE"
    lines.append(f"{machine.get('cpu', 'unknown machine')}{cores} · commit {commit}{unfinished}")
    return "\n".join(lines)


def topology_text(workers: Sequence[Mapping[str, Any]]) -> str:
    """Returns a text such as `w0: 1 thread, shared | w1: 1 thread, unix, 200 Mbit/s, 2 ms`."""
    known = [worker for worker in workers if isinstance(worker, Mapping)]
    return " | ".join(_worker_text(worker) for worker in known[:4]) + (" | ..." if len(known) > 4 else "")


def _worker_text(worker: Mapping[str, Any]) -> str:
    threads = worker.get("threads") or "?"
    parts = [f"{threads} thread{'' if threads == 1 else 's'}", str(worker.get("address", "shared"))]
    emulate = worker.get("emulate")
    for key, unit in (("slowdown", "x slower"), ("mbit_s", " Mbit/s"), ("delay_ms", " ms"), ("jitter_ms", " ms jitter")):
        value = emulate.get(key) if isinstance(emulate, Mapping) else None
        if isinstance(value, int | float) and value and (key, value) != ("slowdown", 1):
            parts.append(f"{value:g}{unit}")
    return f"{worker.get('name', '?')}: {', '.join(parts)}"


def seconds_text(seconds: float) -> str:
    """Returns three digits with the unit that fits."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def count_text(count: float) -> str:
    """Returns a text such as `25,488`."""
    return f"{count:,.0f}"


def bars(
    axis: Any,
    values: Sequence[float],
    colors: Sequence[str],
    texts: Sequence[str],
    labels: Sequence[str],
    *,
    tops: Sequence[float] | None = None,
) -> None:
    """Draws a bar for each value. Its text stands above the bar, or above `tops` where something
    else is drawn on the bar.
    """
    places = range(len(values))
    axis.bar(places, values, color=colors, width=0.72, alpha=0.85)
    for place, value, text in zip(places, tops or values, texts, strict=True):
        axis.annotate(text, (place, value), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=8)
    axis.set_xticks(list(places), labels, fontsize=8)
    axis.set_xlim(-0.6, len(values) - 0.4)
    quiet(axis)


def dots(axis: Any, place: float, samples: Sequence[float]) -> None:
    """Draws every sample as a dot, side by side in the order of measurement."""
    last = max(1, len(samples) - 1)
    xs = [place + DOT_SPREAD * (2 * at / last - 1) if len(samples) > 1 else place for at in range(len(samples))]
    axis.plot(xs, samples, linestyle="none", marker="o", markersize=3, color=BLACK, alpha=0.55, zorder=3)


def quiet(axis: Any) -> None:
    """Gives an axis a light grid behind the values and no frame."""
    axis.grid(visible=True, axis="y", alpha=0.25)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
