"""Who may join although nobody has read all of its mapped weights.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dflash_moe.errors import CheckpointError, DflashError, WorkerLost, WorkerTimeout
from dflash_moe.holders.audit import contents
from dflash_moe.holders.audit.contents import ReferenceChecksums
from dflash_moe.holders.audit.mapped_holders import MappedHolders
from dflash_moe.model.spec import ModelSpec
from dflash_moe.placement import plan_placement
from dflash_moe.placement.held_shards import HeldShard, shards_by_holder
from dflash_moe.protocol.failures import is_passing
from dflash_moe.topology import Topology
from tests.expert_cases import make_checkpoint, tiny_spec


class Holders:
    """Two holders of all shards of a checkpoint. `near` reads the host's own files."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.shards: list[HeldShard] = shards_by_holder(spec, plan_placement(spec.layers, Topology.local(1)))["w0"]
        self.references = ReferenceChecksums()
        self.asked: list[tuple[str, int]] = []
        # What a holder answers, by layer: an error, or its checksums one after the other.
        self.answers: dict[str, list[int | None | Exception]] = {}
        self.settling = MappedHolders(Path(spec.path), self.references, self.ask, lambda name: name.startswith("near"), 5.0)

    def ask(self, name: str, held: HeldShard) -> tuple[int | None, int]:
        self.asked.append((name, held.layer.index))
        answers = self.answers[name]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer, 1

    def note(self, **checksums: int | None) -> None:
        for name, checksum in checksums.items():
            for held in self.shards:
                self.references.note(held, name, checksum)


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Holders:
    monkeypatch.setattr(contents, "POLL_S", 0.0)
    return Holders(tiny_spec(make_checkpoint(tmp_path / "tiny")))


def test_the_only_holder_and_holders_that_packed_are_asked_nothing(two: Holders) -> None:
    two.note(far=None)
    two.settling.settle("far", two.shards)
    two.references.forget("far")
    two.note(near=7, other=7)
    two.settling.settle("other", two.shards)
    assert two.asked == []


def test_holders_of_one_unchanged_file_join_at_once(two: Holders) -> None:
    two.note(near=None, near2=None)
    two.settling.settle("near2", two.shards)
    assert two.asked == []


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ESTALE])
def test_files_that_cannot_be_looked_at_are_neither_unchanged_nor_changed(
    two: Holders, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def refuse(path: object, *_args: object, **_how: object) -> os.stat_result:
        raise OSError(error, os.strerror(error), str(path))

    two.note(near=None, near2=None)
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", refuse)
        with pytest.raises(DflashError, match="cannot be looked at") as caught:
            two.settling.settle("near2", two.shards)
    assert is_passing(caught.value)  # its keeper tries again
    assert not isinstance(caught.value, CheckpointError)
    two.settling.settle("near2", two.shards)
    assert two.asked == []


def test_an_index_that_was_written_again_counts_as_changed_files(two: Holders) -> None:
    model = Path(two.spec.path)
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')
    settling = MappedHolders(model, two.references, two.ask, lambda _name: True, 5.0)
    assert settling.are_files_unchanged()
    (model / "model.safetensors.index.json").unlink()
    assert not settling.are_files_unchanged()


@pytest.mark.parametrize("before", [7, None])
def test_a_holder_with_files_of_its_own_joins_when_it_was_compared(two: Holders, before: int | None) -> None:
    two.note(near=before, far=None)
    two.answers = {"near": [None, 7], "far": [None, None, 7]}
    reported: list[int] = []
    two.settling.settle("far", two.shards, reported.append)
    sizes = [len(held.experts) for held in two.shards]
    assert reported == [sum(sizes[: number + 1]) for number in range(len(sizes))]
    assert {name for name, _ in two.asked} == ({"far"} if before else {"near", "far"})
    assert all(two.references.holders(held)[1] == set() for held in two.shards)


def test_a_file_that_was_touched_is_read_again(two: Holders) -> None:
    two.note(near=7, near2=None)
    two.answers = {"near2": [7]}
    file = Path(two.spec.path) / "model.safetensors"
    os.utime(file, ns=(1, 1))
    two.settling.settle("near2", two.shards)
    assert {name for name, _ in two.asked} == {"near2"}


def test_bytes_that_differ_are_named_with_both_values(two: Holders) -> None:
    two.note(near=7, far=None)
    two.answers = {"far": [None, 8]}
    said = "worker near holds content checksum 0x0000000000000007, worker far 0x0000000000000008"
    with pytest.raises(CheckpointError, match=said):
        two.settling.settle("far", two.shards)


def test_a_lost_holder_is_left_out_but_not_the_one_that_comes(two: Holders) -> None:
    two.note(near=None, far=None)
    two.answers = {"near": [WorkerLost("gone", worker="near")], "far": [7]}
    two.settling.settle("far", two.shards)
    # It gives the reference now, and the other one has to be compared when it is back.
    assert two.references.reference(two.shards[0]) == 7
    assert two.references.holders(two.shards[0])[1] == {"near"}
    two.answers = {"near": [WorkerLost("gone", worker="near")]}
    with pytest.raises(WorkerLost):
        two.settling.settle("near", two.shards)


def test_a_reader_that_stands_still_is_not_waited_for_without_end(two: Holders) -> None:
    two.note(near=7, far=None)
    two.answers = {"far": [None]}
    two.settling._timeout_s = 0.05
    with pytest.raises(WorkerTimeout, match="worker far: its background reader read 1 of"):
        two.settling.settle("far", two.shards)


def test_the_only_holder_comes_back_to_unchanged_files_unread_and_else_is_compared(two: Holders) -> None:
    two.note(near=None)
    two.settling.settle("near", two.shards)
    two.settling.settle("near", two.shards)
    assert two.asked == []
    os.utime(Path(two.spec.path) / "model.safetensors", ns=(1, 1))
    with pytest.raises(CheckpointError, match="have changed since worker near computed from them, and nobody had read all"):
        two.settling.settle("near", two.shards)
    # Once somebody knows what the bytes were, they decide.
    for held in two.shards:
        two.references.note(held, "near", 7)
        two.references.note(held, "near", None)
    two.answers = {"near": [None, 7]}
    two.settling.settle("near", two.shards)
    two.note(near=None)
    two.answers = {"near": [8]}
    with pytest.raises(CheckpointError, match=r"near has loaded content checksum 0x0+8, and held 0x0+7"):
        two.settling.settle("near", two.shards)


def test_a_removed_holder_is_a_new_one_when_it_is_added_again(two: Holders) -> None:
    two.note(near=None)
    two.settling.settle("near", two.shards)
    two.settling.forget("near")
    os.utime(Path(two.spec.path) / "model.safetensors", ns=(1, 1))
    two.settling.settle("near", two.shards)
    assert two.asked == []
