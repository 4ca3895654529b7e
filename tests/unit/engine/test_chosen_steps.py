"""Steps that choose their tokens where they compute their logits: the tokens of steps that give the
engine logits, what is left to the sampler, and what happens where such a step fails or a request
ends while it runs.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from dflash_moe.engine.request import CANCELLED, ERROR, LENGTH
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.engine.sampling.sampling_state import SamplingState
from dflash_moe.errors import DflashError, WorkerLost
from dflash_moe.forward.forward import StepRows
from tests.token_forward import (
    VOCAB,
    Held,
    TokenForward,
    assert_clean,
    end_of,
    engine_over,
    plain,
    prompt_of,
    rest_of,
    tokens_of,
)

# What the core chooses by, and what it does not.
PLAIN = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.01},
    {"temperature": 30.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
)
OTHER = (
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "repetition_penalty": 1.4},
    {"temperature": 0.0, "presence_penalty": 0.5},
    {"temperature": 0.9, "frequency_penalty": 0.3},
    {"temperature": 1.0, "logit_bias": {3: 2.5}},
    {"temperature": 1.0, "token_mask": lambda tokens: [place != len(tokens) for place in range(VOCAB)]},
)


def answers(ways: Sequence[dict[str, object]], *, chooses: bool, **settings: object) -> tuple[list[list[int]], TokenForward]:
    """The tokens of a request for each of the ways and three seeds, all at once."""
    forward = TokenForward()
    forward.chooses = chooses
    with engine_over(forward, **settings) as engine:
        streams = [
            engine.submit(prompt_of(5 + seed, seed), SamplingParams(max_tokens=12 + place, seed=seed, ignore_eos=True, **way))
            for seed in range(3)
            for place, way in enumerate(ways)
        ]
        found = [tokens_of(stream) for stream in streams]
        assert_clean(engine, forward)
    return found, forward


@pytest.mark.parametrize("settings", [{}, {"max_batch_tokens": 8}, {"speculate": "prompt"}], ids=str)
def test_chosen_tokens_are_those_of_the_sampler(settings: dict[str, object]) -> None:
    expected, _ = answers(PLAIN, chooses=False, **settings)
    found, forward = answers(PLAIN, chooses=True, **settings)
    assert found == expected
    assert forward.num_chosen > 8


@pytest.mark.parametrize("way", range(len(OTHER)))
def test_rows_whose_logits_are_changed_or_shown_leave_the_step_to_the_sampler(way: int) -> None:
    state = SamplingState(SamplingParams(**OTHER[way]), seed=1)  # type: ignore[arg-type]
    assert state.draw(5) is None
    ways = [*PLAIN, OTHER[way]]
    expected, _ = answers(ways, chooses=False)
    assert answers(ways, chooses=True)[0] == expected


def test_a_draw_is_that_of_the_position_alone() -> None:
    first, again = (SamplingState(SamplingParams(temperature=0.5, top_k=3), seed=4) for _ in range(2))
    draws = [first.draw(position) for position in range(40)]
    assert [again.draw(position) for position in reversed(range(40))] == draws[::-1]
    assert len({draw[-1] for draw in draws if draw is not None}) == 40


def test_a_chosen_step_that_fails_changes_nothing_and_ends_its_requests_by_name() -> None:
    forward = TokenForward()
    forward.chooses = True
    with engine_over(forward) as engine:
        steps = itertools.count(1)

        def fail(_rows: Sequence[StepRows]) -> None:
            if next(steps) > 4:
                raise WorkerLost("worker w1 was lost", worker="w1", layer=3)

        forward.before = fail
        found = rest_of(engine.submit(prompt_of(6, 1), plain(max_tokens=30)))
        before = [token for delta in found for token in delta.token_ids]
        assert before
        last = end_of(found)
        assert last.finish_reason == ERROR
        assert isinstance(last.error, WorkerLost)
        assert "request 1" in str(last.error)
        assert last.token_ids == ()
        forward.before = lambda rows: None
        assert_clean(engine, forward)
        assert tokens_of(engine.submit(prompt_of(6, 1), plain(max_tokens=30)))[: len(before)] == before


def test_a_row_without_a_finite_logit_ends_its_request_alone() -> None:
    forward = TokenForward()
    forward.chooses = True

    def spoil(rows: Sequence[StepRows], logits: torch.Tensor) -> None:
        for row, entry in zip(logits, rows, strict=False):
            if entry.sequence.max_tokens == 6 + 9 and entry.sequence.num_tokens > 7:
                row[3] = torch.nan

    forward.change = spoil
    with engine_over(forward) as engine:
        spoiled, clean = (engine.submit(prompt_of(6, 1), plain(max_tokens=count)) for count in (9, 10))
        last = end_of(rest_of(spoiled))
        assert last.finish_reason == ERROR
        assert "no finite largest logit" in str(last.error)
        assert end_of(rest_of(clean)).finish_reason == LENGTH
        assert isinstance(last.error, DflashError)
        assert_clean(engine, forward)


def test_a_request_that_is_cancelled_while_its_step_runs_gets_nothing_of_it() -> None:
    forward = TokenForward()
    forward.chooses = True
    with engine_over(forward) as engine:
        held = forward.before = Held(skip=3)
        stream, other = (engine.submit(prompt_of(6, seed), plain(max_tokens=40)) for seed in (1, 2))
        held.wait()
        stream.cancel()
        forward.before = lambda rows: None
        held.may_go.set()
        assert rest_of(stream)[-1].finish_reason == CANCELLED
        assert len(tokens_of(other)) == 40
        assert_clean(engine, forward)
