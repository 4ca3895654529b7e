"""The audit's verdicts with a pretended fleet: who is outvoted, when nobody is, and what it makes
of weights that changed in a worker's memory.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from dflash_moe import _core
from dflash_moe.errors import DflashError
from dflash_moe.holders import row_audit as audit_module
from dflash_moe.holders.audit.golden import Unproven
from dflash_moe.holders.audit.host_twin import HostTwin
from dflash_moe.holders.audit.row_questions import RowQuestion, drawn_rows
from dflash_moe.holders.events import HolderEvents, LifeEvent, WeightsDamaged
from dflash_moe.holders.membership import Happening
from dflash_moe.holders.owner import Owner
from dflash_moe.holders.row_audit import DAY_S, Answerer, Audit, Taps, _Tapped
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.spec import ModelSpec
from dflash_moe.placement import plan_placement
from dflash_moe.placement.held_shards import HeldShard, shards_by_holder
from dflash_moe.topology import Topology
from tests.expert_cases import make_checkpoint, tiny_spec


class Scene:
    """An audit of one worker, w0, whose rows it is handed directly; `w1` holds the same shards."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.events, self.taps = HolderEvents(), Taps()
        self.others: dict[str, bytes] = {}
        self.are_files_unchanged: bool | DflashError = True
        shards = shards_by_holder(spec, plan_placement(spec.layers, Topology.local(num_workers=1)))["w0"]
        self.held = shards[0]
        (self.question,) = drawn_rows(self.held)
        self.fleet = SimpleNamespace(
            owner=Owner(),
            shards=SimpleNamespace(
                golden=SimpleNamespace(unproven=deque(), num_compared=0, num_mismatches=0),
                ask_row=self._ask,
                are_files_unchanged=self._are_files_unchanged,
            ),
            members={
                name: SimpleNamespace(name=name, session=object(), architecture="x", life=SimpleNamespace(attempt=1))
                for name in ("w0", "w1")
            },
            member_of=lambda name: self.fleet.members[name],
            architecture_of=lambda name: self.fleet.members[name].architecture,
        )
        self.audit = Audit(
            self.fleet,
            self.taps,
            Path(spec.path),
            lambda: {"w0": shards, "w1": shards},
            isa=_core.best_isa(),
            cpu=1.0,
            events=self.events,
        )
        right = HostTwin(Path(spec.path), _core.best_isa()).compute(self.held, self.question)
        assert right is not None
        self.right = right
        self.wrong = bytes([right[0] ^ 1]) + right[1:]

    def _ask(self, holder: str, _held: HeldShard, _question: RowQuestion) -> bytes | None:
        return self.others.get(holder)

    def _are_files_unchanged(self) -> bool:
        if isinstance(self.are_files_unchanged, DflashError):
            raise self.are_files_unchanged
        return self.are_files_unchanged

    def out(self) -> list[tuple[str, str, bool]]:
        """Who was outvoted since this was asked last, why, and whether for good."""
        events = [happened for happened in self.events.take() if isinstance(happened, LifeEvent)]
        assert all((one.event.what, one.event.attempt) == (Happening.OUTVOTED, 1) for one in events)
        return [(one.holder.name, one.event.reason, one.event.is_last) for one in events]

    def tap(self, tap: Mock) -> Mock:
        """Has w0 answer through this tap."""
        self.taps._tapped["w0"] = _Tapped(tap, Answerer.now(self.fleet.members["w0"]))
        return tap

    def damage(self, failure: str = "") -> None:
        self.audit.note_damage(WeightsDamaged(self.fleet.members["w0"], 1, 1, 2, failure))

    def judge(self, answer: bytes) -> None:
        self.fleet.shards.golden.unproven.append(Unproven(self.held, self.question, answer, "w0"))
        assert self.audit._audit_next()
        assert not self.audit._audit_next()

    def told(self) -> dict[str, object]:
        found: dict[str, object] = self.audit.stats()["workers"]["w0"]
        return found


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return tiny_spec(make_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def scene(spec: ModelSpec) -> Iterator[Scene]:
    made = Scene(spec)
    yield made
    made.audit.call_off()
    made.audit.close()
    made.taps.close()
    made.events.bell.close()


def test_a_right_answer_is_good_news(scene: Scene) -> None:
    scene.judge(scene.right)
    assert not scene.out()
    assert scene.told()["audited_rows"] == 1
    assert scene.told()["last_good"] is not None


def test_host_and_reference_outvote_a_worker(scene: Scene) -> None:
    scene.judge(scene.wrong)
    ((name, reason, is_last),) = scene.out()
    assert (name, is_last) == ("w0", False)
    assert "outvoted: layer 0" in reason
    assert "the first at column 0" in reason
    assert scene.audit.stats()["mismatches"] == 1


def test_a_host_that_computes_wrongly_takes_nobody_out(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene.audit._twin, "compute", lambda _held, _question: scene.wrong)
    scene.judge(scene.right)
    assert not scene.out()
    assert scene.audit.stats()["host_wrong"] == 1


def test_a_host_whose_files_have_changed_takes_nobody_out(scene: Scene) -> None:
    scene.are_files_unchanged = False
    scene.judge(scene.wrong)
    assert not scene.out()
    assert scene.audit.stats()["undecided"] == 1
    assert "files of the checkpoint have changed" in str(scene.told()["skipped"])


def test_a_host_that_cannot_look_at_its_files_takes_nobody_out_and_says_why(scene: Scene) -> None:
    scene.are_files_unchanged = DflashError("stale file handle", code="system")
    scene.judge(scene.wrong)
    assert not scene.out()
    assert scene.audit.stats()["undecided"] == 1
    assert scene.told()["skipped"] == "it is not known at this time whether this host's files have changed: stale file handle"


def test_where_all_three_differ_nobody_is_taken_out(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene.audit._twin, "compute", lambda _held, _question: scene.wrong[::-1])
    scene.judge(scene.wrong)
    assert not scene.out()
    assert scene.audit.stats()["undecided"] == 1


def test_without_weights_at_the_host_another_holder_is_asked(scene: Scene) -> None:
    scene.audit._twin.failure = scene.audit._third.failure = "only a stub"
    scene.judge(scene.right)
    assert "only a stub" in str(scene.told()["skipped"])
    scene.others["w1"] = scene.right
    scene.judge(scene.right)
    assert scene.told()["audited_rows"] == 1
    scene.judge(scene.wrong)
    assert scene.audit.stats()["undecided"] == 1
    assert not scene.out()


def test_a_row_that_cannot_be_computed_is_left_out_and_the_next_is_audited(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(scene.audit._twin, "compute", Mock(side_effect=RuntimeError("a row of another world")))
        for _ in range(100):
            scene.judge(scene.right)
    assert scene.told()["audited_rows"] == 0
    assert scene.told()["skipped"] == "a row could not be computed again: RuntimeError: a row of another world"
    # A hundred rows, and one line.
    assert sum("could not be computed again" in record.message for record in caplog.records) == 1
    scene.judge(scene.right)
    assert (scene.told()["audited_rows"], scene.told()["skipped"]) == (1, "")


def test_an_exchange_that_cannot_be_read_is_left_out_and_the_burst_after_it_is_asked_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    tap = Mock(is_spent=True)
    tap.take.return_value = [(b"", b""), (b"", b"")]
    rows = Mock(side_effect=[ValueError("no such exchange"), iter([Mock()])])
    monkeypatch.setattr(scene.audit, "_rows_of", rows)
    scene.tap(tap)
    scene.audit._take("w0", tap)
    assert len(scene.audit._rows) == 1
    tap.arm.assert_called_once()


def test_what_a_worker_answered_before_it_was_lost_is_not_held_against_who_takes_its_place(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_core, "make_tapped", lambda channel, _tap: channel)
    monkeypatch.setattr(scene.audit, "_rows_of", lambda request, _reply, _first: [request])
    w0 = scene.fleet.members["w0"]
    tap = scene.tap(Mock(is_spent=False))
    tap.take.return_value = [("answered before", b"")]
    scene.audit._take("w0", tap)
    assert list(scene.audit._rows) == [((w0, 1), "answered before")]
    scene.audit._rows.clear()
    scene.judge(scene.wrong)
    tap.take.return_value = [("answered since then", b"")]
    scene.audit._take("w0", tap)
    assert not scene.audit._rows
    num_taken = tap.take.call_count
    scene.taps.watch(w0, Mock())  # another path of the same process
    assert tap.take.call_count == num_taken
    w0.life.attempt = 2
    scene.taps.watch(w0, Mock())
    assert tap.take.call_count == num_taken + 1
    tap.take.return_value = [("answered by the other", b"")]
    scene.audit._take("w0", tap)
    assert list(scene.audit._rows) == [((w0, 2), "answered by the other")]


def test_a_row_of_a_process_that_is_gone_is_held_against_it_and_not_against_who_took_its_place(scene: Scene) -> None:
    w0 = scene.fleet.members["w0"]
    w0.life.attempt = 2
    tap = scene.tap(Mock(is_spent=False))
    row = SimpleNamespace(layer=scene.held.layer.index, shard=scene.held.shard_id, question=scene.question, answer=scene.wrong)
    scene.audit._rows.append((Answerer(w0, 1), row))
    assert scene.audit._audit_next()
    (event,) = [happened.event for happened in scene.events.take() if isinstance(happened, LifeEvent)]
    assert (event.what, event.attempt) == (Happening.OUTVOTED, 1)
    assert not tap.take.called


def test_a_thread_that_cannot_wait_says_so_and_tries_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "AGAIN_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(scene.audit, "_await_copies", Mock(side_effect=OSError("no bell")))
        scene.audit._step()
    assert scene.audit.stats()["failure"] == "copies cannot be waited for: OSError: no bell"
    scene.taps.bell.ring()
    scene.audit._step()
    assert scene.audit.stats()["failure"] == ""


def test_a_thread_that_ends_says_so(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene.audit, "_audit_next", Mock(side_effect=SystemExit("enough")))
    scene.audit._run()
    assert scene.audit.stats()["failure"] == "the thread of the audit has ended: SystemExit: enough"


def test_what_the_system_lacks_for_a_while_is_told_as_that(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "open", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        scene.judge(scene.right)
    assert "cannot compute at this time: [Errno 24] Too many open files" in str(scene.told()["skipped"])
    scene.judge(scene.right)
    assert (scene.told()["audited_rows"], scene.told()["skipped"]) == (1, "")


def test_the_second_change_of_weights_within_a_day_takes_a_worker_out(scene: Scene) -> None:
    scene.damage()
    assert not scene.out()
    scene.audit._watched["w0"].changes[0] -= DAY_S
    scene.damage()
    assert not scene.out()
    scene.damage()
    ((name, reason, is_last),) = scene.out()
    assert (name, is_last) == ("w0", True)
    assert "for the second time within a day" in reason
    assert scene.audit.stats()["weights_changed"] == 3


def test_weights_that_cannot_be_loaded_again_take_a_worker_out_at_once(scene: Scene) -> None:
    scene.damage("its bytes are not those of the first loading")
    ((_, reason, is_last),) = scene.out()
    assert not is_last
    assert "could not be loaded again: its bytes" in reason
