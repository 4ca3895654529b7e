"""Several hosts load from one store: one at a time, each shard once, and who waits says how far the
others are.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dflash_moe import _core
from dflash_moe.errors import CheckpointError, WorkerTimeout
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.store import expert_store
from dflash_moe.store.expert_loading import load_experts
from dflash_moe.store.expert_store import ExpertStore
from tests.expert_cases import make_checkpoint, tiny_spec
from tests.fault.conftest import wait_until

SOON_S = 60.0
EXPERTS = (0, 1, 5)


class Case:
    """A store of which a first loading stands still before its first expert until `go` is set."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        directory = make_checkpoint(folder / "tiny")
        self.spec, self.checkpoint = tiny_spec(directory), Checkpoint.open(directory)
        self.store = ExpertStore(isa="scalar", threads=1)
        self.go, self.begun, self.fails = threading.Event(), threading.Event(), False
        self.num_loadings = 0
        self.pool = ThreadPoolExecutor(max_workers=4)
        monkeypatch.setattr(expert_store, "load_experts", self._load_slowly)

    def _load_slowly(self, *arguments: Any, report: Any, **terms: Any) -> None:
        self.num_loadings += 1
        if not self.begun.is_set():
            self.begun.set()
            report(0)
            assert self.go.wait(SOON_S)
            if self.fails:
                raise CheckpointError("the disk is gone")
        load_experts(*arguments, report=report, **terms)

    def load(self, experts: tuple[int, ...] = EXPERTS, **terms: Any) -> Future[_core.ResidentShard]:
        return self.pool.submit(
            self.store.load, self.checkpoint, self.spec.layers[0].ffn, experts, name="w", weight_dtype="f32",
            weights_fingerprint=sum(experts), numerics="f32-canonical", **terms,
        )  # fmt: skip


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Case(tmp_path, monkeypatch)
    yield made
    made.go.set()
    made.pool.shutdown()
    made.store.close()


def test_who_asks_for_a_shard_that_another_loads_waits_and_says_how_far_that_is(case: Case) -> None:
    first = case.load()
    assert case.begun.wait(SOON_S)
    reports: list[int] = []
    second = case.load(report=reports.append)
    assert wait_until(lambda: len(case.store._loaders) == 2, SOON_S)
    assert not second.done()
    case.go.set()
    loans = first.result(SOON_S), second.result(SOON_S)
    assert loans[0].number == loans[1].number
    assert loans[1].is_shared
    assert case.num_loadings == 1
    assert set(reports) <= {0}


def test_progress_of_others_is_told_while_they_load(case: Case) -> None:
    case.begun.set()
    reports: list[int] = []

    def load_others(count: int) -> None:
        if count == 1:
            assert wait_until(lambda: 0 in reports, SOON_S)

    first = case.load(report=load_others)
    assert wait_until(lambda: len(case.store._loaders) == 1, SOON_S)
    second = case.load((2, 3), report=reports.append)
    first.result(SOON_S)
    second.result(SOON_S)
    assert reports[-1] == 2


def test_a_loading_that_fails_leaves_its_turn_and_the_shard_to_the_next(case: Case) -> None:
    case.fails = True
    first = case.load()
    assert case.begun.wait(SOON_S)
    second = case.load()
    case.go.set()
    with pytest.raises(CheckpointError, match="the disk is gone"):
        first.result(SOON_S)
    assert second.result(SOON_S).is_complete
    assert case.num_loadings == 2


def test_a_wait_that_nobody_wants_any_more_ends_and_so_does_one_without_progress(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = case.load()
    assert case.begun.wait(SOON_S)
    with pytest.raises(WorkerTimeout, match="w: nobody waits for it any more"):
        case.load(is_given_up=lambda: True).result(SOON_S)
    monkeypatch.setattr(expert_store, "STANDSTILL_S", 0.1)
    with pytest.raises(WorkerTimeout, match="w: what another host loads before it does not get on"):
        case.load((2,)).result(SOON_S)
    case.go.set()
    assert first.result(SOON_S).is_complete
