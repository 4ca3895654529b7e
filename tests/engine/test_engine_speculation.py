"""Drafts change no token and no bit: whatever was guessed, the tokens of a request are those that
it gets alone without drafts, from the same logits.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash_moe.forward.host_model import open_host
from tests.engine_runs import CASES, Alone, Asked, asked, come_and_go, engine_run
from tests.host_models import checkpoint, start

pytestmark = pytest.mark.transformers
# One dtype of each family; the sweep has all.
SOME = [CASES[2 * place + place % 2] for place in range(len(CASES) // 2)]
OTHERS = [case for case in CASES if case not in SOME]
MODES = ("prompt", "auto")


@pytest.fixture(scope="module", params=[*SOME, *(pytest.param(case, marks=pytest.mark.long) for case in OTHERS)], ids="-".join)
def alone(request):
    with start(*request.param) as runtime:
        host = open_host(checkpoint(*request.param), runtime)
        yield Alone(host)
        host.packed.micro_batches.close()


def repetitive(number: int, length: int, **options: object) -> Asked:
    """A prompt that repeats itself, and an answer of two tokens in a random or regular order, so
    that some guesses are right and some are not.
    """
    one = asked(number, 9, **{"logit_bias": {5: 100.0, 6: 100.0}, "max_tokens": 30, **options})
    return replace(one, prompt=(one.prompt * 9)[:length])


def loads() -> list[Asked]:
    ways = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "frequency_penalty": 2.0, "logprobs": 2})
    return [repetitive(400 + number, 20 + 5 * number, **way) for number, way in enumerate((*ways, *ways))]


@pytest.mark.parametrize("mode", MODES)
def test_drafts_change_no_bit(alone, mode):
    drafted(alone, mode, "1")


def test_drafts_in_two_micro_batches_change_no_bit(alone):
    drafted(alone, "prompt", "2")


def drafted(alone: Alone, mode: str, micro_batches: str) -> None:
    companions = [asked(450 + number) for number in range(4)]
    settings = {"speculate": mode, "micro_batches": micro_batches, "max_batch_tokens": 48}
    with engine_run(alone.host, come_and_go(1, companions), **settings) as run:
        run.submit_all(loads())
        stats = run.assert_exact(alone)
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]


def test_drafts_in_a_tight_pool_change_no_bit(alone):
    with engine_run(alone.host, num_blocks=6, speculate="prompt", max_batch_tokens=24) as run:
        run.submit_all(loads())
        stats = run.assert_exact(alone)
    assert stats["preemptions"] > 0
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]


def test_choices_with_drafts_have_the_tokens_that_each_has_alone(alone):
    wanted = [replace(one, params=replace(one.params, n=3)) for one in loads()[:2]]
    with engine_run(
        alone.host, lambda run: run.num_steps == 2 and run.cancel(run.submitted[0][1], 1), speculate="prompt"
    ) as run:
        run.submit_all(wanted)
        stats = run.assert_exact(alone)
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]
    assert stats["finished"]["cancelled"] == 1


def test_a_token_that_ends_a_request_among_its_drafts_ends_it(alone):
    wanted = []
    for number in range(480, 489):
        one = repetitive(number, 30, temperature=1.0, logit_bias={5: 100.0, 6: 100.0, 7: 97.5}, max_tokens=50)
        tokens = alone.answer(one).tokens
        last = max(set(tokens), key=tokens.index)
        wanted.append(replace(one, params=replace(one.params, stop_token_ids=(last,))))
    with engine_run(alone.host, speculate="prompt") as run:
        run.submit_all(wanted)
        stats = run.assert_exact(alone)
    assert stats["finished"] == {"stop": len(wanted)}
    assert stats["accepted_tokens"] > 0
