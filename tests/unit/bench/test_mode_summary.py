"""How `auto` is judged: speed against the better fixed mode, round by round.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

from dflash_moe.bench.mode_summary import summarise

CHUNK = {
    "taken": {"num_slices": 4, "window": 2, "predicted_s": 0.9},
    "predicted_s": 0.9,
    "measured_s": 1.0,
    "deviation": 0.1,
    "reason": "r",
}


def row(name, samples, *, tokens=64, digests=("d",), **more):
    return {"name": name, "dtype": "bf16", "prompt_tokens": tokens, "samples_s": samples, "digests": list(digests), **more}


def test_ratio_is_of_the_same_round_against_the_better_fixed_mode():
    (entry,) = summarise([row("stream", [5.0, 6.0, 7.0]), row("batched", [2.0, 3.0, 4.0]), row("auto", [2.0, 2.0, 5.0])])
    assert entry["better_fixed"] == "batched"
    assert entry["ratios_to_better_fixed"] == pytest.approx([1.0, 1.5, 0.8])
    assert entry["median_ratio"] == 1.0


def test_fewer_rounds_of_stream_are_compared_with_their_own_rounds():
    (entry,) = summarise([row("stream", [1.0, 1.1]), row("batched", [2.0] * 4), row("auto", [1.0, 1.0, 9.0, 9.0])])
    assert (entry["better_fixed"], entry["rounds"]) == ("stream", 2)
    assert entry["ratios_to_better_fixed"] == pytest.approx([1.0, 1.1])


def test_every_prompt_has_an_entry_and_local_is_no_fixed_mode():
    rows = [
        row(name, [time], tokens=tokens)
        for tokens in (64, 512)
        for name, time in (("batched", 2.0), ("auto", 1.0), ("local", 0.1))
    ]
    assert [(entry["prompt_tokens"], entry["median_ratio"]) for entry in summarise(rows)] == [(64, 2.0), (512, 2.0)]


def test_prediction_is_of_the_largest_chunks():
    auto = {
        "w0": {"chunks": [{**CHUNK, "num_tokens": 1}, {**CHUNK, "num_tokens": 850, "measured_s": 3.0}]},
        "w1": {"chunks": []},
    }
    (entry,) = summarise([row("batched", [1.0]), row("auto", [1.0], auto=auto)])
    assert list(entry["predictions"]) == ["w0"]
    assert entry["predictions"]["w0"]["num_tokens"] == 850
    assert entry["predictions"]["w0"]["measured_s"] == 3.0
    assert entry["predictions"]["w0"]["num_slices"] == 4


def test_different_bits_are_told():
    assert summarise([row("batched", [1.0]), row("auto", [1.0], digests=("e",))])[0]["same_bits"] is False


def test_without_auto_or_a_fixed_mode_there_is_nothing_to_say():
    assert summarise([row("batched", [1.0]), row("local", [1.0])]) == []
    assert summarise([row("auto", [1.0])]) == []


def test_predictions_are_medians_over_the_rounds_and_the_choice_is_the_last_rounds():
    def prediction(predicted, measured, slices):
        deviation = None if measured is None else abs(predicted / measured - 1)
        return {"w0": {"num_slices": slices, "predicted_s": predicted, "measured_s": measured, "deviation": deviation}}

    auto = row("auto", [1.0, 1.0, 1.0]) | {
        "predictions": [prediction(1.0, None, 1), prediction(1.0, 1.0, 2), prediction(2.0, 4.0, 4)],
    }
    (entry,) = summarise([row("batched", [1.0, 1.0, 1.0]), auto])
    found = entry["predictions"]["w0"]
    assert (found["num_slices"], found["rounds"]) == (4, 3)
    assert (found["predicted_s"], found["measured_s"], found["deviation"]) == (1.0, 2.5, 0.25)
