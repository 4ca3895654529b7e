"""Judges mode `auto`: its time against the better fixed mode, round by round, and its prediction
against the measurement.

Pure functions of result rows, so that a recorded file can be judged again.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

FIXED = ("stream", "batched")


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns an entry for each prompt_tokens and dtype that have a row `auto` and a fixed one.

    `ratios_to_better_fixed` are speeds: the better fixed mode's time / auto's time of the same
    round (1 = as quick, above 1 = quicker). The better fixed mode is the one with the lower median
    over the rounds that all modes have.
    """
    found = []
    keys = dict.fromkeys((row["prompt_tokens"], row["dtype"]) for row in rows)
    for prompt_tokens, dtype in keys:
        own = {row["name"]: row for row in rows if (row["prompt_tokens"], row["dtype"]) == (prompt_tokens, dtype)}
        fixed = [own[mode] for mode in FIXED if mode in own]
        if "auto" not in own or not fixed:
            continue
        shared = min(len(row["samples_s"]) for row in (own["auto"], *fixed))
        better = min(fixed, key=lambda row: statistics.median(row["samples_s"][:shared]))
        ratios = round_ratios(better["samples_s"], own["auto"]["samples_s"])
        found.append(
            {
                "prompt_tokens": prompt_tokens,
                "dtype": dtype,
                "better_fixed": better["name"],
                "rounds": len(ratios),
                "ratios_to_better_fixed": ratios,
                "median_ratio": statistics.median(ratios),
                "predictions": median_predictions(own["auto"]),
                "same_bits": len({digest for row in (own["auto"], *fixed) for digest in row["digests"]}) == 1,
            }
        )
    return found


def round_ratios(reference_s: Sequence[float], times_s: Sequence[float]) -> list[float]:
    """Returns for each round how much quicker `times_s` was than `reference_s`. A disturbance that
    lasts a round disturbs both, so that the median of these says more than the ratio of medians.
    Where one has fewer rounds (mode stream over long prompts), the first ones are compared.
    """
    return [reference / own for reference, own in zip(reference_s, times_s, strict=False)]


def median_predictions(row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns for each worker what the last round took. predicted_s, measured_s and deviation are
    medians over the medians of the rounds.
    """
    rounds = row.get("predictions") or [largest_predictions(row.get("auto") or {})]
    found = {}
    for name, last in rounds[-1].items():
        medians = {}
        for key in ("predicted_s", "measured_s", "deviation"):
            values = [one[name][key] for one in rounds if name in one and one[name][key] is not None]
            medians[key] = statistics.median(values) if values else None
        found[name] = {**last, **medians, "rounds": len(rounds)}
    return found


def largest_predictions(auto: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns for the largest chunks of each worker the slices and window that were taken, and the
    predicted and measured seconds.
    """
    found = {}
    for name, forecast in auto.items():
        chunks = forecast.get("chunks") or ()
        if not chunks:
            continue
        largest = max(chunks, key=lambda chunk: (chunk["num_tokens"], chunk["taken"]["predicted_s"]))
        found[name] = {
            "num_tokens": largest["num_tokens"],
            "num_slices": largest["taken"]["num_slices"],
            "window": largest["taken"]["window"],
            **{key: largest[key] for key in ("predicted_s", "measured_s", "deviation", "reason")},
        }
    return found
