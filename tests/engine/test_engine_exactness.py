"""The tokens of a request, and the bits of the logits that they came from, are those that it gets
alone: whoever comes and goes beside it, however its prompt is cut, with cached blocks and after
preemptions, for every family and way of sampling.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace

import pytest
import torch

from dflash_moe.engine.generation import generate_tokens
from dflash_moe.engine.sampling.token_masks import DEADLINE_S
from dflash_moe.forward.host_model import HostModel, open_host
from tests.engine_runs import CASES, WAYS, Alone, Asked, EngineRun, asked, come_and_go, engine_run
from tests.float_modes import FOREIGN_MODES, float_mode
from tests.host_models import ORIGINAL_MAX, checkpoint, start

pytestmark = pytest.mark.transformers


@dataclass
class Opened:
    """A host, and what requests get there alone."""

    host: HostModel
    alone: Alone
    # One that differs from case to case, for what is random.
    seed: int


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def opened(request):
    with start(*request.param) as runtime:
        host = open_host(checkpoint(*request.param), runtime)
        yield Opened(host, Alone(host), CASES.index(request.param))
        host.packed.micro_batches.close()


def one_of_each_way(first: int, **options: object) -> list[Asked]:
    return [asked(first + place, **options) for place in range(len(WAYS))]


def test_the_loop_alone_is_that_of_generate(opened):
    for number in (0, 7, 14):
        one = asked(number)
        assert one.params.temperature == 0.0
        steps = generate_tokens(opened.host, one.prompt, max_new_tokens=one.params.max_tokens)
        assert [step.token_id for step in steps] == opened.alone.answer(one).tokens


def test_company_that_comes_and_goes_changes_no_bit(opened):
    companions = [asked(100 + number, n=1 + number % 7 // 6) for number in range(16)]
    with engine_run(opened.host, come_and_go(opened.seed, companions, cancels=0.5), max_batch_tokens=256) as run:
        run.submit_all(one_of_each_way(0, max_tokens=14))
        stats = run.assert_exact(opened.alone)
    assert max(stats["batch_sizes"]) >= 12
    assert stats["finished"]["cancelled"] > 0
    assert stats["finished"]["length"] > len(WAYS)


@pytest.mark.parametrize("mode", FOREIGN_MODES)
def test_the_floating_point_mode_of_the_caller_changes_no_bit(opened, mode):
    wanted = one_of_each_way(300, max_tokens=6)
    for one in wanted:
        opened.alone.answer(one)
    with float_mode(mode), engine_run(opened.host, max_batch_tokens=64) as run:
        run.submit_all(wanted)
        run.assert_exact(opened.alone)


def test_bits_do_not_depend_on_how_steps_cut_prompts(opened):
    num_cut = 0
    for budget in (4, 13):
        with engine_run(opened.host, max_batch_tokens=budget, prefix_cache=False) as run:
            run.submit_all([asked(number, length) for number, length in ((20, 60), (21, 33), (22, 5), (23, 48))])
            run.assert_exact(opened.alone)
        assert max(sum(counts) for counts in run.watched.steps) <= budget
        num_cut += sum(1 < count <= budget for counts in run.watched.steps for count in counts)
    assert num_cut > 20


def test_a_cached_prefix_changes_no_bit(opened):
    ends = [replace(asked(30 + number), prompt=(*asked(30, 40).prompt, *asked(50 + number, 9).prompt)) for number in range(3)]
    # Some rotary types depend on the length that a sequence may reach; equal lengths always share.
    params = [replace(one.params, max_tokens=9) for one in ends]
    wanted = [replace(one, params=changed) for one, changed in zip(ends, params, strict=True)]
    with engine_run(opened.host, max_batch_tokens=64) as run:
        for _ in range(2):
            run.submit_all(wanted)
            run.collect()
        run.submit_all([replace(wanted[0], prompt=wanted[0].prompt[:48], params=replace(params[0], max_tokens=10, seed=77))])
        stats = run.assert_exact(opened.alone)
    # All of the second round but the last block, and two blocks of the last request.
    assert stats["cached_tokens"] >= 3 * 48 + 32


def test_a_prefix_is_not_taken_from_a_sequence_that_its_length_makes_another(opened):
    # Where cosines depend on the length that a sequence may reach, so do keys.
    short = asked(40, 33, max_tokens=ORIGINAL_MAX - 33)
    long = replace(short, params=replace(short.params, max_tokens=ORIGINAL_MAX - 33 + 9))
    with engine_run(opened.host) as run:
        for one in (short, replace(long, params=replace(long.params, seed=78)), short):
            run.submit_all([one])
            run.collect()
        stats = run.assert_exact(opened.alone)
    assert stats["cached_tokens"] >= 32


def tight(opened: Opened, wanted: list[Asked], seed: int, companions: list[Asked], **settings: object) -> EngineRun:
    """Runs requests in a pool that the largest of them nearly fills, so that they give up
    blocks.
    """
    most = max(len(one.prompt) + one.params.max_tokens for one in (*wanted, *companions))
    with engine_run(opened.host, come_and_go(seed, companions), num_blocks=-(-most // 16) + 1, **settings) as run:
        run.submit_all(wanted)
        run.stats = run.assert_exact(opened.alone)
    return run


def crowd(first: int, count: int) -> list[Asked]:
    """Requests that begin small and grow over a block's end while others do."""
    return [asked(first + number, 12 + 3 * number % 7, max_tokens=24 + number) for number in range(count)]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_bits_after_a_preemption_are_those_before(opened, prefix_cache):
    run = tight(opened, crowd(60, 4), opened.seed, [], max_batch_tokens=16, prefix_cache=prefix_cache)
    assert run.stats["preemptions"] > 0
    assert run.stats["recomputed_tokens"] > 0


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_choices_of_a_prompt_have_the_tokens_that_each_has_alone(opened, plans_ahead):
    wanted = [asked(number, length, n=n, max_tokens=9) for number, length, n in ((71, 33, 4), (72, 31, 2), (73, 48, 3))]
    chance = random.Random(opened.seed)

    def cancel_some(run: EngineRun) -> None:
        _, stream = chance.choice(run.submitted)
        if run.num_steps in (1, 3, 6):
            run.cancel(stream, chance.randrange(3))

    with engine_run(opened.host, cancel_some, max_batch_tokens=24, plans_ahead=plans_ahead) as run:
        run.submit_all(wanted)
        stats = run.assert_exact(opened.alone)
    assert stats["finished"]["cancelled"] > 0
    assert stats["finished"]["length"] >= 5
    # No prompt is computed again for a choice of it.
    assert stats["prompt_tokens"] == 33 + 31 + 48


def test_two_micro_batches_change_no_bit(opened):
    companions = [asked(100 + number) for number in range(8)]
    script = come_and_go(opened.seed, companions)
    with engine_run(opened.host, script, micro_batches="2", max_batch_tokens=40) as run:
        before = run.engine.stats()["micro_batches"]["split_steps"]
        run.submit_all(one_of_each_way(0, max_tokens=14))
        stats = run.assert_exact(opened.alone)
    # All steps but those of a single row.
    assert stats["micro_batches"]["split_steps"] - before == sum(sum(counts) > 1 for counts in run.watched.steps)


def test_a_mask_that_comes_late_changes_no_token(opened):
    class Slow:
        """Allows tokens of the next residue, and takes now and then longer than a step waits."""

        num_calls = 0

        def __call__(self, tokens):
            self.num_calls += 1
            if self.num_calls % 5 == 0:
                time.sleep(2 * DEADLINE_S)
            return torch.arange(opened.host.packed.vocab_size) % 5 == (len(tokens) + 1) % 5

    wanted = [asked(700 + number, token_mask=Slow(), max_tokens=12, n=1 + number // 3) for number in range(5)]
    with engine_run(opened.host, come_and_go(opened.seed, [asked(710 + number) for number in range(4)])) as run:
        run.submit_all(wanted)
        run.assert_exact(opened.alone)


@pytest.mark.parametrize("order", ["fifo", "packing"])
def test_all_of_it_at_once(opened, order):
    everything_at_once(opened, opened.seed, order, "1" if order == "fifo" else "2")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 104))
def test_all_of_it_at_once_many_times(opened, seed):
    everything_at_once(opened, seed, ("fifo", "packing")[seed % 2], str(1 + seed // 2 % 2))


def everything_at_once(opened: Opened, seed: int, order: str, micro_batches: str) -> None:
    """A tight pool, cut prompts, shared prefixes, choices and drafts, with company that comes and
    goes, and plans made ahead where there are no drafts.
    """
    chance = random.Random(seed)
    shared = asked(90, 32).prompt
    companions = [asked(200 + 16 * (seed % 4) + number, n=chance.choice((1, 1, 3))) for number in range(12)]
    companions += [replace(one, prompt=shared + one.prompt[:20]) for one in (asked(300 + number) for number in range(4))]
    speculate = chance.choice(("off", "prompt"))
    settings = {
        "max_batch_tokens": chance.choice((9, 20, 40)),
        "max_requests": chance.choice((3, 8)),
        "speculate": speculate,
    }
    settings |= {"order": order, "plans_ahead": seed % 2 == 1, "micro_batches": micro_batches}
    run = tight(opened, crowd(80, 3), seed, companions, **settings)
    assert run.stats["preemptions"] > 0
    assert run.stats["finished"]["length"] >= 4
