"""Random requests through a scheduler over a tiny pool: every plan can be carried out, the books
are right after every step, and all requests end within a bounded number of steps.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dflash_moe.engine.request import Request
from dflash_moe.engine.schedule import StepPlan, begins_followers
from tests.scheduled_steps import BLOCK_TOKENS, Steps

# What prompts begin with, so that they share blocks.
PREFIXES = tuple(tuple(range(number * 100, number * 100 + 20)) for number in range(2))


class ScheduleMachine(RuleBasedStateMachine):
    """Requests come and end at any moment between and during steps."""

    @initialize(
        num_blocks=st.integers(3, 14), max_batch_tokens=st.integers(1, 24), max_requests=st.integers(1, 6),
        packing=st.booleans(), prefix_cache=st.booleans(), cuts_prompts=st.booleans(), max_sequences=st.integers(1, 8),
        accepted=st.integers(0, 3),
    )  # fmt: skip
    def begin(self, num_blocks, max_batch_tokens, max_requests, accepted, **options):
        self.steps = Steps(num_blocks, max_batch_tokens, max_requests, **options)
        self.steps.num_right = lambda request, count: min(
            count, accepted, request.params.max_tokens - request.num_generated - 1
        )
        self.ahead: StepPlan | None = None

    @property
    def room(self) -> int:
        return self.steps.pool.num_blocks * BLOCK_TOKENS

    @rule(
        length=st.integers(1, 40),
        most=st.integers(1, 12),
        n=st.integers(1, 4),
        prefix=st.sampled_from([None, *PREFIXES]),
    )
    def submit(self, length, most, n, prefix):
        most = min(most, self.room - 1)
        length = min(length, self.room - most)
        if prefix is None:
            self.steps.submit(length, most, n)
        else:
            self.steps.submit([*prefix, *range(10_000, 10_000 + length)][:length], most, n)

    @precondition(lambda self: self.steps.open)
    @rule(chance=st.randoms(use_true_random=False))
    def end(self, chance):
        self.steps.end(chance.choice(self.steps.open))
        self.steps.check_books()

    @precondition(lambda self: self.steps.scheduler.has_work)
    @rule(num_drafts=st.integers(0, 3))
    def step(self, num_drafts):
        self.ahead = None
        self.steps.drafts = lambda request: [0] * min(num_drafts, request.params.max_tokens - request.num_generated - 1)
        if not self.steps.forward.cuts_prompts:
            # What is not kept of such a sequence is lost, so that an engine drafts nothing for it.
            self.steps.drafts = lambda _request: ()
        self.steps.step()

    @precondition(lambda self: self.steps.scheduler.has_work)
    @rule()
    def step_as_planned_ahead(self):
        """As an engine on a card: a step whose plan was made during the one before."""
        revised = None if self.ahead is None else self.steps.scheduler.revise(self.ahead)
        plan = revised if revised is not None and revised.rows else self.steps.scheduler.plan()
        found: list[StepPlan] = []

        def meanwhile(under_way: StepPlan) -> None:
            if not begins_followers(under_way):
                found.append(self.steps.scheduler.plan(ahead=under_way))

        self.steps.step(plan, meanwhile=meanwhile)
        self.ahead = found[0] if found else None

    @invariant()
    def nobody_who_has_ended_has_blocks(self):
        for request in self.steps.requests:
            assert request.finish_reason is None or request.sequence is None

    def teardown(self):
        if hasattr(self, "steps"):
            self.steps.drafts = lambda _request: ()
            self.steps.run(self.steps.most_steps + 1)


ScheduleMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40)
TestSchedule = ScheduleMachine.TestCase


def random_load(seed: int, num_requests: int, **options: bool) -> tuple[Steps, list[Request]]:
    """Returns a scheduler over a pool that the longest request fills, and requests for it."""
    chance = random.Random(seed)
    steps = Steps(chance.randint(4, 8), chance.choice((1, 5, 16)), chance.choice((2, 4, 16)), **options)
    made: list[Request] = []
    for _ in range(num_requests):
        most = chance.randint(1, 3 * BLOCK_TOKENS)
        made += steps.submit(chance.randint(1, steps.pool.num_blocks * BLOCK_TOKENS - most), most, chance.choice((1, 1, 3)))
    return steps, made


@given(seed=st.integers(0, 1 << 16), packing=st.booleans(), prefix_cache=st.booleans())
@settings(max_examples=40)
def test_all_that_fit_the_pool_alone_come_to_their_end(seed, packing, prefix_cache):
    steps, made = random_load(seed, 10, packing=packing, prefix_cache=prefix_cache)
    steps.run(steps.most_steps)
    assert [one.num_generated for one in made] == [one.params.max_tokens for one in made]


@given(seed=st.integers(0, 1 << 16))
@settings(max_examples=40)
def test_prompts_that_cannot_be_cut_come_to_their_end(seed):
    steps, made = random_load(seed, 8, cuts_prompts=False, max_sequences=3)
    steps.run(steps.most_steps)
    assert all(one.finish_reason == "length" for one in made)


def test_requests_are_preempted_and_end_all_the_same():
    """The loads of these tests are such that the rare cases are not rare."""
    found = [random_load(seed, 10)[0] for seed in range(12)]
    for steps in found:
        steps.run(steps.most_steps)
    assert sum(steps.scheduler.num_preempted > 0 for steps in found) >= 6


@pytest.mark.long
@pytest.mark.parametrize("packing", [False, True])
def test_many_loads_come_to_their_end(packing):
    for seed in range(60):
        steps, _ = random_load(seed, 24, packing=packing)
        steps.run(steps.most_steps)
