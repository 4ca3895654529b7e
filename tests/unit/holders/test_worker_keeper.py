"""The keeper of workers with workers that are only pretended: what it does about each kind of
failure, and that it ends in the middle of anything.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_moe.errors import CheckpointError, ConfigError, DflashError, WorkerError, WorkerLost, WorkerTimeout
from dflash_moe.holders import events
from dflash_moe.holders.events import HolderEvents, Notice, PathLate
from dflash_moe.holders.holder import Holder, Parting
from dflash_moe.holders.membership import Happening, Life, RestartPolicy, State
from dflash_moe.holders.owner import Owner
from dflash_moe.holders.worker_keeper import WorkerKeeper
from dflash_moe.topology.addresses import Address, parse_address

SOON_S = 60.0
QUICK = RestartPolicy(backoff_s=(0.001, 0.002), deaths=3)


class Pretended:
    """A fleet of one worker, and those who call it. `failures` are raised by the next steps."""

    def __init__(self, policy: RestartPolicy = QUICK, *, is_started_by_host: bool = True) -> None:
        self.owner = Owner()
        self.events = HolderEvents()
        self.notices: list[Notice] = []
        self.done: list[str] = []
        self.failures: list[tuple[str, BaseException]] = []
        self.hung_up = threading.Event()
        self.hangs_at = ""
        self.lost: list[tuple[str, str]] = []
        self.told: list[State] = []
        self.has_left = False
        session: Any = SimpleNamespace(
            started=None, fileno=lambda: -1, kill=lambda: None, hang_up=self.hung_up.set, has_left=lambda: self.has_left
        )
        life = Life("w0", policy, random.Random(), is_started_by_host)
        self.member = Holder("w0", parse_address(None), "shared", "f32-canonical", "packed", life, session=session)
        self.members = {"w0": self.member}

    def step(self, name: str) -> None:
        self.done.append(name)
        if self.hangs_at == name:
            assert self.hung_up.wait(SOON_S)
            raise WorkerLost("hung up on")
        if self.failures and self.failures[0][0] == name:
            raise self.failures.pop(0)[1]

    def start_again(self, _member: Any) -> None:
        self.step("start")

    def load_again(self, _member: Any, shards: Any) -> None:
        assert shards == ["its shards"]
        self.step("load")

    def end_member(self, _member: Any) -> None:
        self.step("end")

    def dismiss(self, _member: Any) -> None:
        self.step("dismiss")

    def lose(self, _member: Any, reason: str) -> None:
        self.done.append(f"lose: {reason}")

    def join(self, _member: Any) -> None:
        self.lost.clear()
        self.step("join")

    def news(self) -> list[tuple[str, Happening, str]]:
        return [(name, Happening.LOST, reason) for name, reason in self.lost]

    def note(self, notice: Notice) -> None:
        self.notices.append(notice)
        self.step("note")

    def descriptor(self) -> int:
        return -1

    def tell(self, member: Holder) -> None:
        self.told.append(member.life.state)


Keep = Callable[..., WorkerKeeper]


@pytest.fixture
def keep() -> Iterator[Keep]:
    keepers: list[WorkerKeeper] = []

    def start(pretended: Pretended) -> WorkerKeeper:
        placed: Any = SimpleNamespace(fleet=pretended, held={"w0": ["its shards"]})
        keepers.append(WorkerKeeper(placed, pretended, pretended.events))
        keepers[-1].start()
        return keepers[-1]

    yield start
    for keeper in keepers:
        keeper.call_off()
        keeper.close()
        keeper._events.bell.close()


def wait_for(keeper: WorkerKeeper, state: str) -> None:
    until = time.monotonic() + SOON_S
    while keeper.states()[0].state != state:
        assert time.monotonic() < until, keeper.states()
        time.sleep(0.001)


def lose_and_wait(keeper: WorkerKeeper, pretended: Pretended, state: str = "ready") -> None:
    deaths = keeper.states()[0].deaths
    pretended.events.happen(pretended.member, Happening.LOST, "no progress")
    until = time.monotonic() + SOON_S
    while keeper.states()[0].deaths == deaths:
        assert time.monotonic() < until
        time.sleep(0.001)
    wait_for(keeper, state)


def test_a_loss_is_cleared_away_before_the_worker_is_started_loaded_and_joined(keep: Keep) -> None:
    pretended = Pretended()
    keeper = keep(pretended)
    lose_and_wait(keeper, pretended)
    assert pretended.done == ["lose: no progress", "end", "start", "load", "join"]
    states = [State.READY, State.LOST, State.WAITING, State.STARTING, State.JOINING, State.READY]
    assert pretended.told == states


def test_a_loss_that_only_the_calls_know_is_seen_at_the_bell(keep: Keep) -> None:
    pretended = Pretended()
    keeper = keep(pretended)
    pretended.lost.append(("w0", "it sent garbage"))
    pretended.events.bell.ring()
    wait_for(keeper, "ready")
    until = time.monotonic() + SOON_S
    while "join" not in pretended.done:
        assert time.monotonic() < until
        time.sleep(0.001)
    assert pretended.done[0] == "lose: it sent garbage"


@pytest.mark.parametrize("step", ["start", "load", "join"])
@pytest.mark.parametrize(
    "failure", [WorkerLost("died"), WorkerError("out of memory"), DflashError("no descriptors"), OSError("?")]
)
def test_whatever_a_step_fails_with_it_is_tried_again(keep: Keep, step: str, failure: BaseException) -> None:
    pretended = Pretended()
    keeper = keep(pretended)
    pretended.failures.append((step, failure))
    lose_and_wait(keeper, pretended)
    assert pretended.done.count("end") == 2
    was_death = isinstance(failure, WorkerLost | OSError) or (isinstance(failure, WorkerError) and step != "start")
    assert keeper.states()[0].deaths == 1 + was_death


@pytest.mark.parametrize("step", ["start", "load"])
@pytest.mark.parametrize("failure", [CheckpointError("other weights"), ConfigError("no such device")])
def test_a_worker_that_will_not_do_is_left_alone_until_it_is_released(keep: Keep, step: str, failure: DflashError) -> None:
    pretended = Pretended()
    keeper = keep(pretended)
    pretended.failures.append((step, failure))
    lose_and_wait(keeper, pretended, "quarantined")
    assert keeper.states()[0].reason == str(failure)
    assert f"it is left alone ({failure})" in keeper.remedy_of("w0")
    keeper.release("w0")
    wait_for(keeper, "ready")
    with pytest.raises(ConfigError, match="worker w0 is ready"):
        keeper.release("w0")


def test_out_of_reach_is_no_death_of_a_worker_started_by_hand(keep: Keep) -> None:
    pretended = Pretended(is_started_by_host=False)
    keeper = keep(pretended)
    pretended.failures += [("start", WorkerLost("connection refused"))] * 10
    lose_and_wait(keeper, pretended)
    assert keeper.states()[0].deaths == 1
    assert pretended.done.count("start") == 11


@pytest.mark.parametrize("step", ["start", "load", "join"])
def test_the_end_cuts_short_what_is_under_way(keep: Keep, step: str) -> None:
    pretended = Pretended()
    keeper = keep(pretended)
    pretended.hangs_at = step
    pretended.events.happen(pretended.member, Happening.LOST, "no progress")
    until = time.monotonic() + SOON_S
    while step not in pretended.done:
        assert time.monotonic() < until
        time.sleep(0.001)
    keeper.call_off()
    assert pretended.hung_up.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("-w0")]


def test_holders_inside_this_process_are_ready_and_never_brought_back(keep: Keep) -> None:
    pretended = Pretended()
    pretended.member.session = None
    keeper = keep(pretended)
    assert [found.state for found in keeper.states()] == ["ready"]
    assert keeper.remedy_of("w0") == "start the runtime anew"


def parting_of(pretended: Pretended, drain_s: float) -> Parting:
    def gone(_member: Any) -> None:
        pretended.members = {}
        pretended.done.append("gone")

    return Parting(drain_s, lambda _member: pretended.done.append("leave"), gone)


def test_a_worker_that_is_removed_drains_says_goodbye_and_is_forgotten(keep: Keep) -> None:
    pretended = Pretended()
    keeper = keep(pretended)
    keeper.let_go("w0", parting_of(pretended, 3600.0))
    wait_for(keeper, "draining")
    with pytest.raises(ConfigError, match="worker w0 is draining already"):
        keeper.let_go("w0", parting_of(pretended, 0.0))
    pretended.events.happen(pretended.member, Happening.DRAINED)
    assert keeper.await_end("w0", SOON_S) is None
    assert pretended.done == ["leave", "dismiss", "gone"]
    assert pretended.told[-1] is State.GONE
    assert keeper.states() == []
    pretended.events.happen(pretended.member, Happening.DRAINED)  # it is nobody's any more
    pretended.events.happen(pretended.member, Happening.LOST, "hung up")
    with pytest.raises(ConfigError, match="no worker is named 'w0'"):
        keeper.release("w0")


def test_the_time_to_drain_ends_by_itself(keep: Keep) -> None:
    pretended = Pretended()
    keeper = keep(pretended)
    keeper.let_go("w0", parting_of(pretended, 0.01))
    assert keeper.await_end("w0", SOON_S) is None
    assert pretended.done == ["leave", "dismiss", "gone"]


def test_a_recycled_worker_is_ended_and_started_anew_without_a_pause(keep: Keep) -> None:
    pretended = Pretended(RestartPolicy(backoff_s=(3600.0, 3600.0)))
    keeper = keep(pretended)
    keeper.let_go("w0", parting_of(pretended, 3600.0), is_recycled=True)
    wait_for(keeper, "draining")
    pretended.events.happen(pretended.member, Happening.DRAINED)
    back = keeper.await_end("w0", SOON_S)
    assert back is not None
    assert (back.state, back.deaths) == ("ready", 0)
    assert pretended.done == ["leave", "dismiss", "start", "load", "join"]


def test_a_worker_lost_while_it_drains_is_ended_at_once(keep: Keep) -> None:
    pretended = Pretended()
    keeper = keep(pretended)
    keeper.let_go("w0", parting_of(pretended, 3600.0))
    wait_for(keeper, "draining")
    pretended.events.happen(pretended.member, Happening.LOST, "hung up")
    assert keeper.await_end("w0", SOON_S) is None


def test_a_wait_for_a_worker_that_drains_has_a_limit_and_ends_with_the_keeper(keep: Keep) -> None:
    pretended = Pretended()
    keeper = keep(pretended)
    keeper.let_go("w0", parting_of(pretended, 3600.0))
    with pytest.raises(WorkerTimeout, match=r"worker w0 is (ready|draining) after 0\.01 s"):
        keeper.await_end("w0", 0.01)
    closing = threading.Timer(0.05, keeper.call_off)
    closing.start()
    with pytest.raises(DflashError, match="closed while worker w0 was let go"):
        keeper.await_end("w0", SOON_S)
    closing.join(SOON_S)


def test_a_worker_that_is_not_ready_is_removed_without_a_goodbye(keep: Keep) -> None:
    pretended = Pretended(RestartPolicy(is_on=False))
    keeper = keep(pretended)
    lose_and_wait(keeper, pretended, "quarantined")
    with pytest.raises(ConfigError, match="worker w0 is quarantined and not ready: no progress"):
        keeper.let_go("w0", parting_of(pretended, 0.0), is_recycled=True)
    keeper.let_go("w0", parting_of(pretended, 3600.0))
    assert keeper.await_end("w0", SOON_S) is None
    assert pretended.done == ["lose: no progress", "end", "gone"]


def test_what_a_worker_said_last_is_the_reason_of_its_loss(keep: Keep) -> None:
    pretended = Pretended()
    keeper = keep(pretended)
    pretended.has_left = True
    pretended.events.happen(pretended.member, Happening.LOST, "no progress")
    until = time.monotonic() + SOON_S
    while "start" not in str(pretended.done):
        assert time.monotonic() < until
        time.sleep(0.001)
    wait_for(keeper, "ready")
    assert pretended.done[0] == "lose: it was told to stop"
    assert pretended.member.life.num_deaths == 0


def test_a_last_word_that_another_thread_had_at_the_loss_is_asked_for_again(keep: Keep) -> None:
    pretended = Pretended()
    pretended.member.address = Address("registered")
    known = pretended.member.session

    def at_the_second_look() -> bool:
        pretended.done.append(f"look, {pretended.member.life.state.value}")
        return len([one for one in pretended.done if one.startswith("look")]) > 1

    known.has_left = at_the_second_look  # type: ignore[union-attr]
    pretended.start_again = lambda member: pretended.step(f"start, has left: {member.has_left}")  # type: ignore[method-assign]
    keeper = keep(pretended)
    lose_and_wait(keeper, pretended)
    assert pretended.done[:5] == ["look, ready", "lose: no progress", "look, lost", "end", "start, has left: True"]
    assert not pretended.member.has_left, "it was started again"


def test_what_is_nothing_for_a_life_goes_to_those_who_call(keep: Keep) -> None:
    pretended = Pretended()
    keep(pretended)
    late = PathLate(pretended.member)
    pretended.events.note(late)
    until = time.monotonic() + SOON_S
    while pretended.notices != [late]:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_what_waits_behind_an_event_that_fails_is_taken_all_the_same(keep: Keep) -> None:
    pretended = Pretended()
    pretended.failures.append(("note", RuntimeError("of another world")))
    late = PathLate(pretended.member)
    pretended.events.note(late)
    pretended.events.happen(pretended.member, Happening.LOST, "hung up")  # which has no attempt yet
    pretended.events.note(late)
    keep(pretended)
    until = time.monotonic() + SOON_S
    while pretended.notices != [late, late]:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_an_event_of_an_earlier_attempt_is_not_held_against_the_latest(keep: Keep) -> None:
    pretended = Pretended()
    keeper = keep(pretended)
    lose_and_wait(keeper, pretended)
    pretended.events.happen(pretended.member, Happening.OUTVOTED, "wrong numbers", attempt=1)
    pretended.events.happen(pretended.member, Happening.OUTVOTED, "wrong numbers", attempt=2, is_last=True)
    wait_for(keeper, "quarantined")
    assert keeper.states()[0].deaths == 2


def test_a_worker_that_tells_of_damage_without_end_does_not_fill_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_WAITING", 3)
    pretended = Pretended()
    pretended.events.bell.open("the test")
    for shard in range(10):
        pretended.events.damage(pretended.member, 0, shard, "")
    pretended.events.happen(pretended.member, Happening.LOST, "hung up")
    assert len(list(pretended.events.take())) == 4
    pretended.events.bell.close()
    pretended.events.damage(pretended.member, 0, 0, "")  # a bell that is closed is rung in vain
