"""Golden rows and questions of the audit, with pretended holders: what is drawn, who is believed,
and what the host computes itself.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import errno
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from dflash_moe import _core
from dflash_moe.errors import WorkerUnfit
from dflash_moe.holders.audit import golden
from dflash_moe.holders.audit.golden import GoldenRows
from dflash_moe.holders.audit.host_twin import REFERENCE, HostTwin
from dflash_moe.holders.audit.row_questions import RowQuestion, difference, drawn_rows, exchanged_rows
from dflash_moe.model.spec import ModelSpec
from dflash_moe.placement import plan_placement
from dflash_moe.placement.held_shards import HeldShard, shards_by_holder
from dflash_moe.topology import Topology
from tests.expert_cases import WIDTH, make_checkpoint, tiny_spec

ISA = _core.best_isa()


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return tiny_spec(make_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def shards(spec: ModelSpec) -> list[HeldShard]:
    topology = Topology.local(num_workers=2)
    return shards_by_holder(spec, plan_placement(spec.layers, topology))["w0"]


class Holders:
    """Answers as the named kernel set does; those named in `wrong` flip a bit."""

    def __init__(self, spec: ModelSpec, *, wrong: tuple[str, ...] = ()) -> None:
        self._twin = HostTwin(Path(spec.path), REFERENCE)
        self._wrong = wrong
        self.num_asked = 0

    def ask(self, holder: str, held: HeldShard, question: RowQuestion) -> bytes | None:
        self.num_asked += 1
        reply = self._twin.compute(held, question)
        assert reply is not None
        return bytes([reply[0] ^ 1]) + reply[1:] if holder in self._wrong else reply


def test_a_drawn_row_is_the_same_each_time_and_another_for_another_shard(shards: list[HeldShard]) -> None:
    (first,), (second,) = drawn_rows(shards[0]), drawn_rows(shards[1])
    assert drawn_rows(shards[0]) == [first]
    assert first != second
    assert len(first.local_expert_ids) == 3
    assert first.local_expert_ids == tuple(sorted(set(first.local_expert_ids)))
    assert len(first.row) == 2 * WIDTH


def test_thorough_rows_ask_for_every_expert_once(shards: list[HeldShard]) -> None:
    rows = drawn_rows(shards[0], is_thorough=True)
    assert sorted(one for row in rows for one in row.local_expert_ids) == list(range(len(shards[0].experts)))


def test_rows_too_wide_for_a_control_message_are_not_drawn(shards: list[HeldShard]) -> None:
    wide = dataclasses.replace(shards[0].layer.ffn, out_size=20_000)
    assert drawn_rows(dataclasses.replace(shards[0], layer=dataclasses.replace(shards[0].layer, ffn=wide))) == []


def test_the_kernels_of_this_host_agree_with_the_reference(spec: ModelSpec, shards: list[HeldShard]) -> None:
    ours, reference = HostTwin(Path(spec.path), ISA), HostTwin(Path(spec.path), REFERENCE)
    for held in shards:
        for question in drawn_rows(held, is_thorough=True):
            assert ours.compute(held, question) == reference.compute(held, question)


def test_a_holder_that_differs_from_the_host_is_unfit(spec: ModelSpec, shards: list[HeldShard]) -> None:
    holders = Holders(spec, wrong=("w1",))
    rows = GoldenRows(HostTwin(Path(spec.path), ISA), holders.ask)
    rows.check("w0", shards)
    with pytest.raises(WorkerUnfit, match="worker w1: layer 0 .*shard 0: 1 of 96 values .* column 0: .*as this host") as caught:
        rows.check("w1", shards)
    assert (caught.value.worker, caught.value.layer) == ("w1", 0)
    assert rows.num_mismatches == 1
    assert not rows.unproven


def test_what_the_host_cannot_afford_is_taken_from_the_first_holder_and_left_for_the_audit(
    spec: ModelSpec, shards: list[HeldShard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden, "HOST_BYTES", 0)
    rows = GoldenRows(HostTwin(Path(spec.path), ISA), Holders(spec).ask)
    rows.check("w0", shards)
    assert len(rows.unproven) == len(shards)
    assert {one.holder for one in rows.unproven} == {"w0"}
    rows.check("w1", shards)
    assert len(rows.unproven) == len(shards)


def test_what_the_host_could_not_compute_for_a_while_is_left_for_the_audit(
    spec: ModelSpec, shards: list[HeldShard], monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = HostTwin(Path(spec.path), ISA)
    rows = GoldenRows(twin, Holders(spec).ask)
    with monkeypatch.context() as patch:
        patch.setattr(twin, "_opened", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        rows.check("w0", shards)
    assert len(rows.unproven) == len(shards)
    assert twin.computes(shards[0])


def test_of_two_holders_that_differ_the_host_says_who_is_right(
    spec: ModelSpec, shards: list[HeldShard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden, "HOST_BYTES", 0)
    rows = GoldenRows(HostTwin(Path(spec.path), ISA), Holders(spec, wrong=("w0",)).ask)
    rows.check("w0", shards)
    rows.check("w1", shards)
    with pytest.raises(WorkerUnfit, match="worker w0"):
        rows.check("w0", shards)


def test_without_weights_the_host_compares_holders_with_each_other(
    spec: ModelSpec, shards: list[HeldShard], tmp_path: Path
) -> None:
    twin = HostTwin(tmp_path, ISA)
    rows = GoldenRows(twin, Holders(spec, wrong=("w1",)).ask)
    rows.check("w0", shards)
    assert twin.failure
    assert not rows.unproven
    with pytest.raises(WorkerUnfit, match="as worker w0 computes it"):
        rows.check("w1", shards)


def frame(kind: int, payload: bytes, **fields: int) -> bytes:
    checksum = _core.checksum(payload)
    header = {"kind": kind, "payload_bytes": len(payload), "payload_checksum": checksum, "generation": 1, **fields}
    return _core.encode_frame_header(header) + payload


def exchange(rows: int, **told: int) -> tuple[bytes, bytes]:
    """A request of rows that go to expert 0, and to 1 where the row is odd, and its reply."""
    counts = [1 + row % 2 for row in range(rows)]
    layout = _core.request_layout(rows, sum(counts), 4, "bf16")
    request = bytearray(layout["payload_bytes"])
    ids = [one for count in counts for one in range(count)]
    weights = np.arange(len(ids), dtype=np.float32)
    request[layout["weights_offset"] : layout["weights_offset"] + 4 * len(ids)] = weights.tobytes()
    request[layout["row_counts_offset"] : layout["row_counts_offset"] + 2 * rows] = np.array(counts, np.uint16).tobytes()
    request[layout["local_ids_offset"] : layout["local_ids_offset"] + 2 * len(ids)] = np.array(ids, np.uint16).tobytes()
    request[layout["rows_offset"] :] = np.repeat(np.arange(rows, dtype=np.uint16), 4).tobytes()
    answer = bytes(32) + np.repeat(np.arange(rows, dtype=np.float32), 6).tobytes()
    fields = {"layer": 3, "shard": 2, "num_rows": rows, "num_pairs": len(ids), "request_dtype": 2, "call_id": 9}
    return frame(1, bytes(request), **fields), frame(2, answer, **{**fields, **told})


def test_rows_are_compared_where_no_thread_can_be_started(spec, shards, monkeypatch) -> None:
    class NoThreads(golden.ThreadPoolExecutor):
        submit = Mock(side_effect=RuntimeError("can't start new thread"))

    monkeypatch.setattr(golden, "ThreadPoolExecutor", NoThreads)
    rows = GoldenRows(HostTwin(Path(spec.path), ISA), Holders(spec, wrong=("w1",)).ask)
    rows.check("w0", shards)
    with pytest.raises(WorkerUnfit, match="worker w1"):
        rows.check("w1", shards)
    assert (rows.num_compared, rows.num_mismatches) == (len(shards) + 1, 1)


def test_a_row_that_differs_ends_the_asking(spec, shards) -> None:
    holders = Holders(spec, wrong=("w0",))
    right = holders.ask

    def ask(*question):
        reply = right(*question)
        time.sleep(0.05)  # so that the host has compared the one before
        return reply

    many = [*shards] * 40
    with pytest.raises(WorkerUnfit, match="worker w0"):
        GoldenRows(HostTwin(Path(spec.path), ISA), ask).check("w0", many)
    assert holders.num_asked < len(many)


def test_rows_of_an_exchange_are_cut_out_around_its_end() -> None:
    found = list(exchanged_rows(*exchange(5), first=3, at_most=4))
    assert [row.question.row for row in found] == [np.full(4, row, np.uint16).tobytes() for row in (3, 4, 0, 1)]
    assert [row.answer for row in found] == [np.full(6, row, np.float32).tobytes() for row in (3, 4, 0, 1)]
    assert [row.question.local_expert_ids for row in found] == [(0, 1), (0,), (0,), (0, 1)]
    assert [row.question.weights for row in found] == [(4.0, 5.0), (6.0,), (0.0,), (1.0, 2.0)]
    assert {(row.layer, row.shard, row.question.row_dtype, row.question.reply_dtype) for row in found} == {
        (3, 2, "bf16", "f32")
    }


def test_answers_to_something_else_have_no_rows() -> None:
    for told in ({"call_id": 8}, {"attempt": 1}, {"slice": 1}, {"kind": 3}):
        request, reply = exchange(3)
        if "kind" in told:
            reply = frame(3, b"\x08\0\0\0no", layer=3, shard=2, call_id=9)
        else:
            request, reply = exchange(3, **told)
        assert list(exchanged_rows(request, reply, first=0, at_most=3)) == [], told
    request, reply = exchange(3)
    assert list(exchanged_rows(request, reply[:-1] + b"\1", first=0, at_most=3)) == []


def test_a_reply_that_is_no_frame_has_no_rows() -> None:
    request, reply = exchange(3)
    for damaged in (b"", reply[:25], bytes([reply[0] ^ 1]) + reply[1:], reply[:70]):
        assert list(exchanged_rows(request, damaged, first=0, at_most=3)) == []


def test_a_difference_names_experts_column_and_both_values(shards: list[HeldShard]) -> None:
    question = RowQuestion((0, 2), (1.0, 1.0), b"", "bf16", "f32")
    ours = np.zeros(8, np.float32)
    theirs = ours.copy()
    theirs[5] = 1.0
    experts = f"experts {shards[0].experts[0]}, {shards[0].experts[2]}"
    text = difference(shards[0], question, theirs.tobytes(), ours.tobytes())
    assert text == f"1 of 8 values of a row for {experts} differ, the first at column 5: 0x3f800000 and not 0x00000000 (f32)"
