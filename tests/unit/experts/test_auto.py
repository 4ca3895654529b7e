"""What `auto` says of itself: the numbers of the client's records, and a sentence a reader can act
on.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from dflash_moe.experts.auto import cost_classes, explain, largest_chunk, log_explanation, mode_reason, worker_forecasts
from dflash_moe.model.spec import LayerSpec
from tests.expert_cases import make_checkpoint, tiny_spec


def chunk(**changes: Any) -> dict[str, Any]:
    record: dict[str, Any] = {
        "cost_class": 0, "num_tokens": 512, "num_chunks": 12, "num_slices": 4, "window": 3, "reason": "sliced",
        "forecast_ns": 60e6, "wait_ns": 1e6, "send_ns": 40e6, "compute_ns": 40e6, "receive_ns": 40e6,
        "considered": [(1, 2, 120e6), (2, 2, 90e6), (4, 3, 60e6)],
        "predicted_ns": [60e6, 60e6, 66e6], "measured_ns": [62e6, 60e6, 60e6],
    }  # fmt: skip
    return record | changes


def record(*chunks: dict[str, Any], name: str = "w0") -> dict[str, Any]:
    link = {"fixed_ns": 2e6, "ns_per_byte": 40.0, "residual": 0.05}
    compute = {"fixed_ns": 0.0, "ns_per_pair": 1e4, "ns_per_expert": 5e4, "residual": 0.02}
    return {
        "name": name, "send": link, "receive": dict(link), "compute": {0: compute},
        "clock_offset_ns": 0, "chunks": list(chunks),
    }  # fmt: skip


def test_seconds_and_medians_come_from_the_clients_nanoseconds() -> None:
    (forecast,) = worker_forecasts([record(chunk())])
    assert forecast.send.s_per_unit == pytest.approx(40e-9)
    assert forecast.compute[0].s_per_expert == pytest.approx(50e-6)
    (only,) = forecast.chunks
    assert (only.predicted_s, only.measured_s) == (pytest.approx(0.060), pytest.approx(0.060))
    assert only.deviation == pytest.approx(2 / 62)
    assert only.is_auto


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "512 tokens in 4 slices hide transfer: 50% less than in one slice"),
        ({"considered": [(1, 2, 58.8e6), (4, 3, 60e6)]}, "512 tokens in 4 slices are kept: one slice would save only 2.0%"),
        ({"reason": "small", "num_tokens": 1, "num_slices": 1, "considered": []}, "1 token in one slice: too few to cut"),
        ({"reason": "unmeasured", "considered": []}, "nothing is measured yet"),
        ({"reason": "whole", "num_slices": 1, "considered": [(1, 2, 60e6), (2, 2, 66e6)]}, "2 would cost 10% more"),
        ({"reason": "whole", "num_slices": 1, "considered": [(1, 2, 60e6), (2, 2, 59.4e6)]}, "2 would save only 1.0%"),
        ({"reason": "whole", "num_slices": 1, "considered": [(1, 2, 60e6)]}, "not known well enough yet"),
        ({"reason": "fixed", "considered": []}, "as the mode asks"),
    ],
)  # fmt: skip
def test_every_reason_is_a_phrase_with_its_numbers(changes: dict[str, Any], words: str) -> None:
    (forecast,) = worker_forecasts([record(chunk(**changes))])
    assert words in forecast.chunks[0].reason


def test_the_mode_reason_tells_of_the_longest_chunks_of_every_worker() -> None:
    decode = chunk(num_tokens=1, reason="small", num_slices=1, considered=[], predicted_ns=[], measured_ns=[])
    forecasts = worker_forecasts([record(decode, chunk()), record(decode, name="w1"), record(name="idle")])
    assert largest_chunk(forecasts[0]).num_tokens == 512
    assert mode_reason(forecasts).startswith("w0: 512 tokens in 4 slices")
    assert "; w1: 1 token in one slice" in mode_reason(forecasts)
    assert "idle" not in mode_reason(forecasts)
    assert mode_reason(()) == "nothing is measured yet: whole chunks"


def test_the_explanation_has_model_prediction_choice_and_reason_of_every_worker() -> None:
    text = "\n".join(explain(worker_forecasts([record(chunk())])))
    for part in ("worker w0", "2 ms + 25 MB/s", "10 us per (row, expert)", "3 under way", "predicted 60 ms", "1: 120 ms"):
        assert part in text
    assert explain(()) == ["auto: nothing is measured yet: whole chunks"]


def test_the_explanation_goes_to_its_own_logger_at_info(caplog: pytest.LogCaptureFixture) -> None:
    forecasts = worker_forecasts([record(chunk())])
    with caplog.at_level(logging.WARNING, logger="dflash_moe.auto"):
        log_explanation(forecasts)
    assert not caplog.records
    with caplog.at_level(logging.INFO, logger="dflash_moe.auto"):
        log_explanation(forecasts)
    assert len(caplog.records) == len(explain(forecasts))


def test_layers_share_a_class_exactly_when_their_experts_cost_the_same(tmp_path_factory: pytest.TempPathFactory) -> None:
    layers: list[LayerSpec] = list(tiny_spec(make_checkpoint(tmp_path_factory.mktemp("tiny"))).layers)
    assert len(set(cost_classes(layers).values())) == 1
    wider = dataclasses.replace(layers[1], ffn=dataclasses.replace(layers[1].ffn, intermediate_size=999))
    assert len(set(cost_classes([layers[0], wider]).values())) == 2
