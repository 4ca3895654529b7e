"""Draws `ipc`: round trip and bandwidth over payload, and what an expert call adds.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_moe.bench.plots.axes import BLACK, CYCLE, MARKERS, Named, bars, heading, quiet

ROUND_TRIP_FIELDS = ("payload_bytes", "p50_us", "floor_us", "bytes_per_s", "memcpy_bytes_per_s")
STEP_FIELDS = ("payload_bytes", "p50_us", "bare_us")
CALL_FIELDS = ("transport", "added_p50_us", "added_p99_us")


def draw_ipc(results: Sequence[Named], plt: Any) -> Any:
    """Draws three panels for each file. The raw floor of each kind is the dashed line of its
    colour.
    """
    figure, axes = plt.subplots(len(results), 3, figsize=(16, 4.4 * len(results) + 0.8), squeeze=False, layout="constrained")
    figure.suptitle("\n".join(["Transports: round trips", *(heading(*one) for one in results)]), fontsize=10)
    for (latency, bandwidth, added), (_, found) in zip(axes, results, strict=True):
        rows = [row for row in found["rows"] if not is_call(row) and "step" not in row]
        _lines(latency, bandwidth, rows)
        _added(added, [row for row in found["rows"] if is_call(row)])
    return figure


def fields_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the numbers that a row of this case has."""
    if "step" in row:
        return STEP_FIELDS
    return CALL_FIELDS if is_call(row) else ROUND_TRIP_FIELDS


def is_call(row: Mapping[str, Any]) -> bool:
    """Says whether the row is a `call_<transport>`. All others are round trips."""
    return str(row.get("name", "")).startswith("call_")


def _lines(latency: Any, bandwidth: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    names = list(dict.fromkeys(row["name"] for row in rows))
    for at, name in enumerate(names):
        own = sorted((row for row in rows if row["name"] == name), key=lambda row: int(row["payload_bytes"]))
        payloads = [row["payload_bytes"] for row in own]
        style = {"marker": MARKERS[at % len(MARKERS)], "color": CYCLE[at % len(CYCLE)], "markersize": 5}
        latency.plot(payloads, [row["p50_us"] for row in own], label=name, **style)
        latency.plot(payloads, [row["floor_us"] for row in own], linestyle="--", color=style["color"], alpha=0.6)
        bandwidth.plot(payloads, [row["bytes_per_s"] / 1e9 for row in own], label=name, **style)
    reference = [row for row in rows if row["name"] == names[0]] if names else []
    copies = [row["memcpy_bytes_per_s"] / 1e9 for row in reference]
    bandwidth.plot([row["payload_bytes"] for row in reference], copies, linestyle=":", color=BLACK, label="memcpy")
    latency.set(xscale="log", yscale="log", xlabel="payload each way (bytes)", ylabel="round trip p50 (us)")
    latency.set_title("dashed: raw floor of the same kind", fontsize=8)
    bandwidth.set(xscale="log", xlabel="payload each way (bytes)", ylabel="request + reply (GB/s)")
    for axis in (latency, bandwidth):
        quiet(axis)
        axis.legend(fontsize=8)


def _added(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        axis.set_visible(False)
        return
    values = [row["added_p50_us"] for row in rows]
    bars(axis, values, CYCLE[: len(rows)], [f"{value:.1f}" for value in values], [row["transport"] for row in rows])
    for place, row in enumerate(rows):
        axis.plot(place, row["added_p99_us"], marker="_", markersize=16, color=BLACK)
    axis.set(ylabel="an expert call adds (us), p50; dash: p99", yscale="log")
