"""What mapped weights add up to is learned from whoever has read them, and from nobody else.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_moe.errors import CheckpointError, DflashError, WorkerLost
from dflash_moe.holders.audit import contents_learner
from dflash_moe.holders.audit.contents import ReferenceChecksums
from dflash_moe.holders.audit.contents_learner import ContentsLearner
from dflash_moe.placement import plan_placement
from dflash_moe.placement.held_shards import HeldShard, shards_by_holder
from dflash_moe.topology import Topology
from tests.expert_cases import make_checkpoint, tiny_spec

DONE_S = 20.0


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[HeldShard]:
    monkeypatch.setattr(contents_learner, "PAUSES_S", (0.0, 0.0))
    spec = tiny_spec(make_checkpoint(tmp_path / "tiny"))
    return shards_by_holder(spec, plan_placement(spec.layers, Topology.local(1)))["w0"]


def learned(
    shards: list[HeldShard], answers: list[int | Exception | None], *, is_as_started: bool = True
) -> tuple[ReferenceChecksums, list[int]]:
    """Lets a thread learn until it ends; the last answer is given from then on."""
    contents, asked = ReferenceChecksums(), []
    for held in shards:
        contents.note(held, "w0", None)

    def ask(_name: str, held: HeldShard) -> tuple[int | None, int]:
        asked.append(held.layer.index)
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer, 0

    learner = ContentsLearner(contents, ask, lambda _name: is_as_started, {"w0": shards})
    learner.start()
    learner._thread.join(DONE_S)
    assert not learner._thread.is_alive()
    learner.call_off()
    learner.close()
    return contents, asked


def test_each_shard_is_asked_until_it_was_read(shards: list[HeldShard]) -> None:
    contents, asked = learned(shards, [None, None, WorkerLost("away", worker="w0"), None, 7])
    assert asked == [0, 0, 0, 0, 0, 1]
    assert [contents.reference(held) for held in shards] == [7, 7]
    assert not any(contents.holders(held)[1] for held in shards)


def test_bytes_that_cannot_be_read_or_may_be_others_are_not_learned(shards: list[HeldShard]) -> None:
    for answers, is_as_started in (([CheckpointError("model.safetensors: was changed")], True), ([7], False)):
        contents, asked = learned(shards, list(answers), is_as_started=is_as_started)
        assert asked == [0, 1]
        assert [contents.reference(held) for held in shards] == [None, None]


def test_files_that_cannot_be_looked_at_are_looked_at_again(shards: list[HeldShard]) -> None:
    contents, looks = ReferenceChecksums(), []

    def is_as_started(_name: str) -> bool:
        looks.append(1)
        if len(looks) == 1:
            raise DflashError("stale file handle", code="system")
        return True

    for held in shards:
        contents.note(held, "w0", None)
    learner = ContentsLearner(contents, lambda _name, _held: (7, 0), is_as_started, {"w0": shards})
    learner.start()
    learner._thread.join(DONE_S)
    assert [contents.reference(held) for held in shards] == [7, 7]


def test_nobody_is_asked_what_is_known_and_a_learner_can_be_called_off(shards: list[HeldShard]) -> None:
    contents = ReferenceChecksums()
    for held in shards:
        contents.note(held, "w0", 7)

    def ask(_name: str, _held: HeldShard) -> tuple[int | None, int]:
        raise AssertionError("nothing was to be asked")

    known = ContentsLearner(contents, ask, lambda _name: True, {"w0": shards})
    known.start()
    assert known._thread.ident is None
    known.close()
    for held in shards:
        contents.note(held, "w1", None)
    endless = ContentsLearner(contents, lambda _name, _held: (None, 0), lambda _name: True, {"w1": shards})
    endless.start()
    endless.call_off()
    endless._thread.join(DONE_S)
    assert not endless._thread.is_alive()
