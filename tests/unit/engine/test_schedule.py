"""What the scheduler plans: who runs, in which order, with how many tokens, and who gives up its
blocks. There is no model; steps go through block pool and sequences.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

from dflash_moe.engine.schedule import FORCED_FIFO_EVERY, LOOKAHEAD, StepPlan, begins_followers
from tests.scheduled_steps import Steps


def counts(plan: StepPlan) -> dict[tuple[int, int], int]:
    """Returns the number of rows by request."""
    return {rows.request.key: rows.count for rows in plan.rows}


def sampled(plan: StepPlan) -> list[tuple[int, int]]:
    return [request.key for rows in plan.rows for request in rows.sampled]


def test_a_prompt_is_cut_where_the_budget_ends_and_sampled_with_its_last_token():
    steps = Steps(max_batch_tokens=8)
    steps.submit(19)
    plans = [steps.step() for _ in range(4)]
    assert [counts(plan) for plan in plans] == [{(1, 0): 8}, {(1, 0): 8}, {(1, 0): 3}, {(1, 0): 1}]
    assert [sampled(plan) for plan in plans] == [[], [], [(1, 0)], [(1, 0)]]
    assert [plan.rows[0].is_prefill for plan in plans] == [True, True, True, False]


def test_prompts_share_a_step_in_their_order():
    steps = Steps(max_batch_tokens=16)
    for count in (5, 9, 7):
        steps.submit(count)
    assert counts(steps.step()) == {(1, 0): 5, (2, 0): 9, (3, 0): 2}
    assert counts(steps.step()) == {(1, 0): 1, (2, 0): 1, (3, 0): 5}


def test_prompts_never_starve_whoever_decodes():
    steps = Steps(max_batch_tokens=4, max_requests=4)
    first = steps.submit(2, max_tokens=9)[0]
    steps.step()
    steps.submit(60, max_tokens=1)
    for _ in range(8):
        plan = steps.step()
        assert counts(plan) == {(1, 0): 1, (2, 0): 3}
    assert first.num_generated == 9


def test_a_step_has_no_more_sequences_than_places():
    steps = Steps(max_requests=2)
    for _ in range(3):
        steps.submit(2, max_tokens=2)
    assert [len(steps.step().rows) for _ in range(3)] == [2, 2, 1]
    limited = Steps(max_sequences=1)
    limited.submit(2, n=3)
    assert len(limited.step().rows) == 1
    assert [one.key for one in limited.scheduler.running] == [(1, 0)], "its followers wait on their own"
    assert [one.key for one in limited.scheduler.waiting] == [(1, 1), (1, 2)]
    limited.run(limited.most_steps)


def test_who_waits_is_admitted_in_order_and_only_where_its_whole_prompt_has_room():
    steps = Steps(num_blocks=8, max_batch_tokens=64)
    for count in (16, 20, 1):
        steps.submit(count, max_tokens=4)
    assert counts(steps.step()) == {(1, 0): 16}, "five blocks of four are missing, and nobody goes past the second"
    steps.run(steps.most_steps)


def test_the_youngest_gives_up_its_blocks_and_begins_again_before_those_that_wait():
    steps = Steps(num_blocks=4, max_batch_tokens=16, prefix_cache=False)
    old, young = steps.submit(8, max_tokens=8)[0], steps.submit(7, max_tokens=4)[0]
    steps.step()
    steps.submit(1)
    plan = steps.step()
    assert (plan.preempted, counts(plan)) == ((young,), {(1, 0): 1})
    assert (young.epoch, young.num_computed, young.num_generated) == (1, 0, 1)
    assert [one.key for one in steps.scheduler.waiting] == [(2, 0), (3, 0)]
    assert steps.scheduler.num_preempted == 1
    while old.finish_reason is None:
        steps.step()
    plan = steps.step()
    assert counts(plan) == {(2, 0): 8, (3, 0): 1}, "its prompt and the token that it has"
    assert plan.rows[0].is_prefill
    steps.run(steps.most_steps)


def test_a_request_that_is_alone_with_the_pool_comes_to_its_end():
    steps = Steps(num_blocks=3, max_batch_tokens=5)
    steps.submit(4, max_tokens=8)
    steps.submit(4, max_tokens=8)
    steps.run(steps.most_steps)
    assert steps.scheduler.num_preempted > 0


def test_a_prefix_that_is_cached_is_not_computed_and_the_last_token_always_is():
    steps = Steps(max_batch_tokens=64)
    prompt = list(range(16))
    steps.submit(prompt, max_tokens=1)
    assert counts(steps.step()) == {(1, 0): 16}
    steps.submit(prompt, max_tokens=1)
    steps.submit([*prompt, 99], max_tokens=1)
    steps.submit([*prompt[:7], 99, *prompt[8:]], max_tokens=1)
    plan = steps.step()
    assert counts(plan) == {(2, 0): 4, (3, 0): 1, (4, 0): 12}
    assert [len(admission.blocks) for admission in plan.admitted] == [3, 4, 1]
    off = Steps(max_batch_tokens=64, prefix_cache=False)
    for _ in range(2):
        off.submit(prompt, max_tokens=1)
        assert [*counts(off.step()).values()] == [16]


def test_choices_begin_where_their_leader_s_prompt_is_computed():
    steps = Steps(max_batch_tokens=8, max_requests=3)
    made = steps.submit(10, max_tokens=3, n=4)
    assert sampled(steps.step()) == []
    assert sampled(steps.step()) == [(1, 0), (1, 1), (1, 2)], "so many have a place"
    tables = [one.sequence.blocks.block_table.tolist() for one in made[:3]]
    assert tables == [tables[0]] * 3
    assert [one.key for one in steps.scheduler.waiting] == [(1, 3)]
    steps.run(steps.most_steps)


@pytest.mark.parametrize("ended", [[0], [1], [0, 1], [2, 0], [0, 1, 2, 3]])
@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_choices_go_on_without_those_that_end(ended, after):
    steps = Steps(max_batch_tokens=8)
    made = steps.submit(10, max_tokens=3, n=4)
    for _ in range(after):
        steps.step()
    for place in ended:
        steps.end(made[place])
        steps.check_books()
    computed = sum(rows.count for _ in range(10 if steps.scheduler.has_work else 0) if steps.open for rows in steps.step().rows)
    assert not steps.open
    left = 4 - len(ended)
    rest = max(0, 10 - 8 * after) + (2 if after < 2 else 4 - after) * left
    assert computed == (rest if left else 0), "the prompt is computed once, whoever ends"
    assert steps.pool.num_free == steps.pool.num_blocks


def test_a_choice_is_not_preempted_for_a_copy_that_nobody_needs_once_the_other_is_gone():
    steps = Steps(num_blocks=3)
    old, young = steps.submit(10, max_tokens=2, n=2)
    steps.step()
    plan = steps.step()
    assert (plan.preempted, counts(plan)) == ((young,), {old.key: 1})
    steps.run(steps.most_steps)


def test_drafts_take_what_is_left_of_budget_and_blocks_and_preempt_nobody():
    steps = Steps(max_batch_tokens=6, num_blocks=16)
    steps.drafts = lambda request: (7, 7, 7)
    steps.num_right = lambda _request, count: count - 1
    first, second = steps.submit(3, max_tokens=12)[0], steps.submit(3, max_tokens=12)[0]
    steps.step()
    plan = steps.step()
    assert [len(rows.drafts) for rows in plan.rows] == [3, 1], "four of six rows are left"
    assert (first.num_generated, second.num_generated) == (4, 2)
    steps.run(steps.most_steps)
    full = Steps(num_blocks=2, max_batch_tokens=8)
    full.drafts = lambda request: (7, 7, 7, 7)
    full.submit(3, max_tokens=3)
    full.submit(2, max_tokens=3)
    full.step()
    plan = full.step()
    assert [len(rows.drafts) for rows in plan.rows] == [0, 1]
    assert not plan.preempted


# -- the order of packing ------------------------------------------------------------------------
def test_packing_takes_long_prompts_first_and_the_oldest_after_so_many_others():
    steps = Steps(num_blocks=1000, max_batch_tokens=8, max_requests=1, packing=True)
    short = steps.submit(2, max_tokens=1)[0]
    others = [steps.submit(8, max_tokens=1)[0] for _ in range(FORCED_FIFO_EVERY + 3)]
    order = []
    while short.finish_reason is None:
        order += [rows.request for rows in steps.step().rows]
    assert order == [*others[:FORCED_FIFO_EVERY], short]


def test_packing_fills_a_step_and_looks_only_so_far():
    steps = Steps(num_blocks=1000, max_batch_tokens=16, max_requests=16, packing=True)
    for count in (3, 40, 9, 16, 4):
        steps.submit(count, max_tokens=1)
    assert counts(steps.step()) == {(4, 0): 16}
    assert counts(steps.step()) == {(3, 0): 9, (5, 0): 4, (1, 0): 3}
    far = Steps(num_blocks=1000, max_batch_tokens=8, max_requests=1, packing=True)
    for _ in range(LOOKAHEAD):
        far.submit(2, max_tokens=1)
    far.submit(8, max_tokens=1)
    assert counts(far.step()) == {(1, 0): 2}


# -- prompts that cannot be cut --------------------------------------------------------------------
def test_prompts_that_cannot_be_cut_come_whole_one_beyond_the_budget_at_a_time():
    steps = Steps(max_batch_tokens=8, cuts_prompts=False)
    for count in (20, 5, 3, 1, 9):
        steps.submit(count, max_tokens=2)
    assert counts(steps.step()) == {(1, 0): 20}
    assert counts(steps.step()) == {(1, 0): 1, (2, 0): 5}
    steps.run(steps.most_steps)


def test_choices_of_a_prompt_that_is_not_shared_are_requests_of_their_own():
    steps = Steps(max_batch_tokens=16, cuts_prompts=False)
    steps.submit(5, max_tokens=2, n=3)
    assert counts(steps.step()) == {(1, 0): 5, (1, 1): 5, (1, 2): 5}
    steps.run(steps.most_steps)


# -- plans that are made ahead ---------------------------------------------------------------------
def ahead_of(steps: Steps) -> StepPlan:
    """Does a step and returns the plan that was made for the next one meanwhile."""
    found: list[StepPlan] = []

    def plan(under_way: StepPlan) -> None:
        before = steps.state()
        found.append(steps.scheduler.plan(ahead=under_way))
        assert steps.state() == before

    steps.step(meanwhile=plan)
    return found[0]


def test_a_plan_made_ahead_is_that_of_the_state_behind_the_step():
    steps = Steps(num_blocks=12, max_batch_tokens=8, prefix_cache=False)
    for count, most in ((11, 19), (3, 19), (9, 12), (5, 3)):
        steps.submit(count, max_tokens=most)
    num_compared = 0
    while steps.scheduler.has_work:
        num_open = len(steps.open)
        ahead = ahead_of(steps)
        if len(steps.open) == num_open:
            assert ahead == steps.scheduler.plan()
            num_compared += 1
    assert num_compared > 10
    assert steps.scheduler.num_preempted > 0


def test_what_has_ended_is_dropped_from_a_plan_made_ahead():
    steps = Steps(max_batch_tokens=32)
    first, second = steps.submit(3, max_tokens=9)[0], steps.submit(3, max_tokens=9)[0]
    steps.step()
    waiting = steps.submit(3)[0]
    ahead = ahead_of(steps)
    assert counts(ahead) == {(1, 0): 1, (2, 0): 1, (3, 0): 1}
    late = steps.submit(3)[0]
    ahead = ahead_of(steps)
    assert late.num_generated == 1
    steps.end(second)
    steps.end(waiting)
    revised = steps.scheduler.revise(ahead)
    assert counts(revised) == {(1, 0): 1, (4, 0): 1}
    steps.step(revised)
    assert (first.num_generated, late.num_generated) == (4, 2)


def test_one_that_waits_and_ends_is_not_admitted_by_a_plan_made_ahead():
    steps = Steps(max_batch_tokens=4, max_requests=4)
    steps.submit(4, max_tokens=9)
    waiting = steps.submit(2, max_tokens=1)[0]
    ahead = ahead_of(steps)
    assert [admission.request for admission in ahead.admitted] == [waiting]
    steps.end(waiting)
    revised = steps.scheduler.revise(ahead)
    assert not revised.admitted
    assert counts(revised) == {(1, 0): 1}
    steps.step(revised)


@pytest.mark.parametrize("ended", [[0], [1], [2], [1, 2], [0, 1]])
def test_choices_that_end_do_not_begin_by_a_plan_made_ahead(ended):
    steps = Steps(max_batch_tokens=8)
    made = steps.submit(12, max_tokens=3, n=3)
    ahead = ahead_of(steps)
    assert sampled(ahead) == [one.key for one in made]
    for place in ended:
        steps.end(made[place])
    revised = steps.scheduler.revise(ahead)
    if revised.rows:
        assert sampled(revised) == [one.key for one in made if one.finish_reason is None]
        steps.step(revised)
    steps.run(steps.most_steps)
    left = [one for place, one in enumerate(made) if place not in ended]
    assert [one.num_generated for one in left] == [3] * len(left)


def test_nothing_is_planned_ahead_of_choices_that_begin_or_find_no_place():
    # They share a block that has no table yet, or leave their leader and wait on their own.
    for max_requests in (1, 2, 3):
        steps = Steps(max_requests=max_requests, max_batch_tokens=max(4, max_requests))
        steps.submit(7, max_tokens=3, n=3)
        seen: list[bool] = []
        for _ in range(3):
            steps.step(meanwhile=lambda plan, seen=seen: seen.append(begins_followers(plan)))
        assert seen == [False, True, False]
        assert len(steps.scheduler.running) == max_requests
