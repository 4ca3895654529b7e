"""Random company changes no token: requests with shared prompts, choices, stop tokens and cancels
at any step, with few blocks, with the next step planned ahead or not, and with drafts.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest

from dflash_moe.engine.delivery import BetweenSteps
from dflash_moe.engine.engine import Engine
from dflash_moe.engine.request import CANCELLED, LENGTH, STOP
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from tests.token_forward import (
    VOCAB,
    Held,
    TokenForward,
    engine_over,
    greedy,
    plain,
    prompt_of,
    rest_of,
    tokens_of,
)

# Where a random token ends requests, so that some end within a few tokens.
EOS = frozenset({0})
SETTINGS = {
    "plain": {},
    "ahead": {"plans_ahead": True},
    "ahead, no prefix cache": {"plans_ahead": True, "prefix_cache": False},
    "ahead, packing": {"plans_ahead": True, "order": "packing"},
    "drafts": {"speculate": "prompt"},
}


@dataclass
class Wanted:
    """One submission of a scenario: at which step it comes, and which of its choices are cancelled
    after how many further steps.
    """

    prompt: list[int]
    params: SamplingParams
    at_step: int
    cancels: list[tuple[int, int | None]] = field(default_factory=list)

    def expected(self) -> tuple[list[int], str]:
        """Returns its tokens and why it ends, if nothing is cancelled."""
        tokens = greedy(self.prompt, self.params.max_tokens)
        stops = set(self.params.stop_token_ids) | (set() if self.params.ignore_eos else EOS)
        for place, token in enumerate(tokens):
            if token in stops:
                return tokens[: place + 1], STOP
        return tokens, LENGTH


def scenario(seed: int) -> list[Wanted]:
    rng = random.Random(seed)
    roots = [prompt_of(rng.randint(1, 17), seed + place) for place in range(3)]
    found = []
    for _ in range(rng.randint(4, 9)):
        prompt = rng.choice(roots)[: rng.randint(1, 17)] + prompt_of(rng.randint(0, 6), rng.randint(0, 1 << 20))
        n = rng.choice((1, 1, 2, 3))
        params = plain(
            rng.randint(1, 14), n=n, ignore_eos=rng.random() < 0.3,
            stop_token_ids=rng.sample(range(VOCAB), rng.choice((0, 0, 1, 3))),
        )  # fmt: skip
        cancels = [(rng.randint(0, 12), rng.choice((None, *range(n)))) for _ in range(rng.choice((0, 0, 1, 2)))]
        found.append(Wanted(prompt, params, rng.randint(0, 10), cancels))
    return found


class Play:
    """Submits and cancels on the engine thread, within the steps that the scenario names."""

    def __init__(self, wanted: list[Wanted], forward: TokenForward) -> None:
        self.wanted, self.forward, self.streams = wanted, forward, [None] * len(wanted)
        self.engine: Engine | None = None
        self.events = sorted(
            [(one.at_step, place, "submit") for place, one in enumerate(wanted)]
            + [(one.at_step + 1 + after, place, choice) for place, one in enumerate(wanted) for after, choice in one.cancels],
            key=lambda event: event[0],
        )

    def __call__(self, _rows) -> None:
        while self.events and self.events[0][0] <= self.forward.num_steps:
            _, place, what = self.events.pop(0)
            if what == "submit":
                self.streams[place] = self.engine.submit(self.wanted[place].prompt, self.wanted[place].params)
            else:
                self.streams[place].cancel(what)


def play(seed: int, settings: dict, num_blocks: int) -> dict:
    wanted = scenario(seed)
    forward = TokenForward(num_blocks)
    with engine_over(forward, eos=EOS, **{"max_batch_tokens": 9, "max_requests": 5, **settings}) as engine:
        held = forward.before = Held()
        # It keeps the steps coming until all have been submitted.
        keeper = engine.submit([1], plain(26, ignore_eos=True))
        held.wait()
        player = Play(wanted, forward)
        player.engine = engine
        forward.before = player
        held.may_go.set()
        assert tokens_of(rest_of(keeper)) == greedy([1], 26)
        player.forward.before = lambda rows: None
        for one, stream in zip(wanted, player.streams, strict=True):
            check(one, rest_of(stream))
        engine.check_integrity()
        return engine.stats()


def check(one: Wanted, deltas: list) -> None:
    tokens, reason = one.expected()
    cancelled = {choice for _, choice in one.cancels}
    for choice in range(one.params.n):
        found = tokens_of(deltas, choice)
        ended = next(delta.finish_reason for delta in deltas if delta.choice == choice and delta.finish_reason)
        if ended == CANCELLED:
            assert cancelled & {None, choice}
            assert found == tokens[: len(found)]
        else:
            assert (found, ended) == (tokens, reason)


@pytest.mark.parametrize("num_blocks", [9, 64])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_random_company_changes_no_token(settings: dict, num_blocks: int) -> None:
    stats = [play(seed, settings, num_blocks) for seed in range(25)]
    if num_blocks == 9:
        assert sum(one["preemptions"] for one in stats) > 0
    assert sum(one["finished"].get(CANCELLED, 0) for one in stats) > 0
    assert sum(one["finished"].get(STOP, 0) for one in stats) > 0


@pytest.mark.parametrize("choice", [None, 0, 1, 2])
@pytest.mark.parametrize("step", range(8))
def test_a_choice_that_is_cancelled_between_a_plan_and_its_step_leaves_it(step: int, choice: int | None) -> None:
    """The plan of the step that samples for all choices is made while the one before computes."""
    forward = TokenForward()
    with engine_over(forward, plans_ahead=True, max_batch_tokens=4) as engine:
        held = forward.before = Held()
        stream = engine.submit(prompt_of(19), plain(4, n=3))
        held.wait()
        steps = itertools.count()
        forward.before = lambda rows: stream.cancel(choice) if next(steps) == step else None
        held.may_go.set()
        deltas = rest_of(stream)
        for place in range(3):
            expected = greedy(prompt_of(19), 4)
            assert tokens_of(deltas, place) == expected[: len(tokens_of(deltas, place))]
            if choice not in (None, place):
                assert tokens_of(deltas, place) == expected
        engine.check_integrity()


def test_cached_prefixes_may_be_dropped_between_a_plan_and_its_step() -> None:
    forward = TokenForward()
    with engine_over(forward, plans_ahead=True) as engine:
        rest_of(engine.submit(prompt_of(12), plain(1)))
        steps, streams = itertools.count(), []

        def during(_rows) -> None:
            step = next(steps)
            if step == 2:
                streams.append(engine.submit(prompt_of(12), plain(6)))
            elif step == 3:
                # The plan that is made in this step admits it with its cached blocks.
                engine._door.send(BetweenSteps(engine._planner.forget_cached))

        forward.before = during
        assert tokens_of(rest_of(engine.submit([5, 6], plain(9)))) == greedy([5, 6], 9)
        assert tokens_of(rest_of(streams[0])) == greedy(prompt_of(12), 6)
        assert engine.stats()["cached_tokens"] == 0
