"""Defines the figures that stand in sentences, by name.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable

from bench.documents.recorded import Recorded
from bench.documents.tables import SETTINGS
from bench.documents.text import digits, percent


def _auto_ratios(recorded: Recorded) -> list[float]:
    """Returns for all settings and prompts the median, over the rounds, of the time of the better
    fixed mode divided by that of auto.
    """
    return [entry["median_ratio"] for name in SETTINGS for entry in recorded.summary(f"modes_{name}")]


def _mapped_ratios(recorded: Recorded, tokens: int) -> list[float]:
    """Returns for all formats the time with mapped weights divided by that with packed ones."""
    return [entry["time_ratio"] for entry in recorded.summary("mapped_weights") if entry["tokens"] == tokens]


def _overlap_forecast(recorded: Recorded) -> str:
    (found,) = recorded.summary("slice_overlap")
    return percent(max(made["deviation"] for made in found["predictions"].values()))


def _batched(recorded: Recorded) -> dict[str, int]:
    return dict(recorded.row("prefill_4248", name="batched", dtype="bf16"))


def _batched_of_floor(recorded: Recorded) -> str:
    row = _batched(recorded)
    return f"{(row['request_bytes'] + row['reply_bytes']) / row['floor_bytes']:.4f}"


FIGURES: dict[str, Callable[[Recorded], str]] = {
    "llama-architectures": lambda recorded: str(len(recorded.result("llama_check")["rows"])),
    "prefill-calls": lambda recorded: f"{_batched(recorded)['calls']:,}",
    "prefill-of-floor": _batched_of_floor,
    "quiet-hedges": lambda recorded: f"{recorded.summary('earlier_commit')[0]['hedges']:,}",
    "quiet-slices": lambda recorded: f"{recorded.summary('earlier_commit')[0]['calls']:,}",
    "auto-least": lambda recorded: digits(min(_auto_ratios(recorded))),
    "auto-most": lambda recorded: digits(max(_auto_ratios(recorded))),
    "overlap-share": lambda recorded: percent(recorded.summary("slice_overlap")[0]["share_of_ideal_gain"]),
    "overlap-forecast": _overlap_forecast,
    "mapped-decode-least": lambda recorded: digits(min(_mapped_ratios(recorded, 1))),
    "mapped-decode-most": lambda recorded: digits(max(_mapped_ratios(recorded, 1))),
    "mapped-prefill-least": lambda recorded: digits(min(_mapped_ratios(recorded, 2048))),
    "mapped-prefill-most": lambda recorded: digits(max(_mapped_ratios(recorded, 2048))),
    "held-out-bytes": lambda recorded: f"{recorded.result('bits_per_byte')['params']['held_out_bytes']:,}",
    "held-out-windows": lambda recorded: str(recorded.result("bits_per_byte")["params"]["windows"]),
    "held-out-window": lambda recorded: str(recorded.result("bits_per_byte")["params"]["window_tokens"]),
}
