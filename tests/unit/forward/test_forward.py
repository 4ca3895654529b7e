"""What a step computes with lies in the slot of the thread that computes it, and nowhere else once
the step has ended.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dflash_moe
from bench.models.families import tiny_options
from dflash_moe.config import MemoryBudget
from dflash_moe.forward.forward import PackedForward, StepRows
from dflash_moe.forward.halves.micro_batches import MicroBatches
from dflash_moe.forward.one_sequence import OneSequenceForward
from dflash_moe.forward.torch_model import page_torch_model
from dflash_moe.model.architecture import find_experts, find_model_class
from dflash_moe.model.make import build_config
from dflash_moe.operators.step_context import StepContext, current_step

pytestmark = pytest.mark.transformers

BUDGET = MemoryBudget(num_bytes=4 << 20)


class Failure(Exception):
    """What a layer raises."""


class Model:
    """A tiny model whose layers note what their thread computes, and may fail."""

    def __init__(self) -> None:
        config = build_config(tiny_options("qwen3_moe"))
        self.model = find_model_class(config)._from_config(config, dtype=torch.float32).eval()
        self.seen: list[tuple[int, weakref.ref[StepContext], int, int]] = []
        # Loading runs layers too, in no step.
        self.is_loaded = self.fails = False
        # Only attention is looked at, so that no experts are needed.
        for module in find_experts(self.model).values():
            module.forward = lambda hidden_states, *_arguments: torch.zeros_like(hidden_states)
        for layer in self.model.model.layers:
            layer.register_forward_pre_hook(self._note)

    def _note(self, _layer: Any, arguments: Any) -> None:
        step = current_step()
        if not self.is_loaded:
            return
        assert step is not None
        self.seen.append((threading.get_ident(), weakref.ref(step), step.half, arguments[0].shape[1]))
        if self.fails:
            raise Failure

    @property
    def kept(self) -> list[StepContext]:
        """What is still there of steps."""
        gc.collect()
        return [step for _, reference, _, _ in self.seen if (step := reference()) is not None]


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def packed(model: Model) -> PackedForward:
    found, report = page_torch_model(model.model, "a test", kv_memory=BUDGET)
    assert found is not None, report.lines()
    model.is_loaded = True
    return found


@contextmanager
def rows_of(forward: Any, *counts: int) -> Iterator[list[StepRows]]:
    """Sequences with so many new tokens each."""
    sequences = [forward.admit(100) for _ in counts]
    yield [StepRows(sequence, [1] * count) for sequence, count in zip(sequences, counts, strict=True)]
    for sequence in sequences:
        sequence.release()


def test_a_step_has_the_slot_while_it_runs_and_nothing_keeps_it(model: Model, packed: PackedForward) -> None:
    with rows_of(packed, 5, 3) as rows:
        with packed.begin(rows) as step:
            assert current_step() is None
            logits = step.run()
            assert current_step() is None
            assert model.kept == [], "what a step computes with goes before it is sampled"
        assert len(logits) == 2
        assert {(half, count) for _, _, half, count in model.seen} == {(0, 8)}


def test_a_failing_step_leaves_the_slot_empty_and_keeps_nothing(model: Model, packed: PackedForward) -> None:
    with rows_of(packed, 5, 3) as rows:
        model.fails = True
        with pytest.raises(Failure):
            packed.forward(rows)
        assert current_step() is None
        assert model.kept == []
        assert [entry.sequence.num_tokens for entry in rows] == [0, 0]
        model.fails = False
        packed.forward(rows)
        assert [entry.sequence.num_tokens for entry in rows] == [5, 3]


def test_two_halves_see_their_own(model: Model, packed: PackedForward) -> None:
    runtime: Any = SimpleNamespace(call_limit_s=60.0, has_remote_experts=True, set_spinning=lambda _is_allowed: None)
    packed.micro_batches = batches = MicroBatches("2", runtime, 1)
    with rows_of(packed, 5, 4) as rows:
        packed.forward(rows)
        here = {(half, count) for thread, _, half, count in model.seen if thread == threading.get_ident()}
        there = {(half, count) for thread, _, half, count in model.seen if thread != threading.get_ident()}
        assert (here, there) == ({(0, 5)}, {(1, 4)})
        left: list[StepContext | None] = []

        def look(_turns: Any) -> torch.Tensor:
            left.append(current_step())
            return torch.zeros(1)

        for fails in (False, True):
            model.fails = fails
            if fails:
                with pytest.raises(Failure):
                    packed.forward(rows)
            batches._halves.run(look, look)
        assert left == [None] * 4
        assert model.kept == []
    packed.close()


def test_a_sequence_with_a_cache_of_its_own_has_the_slot_too(model: Model) -> None:
    forward = OneSequenceForward(model.model, BUDGET)
    model.is_loaded = True
    with rows_of(forward, 5, 3) as rows:
        for fails in (False, True):
            model.fails = fails
            with pytest.raises(Failure) if fails else nullcontext(), forward.begin(rows) as step:
                step.run()
            assert current_step() is None
            assert model.kept == []
    assert {count for _, _, _, count in model.seen} == {5, 3}


def test_forward_alone_fills_the_slot() -> None:
    package = Path(dflash_moe.__file__).parent
    users = {
        path.relative_to(package).parts[0]
        for path in package.rglob("*.py")
        if re.search(r"import .*\bcomputing\b", path.read_text(encoding="utf-8"))
    }
    assert users == {"forward"}
