"""Draws `experts`: a roofline for each backend and number of threads, and beside it the share of
its roof that a case reaches.

The place of a row is its operations per byte of the distinct experts that it touched, against its
operations per second. Its roof is the lower of the peaks that were measured in the same run: left
of the ridge bytes bound it, and right of it operations.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_moe.bench.plots.axes import BLACK, CYCLE, GREY, MARKERS, Named, heading
from dflash_moe.topology.numerics import DEFAULT_NUMERICS

FIELDS = ("format", "tokens", "gflops", "bytes_per_s", "peak_gflops", "peak_bytes_per_s")
# Rows of one run have the same peak when it differs by less than this factor. The peak of integers
# is further from that of floats.
SAME_PEAK = 1.5
# So many lines of a legend are as high as a panel.
LEGEND_LINES = 28


@dataclass(frozen=True, slots=True)
class Series:
    """Rows that are drawn as one line over tokens. Colour and mark tell the format, and the line
    tells what else differs.
    """

    format: str
    # Where torch computed the row, this is its name; else it is empty.
    torch: str
    from_cache: bool
    routing: str
    # An empty class means the default one.
    numerics: str

    @property
    def label(self) -> str:
        """The text of the series in the legend."""
        torch = self.torch.removesuffix(f"_{self.format}").replace("_", " ")
        parts = [self.format, self.numerics, torch, "from cache" if self.from_cache else "", self.routing]
        return " ".join(part for part in parts if part)

    def style(self, at: int) -> dict[str, Any]:
        """Returns how the line is drawn. Its marks are hollow for torch or weights from cache. It
        is dotted for torch, and dash-dotted for torch's grouped product, pale for any routing but
        uniform, and thick for another numerics class than the default.
        """
        color = CYCLE[at % (len(CYCLE) - 1)]
        return {
            "color": color,
            "marker": MARKERS[at % len(MARKERS)],
            "markersize": 6,
            "linewidth": 2.0 if self.numerics else 1.0,
            "linestyle": ("-." if "grouped" in self.torch else ":") if self.torch else "--" if self.from_cache else "-",
            "markerfacecolor": "none" if self.torch or self.from_cache else color,
            "alpha": 1.0 if self.routing in ("", "uniform") else 0.45,
        }


def draw_experts(results: Sequence[Named], plt: Any) -> Any:
    """Draws a line of two panels for each file, backend and number of threads."""
    panels = [(key, rows) for _, found in results for key, rows in _panels(found["rows"]).items()]
    figure, axes = plt.subplots(len(panels), 2, figsize=(17, 6.0 * len(panels) + 0.8), squeeze=False, layout="constrained")
    figure.suptitle("\n".join(["Expert layer: roofline", *(heading(*one) for one in results)]), fontsize=10)
    for (roofline, share), (key, rows) in zip(axes, panels, strict=True):
        _roofs(roofline, rows)
        series = _series(rows)
        formats = list(dict.fromkeys(one.format for one in series))
        for one, own in series.items():
            style = one.style(formats.index(one.format))
            roofline.plot([_intensity(row) for row in own], [row["gflops"] for row in own], **style)
            # The bandwidth of DRAM is no roof of a cache, so that such a line is in the legend
            # only.
            shown = [] if one.from_cache else own
            share.plot([row["tokens"] for row in shown], [_share_of_roof(row) for row in shown], label=one.label, **style)
        _dress(roofline, share, rows, ", ".join(part for part in key if part))
    return figure


def _dress(roofline: Any, share: Any, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    roofline.set(xscale="log", yscale="log", xlabel="operations per byte of touched experts", ylabel="GFLOP/s (integer: GOP/s)")
    roofline.set_title(title, fontsize=9)
    tokens = sorted({row["tokens"] for row in rows})
    share.set(xscale="log", xlabel="tokens of the call", ylabel="share of the roof (%)", ylim=(0, None))
    share.set_xticks(tokens, [str(count) for count in tokens])
    share.minorticks_off()
    share.axhline(100, color=BLACK, linewidth=1.0)
    share.set_title("reached of what the peaks of the same run allow", fontsize=9)
    columns = 1 + len(share.lines) // LEGEND_LINES
    share.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, ncols=columns)
    for axis in (roofline, share):
        axis.grid(visible=True, which="major", alpha=0.25)


def _panels(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, ...], list[Mapping[str, Any]]]:
    """Groups the rows by backend, threads and shape of the experts. The rows of torch stand beside
    those of the first backend.
    """
    own = [str(row.get("backend", "")) for row in rows if not _is_torch(row)]
    panels: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        threads, shape = row.get("threads"), [row.get(key) for key in ("num_experts", "hidden_size", "moe_intermediate_size")]
        key = (
            own[0] if _is_torch(row) and own else str(row.get("backend", "")),
            f"{threads} thread{'' if threads == 1 else 's'}" if threads else "",
            "{} experts of {} x {}, top-{}".format(*shape, row.get("top_k")) if all(shape) else "",
        )
        panels.setdefault(key, []).append(row)
    return panels


def _is_torch(row: Mapping[str, Any]) -> bool:
    return str(row["name"]).startswith("torch")


def _series(rows: Sequence[Mapping[str, Any]]) -> dict[Series, list[Mapping[str, Any]]]:
    found: dict[Series, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: int(row["tokens"])):
        torch = str(row["name"]) if _is_torch(row) else ""
        numerics = "" if torch or row.get("kernel", DEFAULT_NUMERICS) == DEFAULT_NUMERICS else str(row["kernel"])
        key = Series(str(row["format"]), torch, row.get("weights_from") == "cache", str(row.get("routing", "")), numerics)
        found.setdefault(key, []).append(row)
    return found


def _intensity(row: Mapping[str, Any]) -> float:
    """Returns the operations of a row per byte."""
    return float(1e9 * row["gflops"] / row["bytes_per_s"])


def _share_of_roof(row: Mapping[str, Any]) -> float:
    """Returns the share of its roof that a row reaches, in per cent."""
    roof = min(row["peak_gflops"], _intensity(row) * row["peak_bytes_per_s"] / 1e9)
    return float(100 * row["gflops"] / roof)


def _roofs(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draws a roof for each distinct arithmetic peak (float32, integer) on the median read
    bandwidth.
    """
    low, high = min(map(_intensity, rows)) / 3, max(map(_intensity, rows)) * 3
    ordered = sorted(row["peak_bytes_per_s"] for row in rows)
    bytes_per_s = ordered[len(ordered) // 2]
    peaks: list[float] = []
    for row in sorted(rows, key=lambda row: float(row["peak_gflops"])):
        if not peaks or row["peak_gflops"] > SAME_PEAK * peaks[-1]:
            peaks.append(row["peak_gflops"])
    for peak in peaks:
        ridge = max(low, min(high, 1e9 * peak / bytes_per_s))
        axis.plot([low, ridge, high], [low * bytes_per_s / 1e9, peak, peak], color=BLACK, linewidth=1.2, zorder=1)
        text = f"peak {peak:.0f} GFLOP/s"
        axis.annotate(text, (high, peak), xytext=(-2, 4), textcoords="offset points", ha="right", fontsize=8, color=GREY)
    place = (low * 1.3, low * 1.3 * bytes_per_s / 1e9)
    text = f"read {bytes_per_s / 1e9:.1f} GB/s"
    axis.annotate(text, place, xytext=(10, -6), textcoords="offset points", fontsize=8, color=GREY)
