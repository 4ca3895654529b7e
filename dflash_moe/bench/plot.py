"""Pictures of bench results, drawn from result JSON only (never from a live run). Needs the `bench` extra (matplotlib).

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_moe.errors import ConfigError, UnsupportedError


def draw(result: Mapping[str, Any], out: Path) -> None:
    """Draws the picture of the result's case into `out` (PNG). Errors: `ConfigError` for a case without a picture."""
    painters = {"ipc": _draw_ipc, "prefill": _draw_prefill}
    painter = painters.get(result["case"])
    if painter is None:
        raise ConfigError(f"no picture is defined for bench case {result['case']!r}; there is one for {', '.join(painters)}")
    try:
        import matplotlib as mpl
    except ImportError:
        raise UnsupportedError("--plot needs matplotlib: pip install 'dflash-moe[bench]'") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure = painter(result, plt)
    figure.suptitle(f"{result['case']} - {result['machine']['cpu']}, commit {result['commit'][:10]}", fontsize=9)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130, bbox_inches="tight")
    plt.close(figure)


def _draw_ipc(result: Mapping[str, Any], plt: Any) -> Any:
    """Round trip and bandwidth over payload; the raw floor of each kind is the dashed line of the same colour."""
    figure, (latency, bandwidth) = plt.subplots(1, 2, figsize=(12, 4.5))
    rows = [row for row in result["rows"] if "payload_bytes" in row]
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        payloads = [row["payload_bytes"] for row in own]
        (line,) = latency.plot(payloads, [row["p50_us"] for row in own], marker="o", label=name)
        latency.plot(payloads, [row["floor_us"] for row in own], linestyle="--", color=line.get_color(), alpha=0.6)
        bandwidth.plot(payloads, [row["bytes_per_s"] / 1e9 for row in own], marker="o", color=line.get_color(), label=name)
    reference = [row for row in rows if row["name"] == rows[0]["name"]]
    bandwidth.plot(
        [row["payload_bytes"] for row in reference],
        [row["memcpy_bytes_per_s"] / 1e9 for row in reference],
        linestyle=":",
        color="black",
        label="memcpy",
    )
    latency.set(xscale="log", yscale="log", xlabel="payload each way (bytes)", ylabel="round trip p50 (us); dashed: raw floor")
    bandwidth.set(xscale="log", xlabel="payload each way (bytes)", ylabel="request + reply GB/s")
    for axis in (latency, bandwidth):
        axis.grid(visible=True, alpha=0.3)
        axis.legend()
    return figure


def _draw_prefill(result: Mapping[str, Any], plt: Any) -> Any:
    """Prefill time (every sample a dot), calls, and bytes both ways against the floor, per (mode, dtype)."""
    rows = result["rows"]
    labels = [f"{row['mode']}\n{row['dtype']}" for row in rows]
    places = range(len(rows))
    figure, (times, calls, moved) = plt.subplots(1, 3, figsize=(15, 4.5))
    times.bar(places, [row["median_s"] for row in rows], color="#8fb3d9")
    for place, row in zip(places, rows, strict=True):
        times.plot([place] * len(row["samples_s"]), row["samples_s"], "k.", markersize=4)
    times.set(ylabel="prefill seconds (bar: median)")
    calls.bar(places, [row["calls"] for row in rows], color="#8fb3d9")
    calls.set(ylabel="expert calls", yscale="log")
    mib = 1 << 20
    moved.bar(places, [row["request_bytes"] / mib for row in rows], label="requests", color="#8fb3d9")
    moved.bar(
        places,
        [row["reply_bytes"] / mib for row in rows],
        bottom=[row["request_bytes"] / mib for row in rows],
        label="replies",
        color="#d9b38f",
    )
    moved.plot(places, [row["floor_bytes"] / mib for row in rows], "k_", markersize=24, label="floor")
    moved.set(ylabel="MiB moved")
    moved.legend()
    for axis in (times, calls, moved):
        axis.set_xticks(list(places), labels, fontsize=8)
    return figure
