"""Which steps are computed in two micro-batches, and what is said about it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from dflash_moe.errors import ConfigError
from dflash_moe.forward.halves.micro_batches import MicroBatches
from dflash_moe.forward.halves.split_forecast import LEAST_ROWS, MEASURED, PREDICTED, TRIED, SplitChoice, SplitForecast
from dflash_moe.operators.step_context import StepContext

ROWS = 96


class FakeRuntime:
    """A runtime whose experts are computed by a worker, or by whoever waits for them."""

    call_limit_s = 30.0

    def __init__(self, has_remote_experts: bool) -> None:
        self.has_remote_experts = has_remote_experts
        self.spinning: list[bool] = []

    def set_spinning(self, is_allowed: bool) -> None:
        self.spinning.append(is_allowed)


class FakePacked:
    """Returns the token ids of the rows that are wanted."""

    def __init__(self) -> None:
        self.parts: list[int] = []

    def run_rows(self, token_ids: torch.Tensor, step: StepContext, wanted: torch.Tensor) -> torch.Tensor:
        self.parts.append(step.num_rows)
        return token_ids[wanted, None]


def step(num_rows: int = ROWS) -> StepContext:
    table = np.arange(num_rows // 16 + 1, dtype=np.int32)
    return StepContext(np.arange(num_rows), torch.arange(num_rows), ((table, 0, num_rows),), ((num_rows, 0, num_rows),))


def run(batches: MicroBatches, packed: FakePacked, num_rows: int = ROWS) -> list[int]:
    """Computes a step and returns the rows of its parts."""
    packed.parts.clear()
    wanted = torch.tensor([0, num_rows // 2 - 1, num_rows - 1])
    found = batches.run(packed, torch.arange(num_rows), step(num_rows), wanted)
    assert found.flatten().tolist() == wanted.tolist()
    return sorted(packed.parts)


def test_another_word_is_refused_by_name():
    with pytest.raises(ConfigError, match="engine.micro_batches is '3'; allowed: auto, 1, 2"):
        MicroBatches("3", FakeRuntime(True), 0)


@pytest.mark.parametrize(("asked", "parts"), [("1", [ROWS]), ("2", [48, 48])])
def test_a_number_is_obeyed(asked, parts):
    runtime, packed = FakeRuntime(True), FakePacked()
    batches = MicroBatches(asked, runtime, 0)
    assert run(batches, packed) == parts
    assert runtime.spinning == ([False, True] if asked == "2" else [])
    assert batches.stats()["split_steps"] == len(parts) - 1
    assert run(batches, packed, 8) == [8]
    assert batches.stats()["steps"] == 2
    batches.close()


@pytest.mark.parametrize("is_remote", [True, False])
def test_auto_follows_its_forecast_only_where_experts_are_remote(is_remote, monkeypatch):
    monkeypatch.setattr(SplitForecast, "choose", lambda *_: SplitChoice(True, PREDICTED, 2.0, 1.0))
    batches = MicroBatches("auto", FakeRuntime(is_remote), 0)
    assert run(batches, FakePacked()) == ([48, 48] if is_remote else [ROWS])
    assert run(batches, FakePacked(), LEAST_ROWS - 1) == [LEAST_ROWS - 1]
    batches.close()


def test_a_change_of_mind_is_logged_once(monkeypatch, caplog):
    choices = [SplitChoice(True, PREDICTED, 2.0, 1.0)] * 2 + [
        SplitChoice(False, TRIED, 2.0, 1.0),
        SplitChoice(True, MEASURED, 2.0, 1.0),
    ]
    choices += [SplitChoice(False, MEASURED, 2.0, 2.5)] * 2
    monkeypatch.setattr(SplitForecast, "choose", lambda *_: choices.pop(0))
    batches = MicroBatches("auto", FakeRuntime(True), 0)
    with caplog.at_level(logging.INFO, "dflash_moe.auto"):
        parts = [run(batches, FakePacked()) for _ in range(6)]
    assert parts == [[48, 48]] * 2 + [[ROWS], [48, 48]] + [[ROWS]] * 2
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert f"about {ROWS} rows: two micro-batches; two are predicted to take 1000 ms, one 2000 ms" in lines[0]
    assert "one batch; two took 2500 ms, one 2000 ms" in lines[1]
    batches.close()


def test_what_is_learned_has_the_rows_and_the_context(monkeypatch):
    learned = []
    monkeypatch.setattr(SplitForecast, "learn_whole", lambda _self, times, context: learned.append((times.num_rows, context)))
    monkeypatch.setattr(SplitForecast, "learn_split", lambda _self, rows, context, _s: learned.append((-rows, context)))
    for asked in ("1", "2"):
        batches = MicroBatches(asked, FakeRuntime(True), 0)
        run(batches, FakePacked())
        batches.close()
    assert learned == [(ROWS, 47.5), (-ROWS, 47.5)]


def test_a_step_without_rows_is_one_batch():
    batches, packed = MicroBatches("2", FakeRuntime(True), 0), FakePacked()
    none = torch.empty(0, dtype=torch.int64)
    found = batches.run(packed, none, StepContext(none.numpy(), none, (), ()), none)
    assert found.shape == (0, 1)
    assert packed.parts == [0]
