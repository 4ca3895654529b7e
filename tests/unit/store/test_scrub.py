"""Weights that were found changed are loaded again: those of shards that are only about to be held
too. A file that is damaged on disk is set aside, and says nothing about memory.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import threading

import pytest

from dflash_moe.config.cache import CacheSettings
from dflash_moe.model import checkpoint_files
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.store.expert_store import ExpertStore
from dflash_moe.store.folder import PANELS
from dflash_moe.store.scrub import HeldWeights, WeightScrub
from tests.expert_cases import make_checkpoint, tiny_spec
from tests.fault.conftest import wait_until
from tests.unit.store.stored_panels import overwrite

BACK_S = 60.0
EXPERTS = tuple(range(8))


class Case:
    """A store with one shard, and a scrub of it that has not been told of the shard."""

    def __init__(self, folder, cache=None):
        self.spec = tiny_spec(make_checkpoint(folder / "model"))
        self.checkpoint = Checkpoint.open(folder / "model")
        layout = "stored" if cache is not None else "packed"
        self.store = ExpertStore(isa="scalar", threads=1, weights_layout=layout, cache=cache)
        self.told = []
        self.scrub = WeightScrub(self.store, period_s=1.0)
        self.load()

    def load(self):
        ffn = self.spec.layers[0].ffn
        self.loan = self.store.load(
            self.checkpoint, ffn, EXPERTS, name="w", weight_dtype="f32", weights_fingerprint=5, numerics="f32-canonical"
        )
        self.held = self.held_by(self.told)

    def held_by(self, told):
        """The shard as somebody holds it who notes what he is told."""
        ffn, tell = self.spec.layers[0].ffn, lambda *what: told.append(what[2:])
        return HeldWeights(0, 0, "w", ffn, EXPERTS, 5, self.loan, self.checkpoint, tell)

    def close(self):
        self.scrub.close()
        self.loan.give_back()
        self.store.close()

    def was_found(self):
        return self.scrub.stats()["scrub_damages"] > 0


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "SETTLED_NS", 0)
    found = []

    def make(**terms):
        found.append(Case(tmp_path, **terms))
        return found[-1]

    yield make
    for one in found:
        one.close()


def test_what_was_found_before_its_shard_is_held_is_loaded_again_once_it_is(made):
    case = made()
    assert case.loan.flip_bit(3, 100, 6)
    case.scrub.start()
    assert wait_until(case.was_found, BACK_S)
    assert case.told == []
    case.scrub.hold(case.held)
    assert wait_until(lambda: case.told == [(3, "")], BACK_S)
    assert case.loan.are_packed_as_loaded(0, len(EXPERTS))


def test_all_who_hold_a_shard_are_told_of_it_and_who_has_let_go_is_not(made):
    case, other_told, former_told = made(), [], []
    former = case.held_by(former_told)
    for held in (case.held, case.held_by(other_told), former):
        case.scrub.hold(held)
    case.scrub.release([former])
    assert case.loan.flip_bit(3, 100, 6)
    case.scrub.start()
    assert wait_until(lambda: case.told == other_told == [(3, "")], BACK_S)
    assert case.scrub.stats()["scrub_reloads"] == 1
    assert former_told == []


def test_a_shard_that_was_loaded_anew_meanwhile_is_left_alone(made):
    case = made()
    assert case.loan.flip_bit(3, 100, 6)
    case.scrub.start()
    assert wait_until(case.was_found, BACK_S)
    former = case.loan.number
    case.loan.give_back()
    case.store.drop_unborrowed()
    case.load()
    assert case.loan.number != former
    case.scrub.hold(case.held)
    assert case.told == []
    assert case.scrub.stats()["scrub_reloads"] == 0


def test_a_file_damaged_on_disk_is_set_aside_and_not_told_of_as_memory(made, tmp_path):
    case = made(cache=CacheSettings(tmp_path / "cache"))
    case.store.begin_service()
    assert wait_until(lambda: case.store.panel_counters()["panel_shards_left"] == 0, BACK_S)
    (path,) = (tmp_path / "cache" / PANELS).iterdir()
    overwrite(path, path.stat().st_size // 2, b"damage")
    case.scrub.hold(case.held)
    case.scrub.start()
    assert wait_until(lambda: case.scrub.stats()["scrub_reloads"] == 1, BACK_S)
    assert wait_until(lambda: os.listdir(path.parent) == [f"{path.name}.damaged"], BACK_S)
    threading.Event().wait(0.05)
    assert case.told == []
