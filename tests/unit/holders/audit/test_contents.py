"""Holders of one shard must report the same content checksum, and one that still reads is waited
for as long as it gets on.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_moe.errors import CheckpointError, WorkerTimeout
from dflash_moe.holders.audit import contents
from dflash_moe.holders.audit.contents import ReferenceChecksums, compare_with_own_copy, own_checksum
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.spec import ModelSpec
from dflash_moe.placement import plan_placement
from dflash_moe.placement.held_shards import HeldShard, shards_by_holder
from dflash_moe.topology import Topology
from tests.expert_cases import make_checkpoint, tiny_spec


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return tiny_spec(make_checkpoint(tmp_path / "tiny"))


@pytest.fixture
def held(spec: ModelSpec) -> dict[str, list[HeldShard]]:
    return shards_by_holder(spec, plan_placement(spec.layers, Topology.local(2)))


def test_a_second_holder_of_the_same_bytes_may_join(held: dict[str, list[HeldShard]]) -> None:
    references = ReferenceChecksums()
    first, second = held["w0"]
    references.note(first, "w0", 7)
    references.note(first, "w1", 7)
    references.note(second, "w1", 8)


def test_a_second_holder_of_other_bytes_is_refused_with_both_values(held: dict[str, list[HeldShard]]) -> None:
    references = ReferenceChecksums()
    references.note(held["w0"][1], "w0", 7)
    said = "worker w0 holds content checksum 0x0000000000000007, worker w1 0x0000000000000008; holders of one shard"
    with pytest.raises(CheckpointError, match=f"weights of layers.1.experts, shard 0: {said}"):
        references.note(held["w0"][1], "w1", 8)


def test_holders_of_unread_bytes_are_known_until_they_have_read_them(held: dict[str, list[HeldShard]]) -> None:
    references, shard = ReferenceChecksums(), held["w0"][1]
    assert references.holders(shard) == (set(), set())
    references.note(shard, "w0", None)
    references.note(shard, "w1", None)
    assert references.holders(shard) == ({"w0", "w1"}, {"w0", "w1"})
    assert references.reference(shard) is None
    # Whoever reports first gives the value.
    references.note(shard, "w1", 8)
    assert references.holders(shard) == ({"w0", "w1"}, {"w0"})
    assert references.reference(shard) == 8
    with pytest.raises(CheckpointError, match="worker w1 holds content checksum 0x0000000000000008, worker w0 0x00000"):
        references.note(shard, "w0", 7)
    # One that was started again has read nothing yet; one that was removed is nobody's business.
    references.note(shard, "w1", None)
    assert references.holders(shard)[1] == {"w1"}
    references.forget("w1")
    assert references.holders(shard) == ({"w0"}, set())


def test_a_holder_that_has_read_its_bytes_replaces_its_own_report(held: dict[str, list[HeldShard]]) -> None:
    references = ReferenceChecksums()
    references.note(held["w0"][0], "w0", None)
    references.note(held["w0"][0], "w0", 7)
    references.note(held["w0"][0], "w1", 7)


def test_a_holder_that_gets_on_is_waited_for(
    spec: ModelSpec, held: dict[str, list[HeldShard]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "POLL_S", 0.0)
    checkpoint = Checkpoint.open(spec.path)
    progress: dict[tuple[str, int], Iterator[int]] = {}

    def ask(holder: str, one: HeldShard) -> tuple[int | None, int]:
        steps = progress.setdefault((holder, one.layer.index), iter((0, 1, 3)))
        num_read = next(steps, None)
        return (own_checksum(checkpoint, one), 4) if num_read is None else (None, num_read)

    reports: list[tuple[str, int, int]] = []
    num_shards = compare_with_own_copy(ask, held, Path(spec.path), timeout_s=60.0, report=lambda *row: reports.append(row))
    assert num_shards == 4
    assert [row[1:] for row in reports if row[0] == "layers.0.experts at w1"] == [(0, 4), (1, 4), (3, 4), (4, 4)]


def test_a_holder_that_gets_no_further_ends_the_comparison_in_time(
    spec: ModelSpec, held: dict[str, list[HeldShard]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "POLL_S", 0.0)
    with pytest.raises(WorkerTimeout, match=r"worker w0: its background reader read 2 of the 4 experts of layers\.0\.experts"):
        compare_with_own_copy(lambda *_: (None, 2), held, Path(spec.path), timeout_s=0.05, report=lambda *_: None)


def test_every_shard_that_differs_is_named(spec: ModelSpec, held: dict[str, list[HeldShard]]) -> None:
    with pytest.raises(CheckpointError) as raised:
        compare_with_own_copy(lambda *_: (1, 4), held, Path(spec.path), timeout_s=60.0, report=lambda *_: None)
    lines = str(raised.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"weights of layers.{layer}.experts, shard {shard}" for layer in (0, 1) for shard in (0, 1)
    ]
    assert all("holds content checksum 0x0000000000000001, this host's own copy has 0x" in line for line in lines)
