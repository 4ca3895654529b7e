"""The state machine of a member: what it orders, whatever happens in whatever order.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dflash_moe.holders.membership import JITTER, Event, Happening, Life, Order, RestartPolicy, State, Task

POLICY = RestartPolicy(backoff_s=(0.1, 5.0), deaths=5, window_s=60.0)
# The states in which a task may be ordered. END comes with a loss and with a removal.
LEGAL = {
    Task.START: {State.STARTING},
    Task.JOIN: {State.JOINING},
    Task.END: {State.LOST, State.DRAINING},
    Task.WAIT: {State.WAITING},
    Task.DRAIN: {State.DRAINING},
}


class Executor(RuleBasedStateMachine):
    """Carries orders out as a keeper does: START and JOIN take a while and answer once, END cuts
    them short and answers once. Whatever else may happen, happens at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.under_way: Order | None = None
        self.ending: Order | None = None
        self.deaths: list[float] = []
        self.ended: list[int] = []

    @initialize(is_started_by_host=st.booleans(), seed=st.integers(0, 2**32))
    def add(self, is_started_by_host: bool, seed: int) -> None:
        self.member = Life("w0", POLICY, random.Random(seed), is_started_by_host)
        self.say(Happening.ADDED)

    def say(self, what: Happening, attempt: int | None = None, *, is_death: bool = True) -> None:
        before, attempt_before = self.member.state, self.member.attempt
        num_deaths = self.member.num_deaths
        orders = self.member.on(
            Event(what, self.member.attempt if attempt is None else attempt, what.value, is_death), self.now
        )
        if self.member.num_deaths > num_deaths:
            self.deaths.append(self.now)
        if (what, before) in ((Happening.RELEASED, State.QUARANTINED), (Happening.ADDED, State.GONE)):
            self.deaths = []
        for order in orders:
            assert self.member.state in LEGAL[order.task]
            assert order.attempt == self.member.attempt
            self.obey(order)
        if self.member.attempt != attempt_before:
            assert orders[0].task is Task.START

    def obey(self, order: Order) -> None:
        if order.task is Task.START or order.task is Task.JOIN:
            assert self.under_way is None, "two starts under way"
            assert self.ending is None, "a start while its predecessor is being cleared away"
            self.under_way = order
        elif order.task is Task.END:
            assert self.ending is None, "two ends under way"
            assert order.attempt not in self.ended, "ended twice"
            self.ending = order
        elif order.task is Task.WAIT and order.until != self.member.next_try:
            raise AssertionError("it waits for something else than its next try")

    @precondition(lambda self: self.under_way is not None)
    @rule(
        how=st.sampled_from([Happening.FAILED, Happening.UNFIT, Happening.STARTED, Happening.STARTED, Happening.STARTED]),
        is_death=st.booleans(),
    )
    def answer(self, how: Happening, is_death: bool) -> None:
        order, self.under_way = self.under_way, None
        assert order is not None
        if how is Happening.STARTED and order.task is Task.JOIN:
            how = Happening.JOINED
        self.say(how, order.attempt, is_death=is_death)

    @precondition(lambda self: self.ending is not None)
    @rule()
    def end(self) -> None:
        order, self.ending = self.ending, None
        assert order is not None
        # What was under way is cut short first, and its answer comes before or after.
        if self.under_way is not None:
            cut, self.under_way = self.under_way, None
            self.say(Happening.FAILED, cut.attempt)
        self.ended.append(order.attempt)
        was_left_alone, before = self.member._is_left_alone, self.member.state
        self.say(Happening.ENDED, order.attempt)
        if before is State.LOST:
            assert self.member.state is (State.QUARANTINED if was_left_alone else State.WAITING)
        if self.member.state is State.WAITING:
            pause = self.member.next_try - self.now
            assert 0.1 * (1 - JITTER) <= pause <= 5.0 * (1 + JITTER)

    @rule(seconds=st.sampled_from([0.001, 0.05, 0.2, 1.0, 7.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def due(self) -> None:
        is_due = self.member.state is State.WAITING and self.now >= self.member.next_try
        attempt = self.member.attempt
        self.say(Happening.DUE)
        assert (self.member.attempt == attempt + 1) is is_due

    @rule()
    def lose(self) -> None:
        was_ready = self.member.state is State.READY
        self.say(Happening.LOST)
        if was_ready:
            assert self.member.state is State.LOST

    @rule(what=st.sampled_from([Happening.RELEASED, Happening.ADDED, Happening.REMOVED, Happening.RECYCLED]))
    def ask(self, what: Happening) -> None:
        self.say(what)

    @precondition(lambda self: self.member.state is State.DRAINING)
    @rule()
    def drain(self) -> None:
        self.say(Happening.DRAINED)

    @rule(what=st.sampled_from(list(Happening)), back=st.integers(1, 3))
    def late(self, what: Happening, back: int) -> None:
        """An event of an earlier attempt changes nothing."""
        if what in (Happening.ADDED, Happening.DUE, Happening.RELEASED, Happening.REMOVED, Happening.RECYCLED):
            return
        before = (self.member.state, self.member.attempt, self.member.num_deaths, self.member.since)
        self.say(what, self.member.attempt - back)
        assert (self.member.state, self.member.attempt, self.member.num_deaths, self.member.since) == before

    @invariant()
    def quarantine_by_deaths_is_exact(self) -> None:
        if self.member.state is not State.QUARANTINED or self.member.is_unfit:
            return
        recent = [at for at in self.deaths if self.deaths[-1] - at < POLICY.window_s]
        assert len(recent) == POLICY.deaths

    @invariant()
    def no_more_deaths_than_allowed_are_survived(self) -> None:
        if self.member.state in (State.STARTING, State.JOINING, State.READY, State.WAITING) and self.deaths:
            recent = [at for at in self.deaths if self.deaths[-1] - at < POLICY.window_s]
            assert len(recent) < POLICY.deaths


Executor.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestExecutor = Executor.TestCase


def fresh(*, is_started_by_host: bool = True, policy: RestartPolicy = POLICY) -> Life:
    member = Life("w0", policy, random.Random(1), is_started_by_host)
    assert member.on(Event(Happening.ADDED), 0.0) == [Order(Task.START, 1)]
    return member


def make_ready(member: Life, now: float) -> None:
    assert member.on(Event(Happening.STARTED, member.attempt), now) == [Order(Task.JOIN, member.attempt)]
    assert member.on(Event(Happening.JOINED, member.attempt), now) == []
    assert member.state is State.READY


def lose(member: Life, now: float) -> list[Order]:
    assert member.on(Event(Happening.LOST, member.attempt, "hung up"), now) == [Order(Task.END, member.attempt)]
    return member.on(Event(Happening.ENDED, member.attempt), now)


def start_again(member: Life) -> float:
    now = member.next_try
    assert member.on(Event(Happening.DUE), now) == [Order(Task.START, member.attempt)]
    return now


def test_pauses_double_until_the_longest_and_begin_anew_after_a_steady_time() -> None:
    member, now = fresh(is_started_by_host=False, policy=RestartPolicy(deaths=100)), 0.0
    for expected in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0):
        make_ready(member, now)
        (order,) = lose(member, now)
        assert expected * (1 - JITTER) <= order.until - now <= expected * (1 + JITTER)
        now = start_again(member)
    make_ready(member, now)
    (order,) = lose(member, now + 5.0)
    assert order.until - (now + 5.0) <= 0.1 * (1 + JITTER)


def test_goodbyes_are_no_crash_loop() -> None:
    """Whoever stops and starts workers by hand, or a scheduler does, has not seen them die."""
    member, now = fresh(), 0.0
    for _ in range(2 * POLICY.deaths):
        make_ready(member, now)
        goodbye = Event(Happening.LOST, member.attempt, "it was told to stop", is_death=False)
        assert member.on(goodbye, now) == [Order(Task.END, member.attempt)]
        member.on(Event(Happening.ENDED, member.attempt), now)
        assert (member.state, member.num_deaths) == (State.WAITING, 0)
        now = start_again(member)


def test_members_that_died_together_do_not_come_back_together() -> None:
    rng = random.Random(3)
    tries = set()
    for _ in range(8):
        member = Life("w", POLICY, rng)
        member.on(Event(Happening.ADDED), 0.0)
        make_ready(member, 0.0)
        lose(member, 0.0)
        tries.add(member.next_try)
    assert len(tries) == 8


def test_a_crash_loop_is_left_alone_until_it_is_released() -> None:
    member, now = fresh(), 0.0
    for death in range(1, 6):
        make_ready(member, now)
        lose(member, now)
        assert member.num_deaths == death
        if death < 5:
            now = start_again(member)
    assert member.state is State.QUARANTINED
    assert not member.is_coming
    assert "5 deaths within 60 s" in member.reason
    assert member.on(Event(Happening.DUE), now + 1e6) == []
    assert member.on(Event(Happening.RELEASED), now) == [Order(Task.START, 6)]
    make_ready(member, now)
    lose(member, now)
    assert member.state is State.WAITING  # what was before counts no more


def test_deaths_that_lie_far_apart_are_no_crash_loop() -> None:
    member, now = fresh(), 0.0
    for _ in range(50):
        make_ready(member, now)
        now += 16.0  # four within a minute
        lose(member, now)
        now = start_again(member)
    assert member.num_deaths == 50


def test_a_worker_out_of_reach_is_dialled_for_ever() -> None:
    member, now = fresh(is_started_by_host=False), 0.0
    for _ in range(100):
        assert member.on(Event(Happening.FAILED, member.attempt, "connection refused"), now) == [
            Order(Task.END, member.attempt)
        ]
        member.on(Event(Happening.ENDED, member.attempt), now)
        now = start_again(member)
    assert member.num_deaths == 0


@pytest.mark.parametrize("is_started_by_host", [True, False])
def test_a_worker_that_will_not_do_is_left_alone_at_once(is_started_by_host: bool) -> None:
    member = fresh(is_started_by_host=is_started_by_host)
    member.on(Event(Happening.STARTED, 1), 0.0)
    assert member.on(Event(Happening.UNFIT, 1, "other weights"), 1.0) == [Order(Task.END, 1)]
    member.on(Event(Happening.ENDED, 1), 1.0)
    assert (member.state, member.reason, member.num_deaths) == (State.QUARANTINED, "other weights", 0)


def test_where_nobody_can_release_it_an_unfit_worker_started_by_hand_is_dialled_again() -> None:
    member = fresh(is_started_by_host=False, policy=RestartPolicy(retries_unfit=True))
    member.on(Event(Happening.UNFIT, 1, "other weights"), 1.0)
    member.on(Event(Happening.ENDED, 1), 1.0)
    assert member.state is State.WAITING
    assert member.is_unfit


def test_where_restarts_are_off_a_loss_is_final_until_a_release() -> None:
    member = fresh(policy=RestartPolicy(is_on=False))
    make_ready(member, 0.0)
    lose(member, 1.0)
    assert member.state is State.QUARANTINED
    assert member.on(Event(Happening.RELEASED), 2.0) == [Order(Task.START, 2)]


def test_a_loss_between_the_path_and_the_word_of_it_is_not_forgotten() -> None:
    member = fresh()
    member.on(Event(Happening.STARTED, 1), 0.0)
    assert member.on(Event(Happening.LOST, 1, "hung up"), 0.0) == []
    assert member.on(Event(Happening.JOINED, 1), 0.0) == [Order(Task.END, 1)]
    assert (member.state, member.reason) == (State.LOST, "hung up")


def test_an_outvoted_member_is_tried_once_more_and_then_left_alone() -> None:
    member = fresh()
    make_ready(member, 0.0)
    for time_of, expected in ((1.0, State.WAITING), (2.0, State.QUARANTINED)):
        orders = member.on(Event(Happening.OUTVOTED, member.attempt, "wrong numbers"), time_of)
        assert [order.task for order in orders] == [Task.END]
        member.on(Event(Happening.ENDED, member.attempt), time_of)
        assert (member.state, member.reason) == (expected, "wrong numbers")
        if expected is State.WAITING:
            member.on(Event(Happening.DUE), member.next_try)
            member.on(Event(Happening.STARTED, member.attempt), member.next_try)
            member.on(Event(Happening.JOINED, member.attempt), member.next_try)
            assert (member.state, member.num_outvoted) == (State.READY, 1)
    member.on(Event(Happening.RELEASED), 3.0)
    assert (member.state, member.num_outvoted) == (State.STARTING, 0)


def test_the_last_outvote_leaves_a_member_alone_at_once_and_one_that_is_not_ready_ignores_it() -> None:
    member = fresh()
    make_ready(member, 0.0)
    member.on(Event(Happening.OUTVOTED, member.attempt, "bad memory", is_last=True), 1.0)
    assert member.on(Event(Happening.OUTVOTED, member.attempt, "again"), 1.0) == []
    member.on(Event(Happening.ENDED, member.attempt), 1.0)
    assert (member.state, member.reason) == (State.QUARANTINED, "bad memory")


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("begun", [Happening.REMOVED, Happening.RECYCLED])
def test_an_outvoted_member_that_drains_is_ended_at_once(begun: Happening, is_last: bool) -> None:
    member = fresh()
    make_ready(member, 0.0)
    assert [order.task for order in member.on(Event(begun), 1.0)] == [Task.DRAIN]
    orders = member.on(Event(Happening.OUTVOTED, member.attempt, "wrong numbers", is_last=is_last), 2.0)
    assert orders == [Order(Task.END, member.attempt)]
    # Said again, or drained meanwhile, it is ended once.
    assert member.on(Event(Happening.OUTVOTED, member.attempt, "wrong numbers"), 2.0) == []
    assert member.on(Event(Happening.DRAINED, member.attempt), 2.0) == []
    assert member.is_coming is (begun is Happening.RECYCLED and not is_last)
    member.on(Event(Happening.ENDED, member.attempt), 3.0)
    started_anew = State.QUARANTINED if is_last else State.STARTING
    expected = State.GONE if begun is Happening.REMOVED else started_anew
    assert (member.state, member.reason, member.num_outvoted) == (expected, "wrong numbers", 1)


def test_a_removed_member_is_drained_and_then_gone() -> None:
    member = fresh()
    make_ready(member, 0.0)
    assert member.on(Event(Happening.REMOVED), 1.0) == [Order(Task.DRAIN, 1)]
    assert member.state is State.DRAINING
    assert member.on(Event(Happening.DRAINED, 1), 2.0) == [Order(Task.END, 1)]
    assert member.on(Event(Happening.LOST, 1, "hung up"), 2.0) == []
    assert member.on(Event(Happening.ENDED, 1), 3.0) == []
    assert member.state is State.GONE
    assert member.on(Event(Happening.ADDED), 4.0) == [Order(Task.START, 2)]


def test_a_recycled_member_is_drained_and_started_anew_and_is_worth_waiting_for_all_the_while() -> None:
    member = fresh()
    make_ready(member, 0.0)
    assert member.on(Event(Happening.RECYCLED), 1.0) == [Order(Task.DRAIN, 1)]
    assert member.serves
    assert member.on(Event(Happening.DRAINED, 1), 2.0) == [Order(Task.END, 1)]
    assert member.is_coming
    assert not member.serves
    assert member.on(Event(Happening.ENDED, 1), 3.0) == [Order(Task.START, 2)]
    make_ready(member, 4.0)
    assert member.num_deaths == 0
    lose(member, 5.0)
    assert member.state is State.WAITING  # it is not recycled for ever


def test_a_recycled_member_that_dies_while_it_drains_is_started_anew_at_once() -> None:
    member = fresh()
    make_ready(member, 0.0)
    member.on(Event(Happening.RECYCLED), 1.0)
    assert member.on(Event(Happening.LOST, 1, "hung up"), 2.0) == [Order(Task.END, 1)]
    assert member.on(Event(Happening.ENDED, 1), 3.0) == [Order(Task.START, 2)]


def test_a_removal_wins_over_a_recycling() -> None:
    member = fresh()
    make_ready(member, 0.0)
    member.on(Event(Happening.RECYCLED), 1.0)
    assert member.on(Event(Happening.REMOVED), 1.0) == []
    assert not member.is_coming
    member.on(Event(Happening.DRAINED, 1), 2.0)
    assert member.on(Event(Happening.ENDED, 1), 3.0) == []
    assert member.state is State.GONE


def test_a_member_that_is_not_ready_is_not_recycled() -> None:
    member = fresh()
    assert member.on(Event(Happening.RECYCLED), 1.0) == []
    make_ready(member, 1.0)
    lose(member, 2.0)
    assert member.on(Event(Happening.RECYCLED), 2.0) == []
    assert member.state is State.WAITING
