"""What goes wrong within a step ends the requests that it concerns, typed and by name, and no
other: forward pass, sampler, one row's logits, the user's masks, and the books themselves.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dflash_moe.engine import step_planner
from dflash_moe.engine.engine import Engine
from dflash_moe.engine.engine_settings import EngineSettings
from dflash_moe.engine.request import CANCELLED, ERROR, LENGTH
from dflash_moe.engine.sampling.sample import Sampled, Sampler
from dflash_moe.engine.sampling.token_masks import MAX_STUCK, MaskThread
from dflash_moe.errors import ConfigError, DflashError, EngineError, WorkerLost
from tests.token_forward import (
    PATIENCE_S,
    VOCAB,
    Held,
    TokenForward,
    assert_clean,
    end_of,
    engine_over,
    greedy,
    logits_after,
    plain,
    prompt_of,
    rest_of,
    tokens_of,
)

ERRORS = [
    WorkerLost("worker w1 was lost", worker="w1", layer=3),
    MemoryError("no memory"),
    RuntimeError("the kernel failed"),
    AssertionError(),
]


class Failing:
    """Raises an error where the engine calls it for the `at`-th time."""

    def __init__(self, error: BaseException, at: int) -> None:
        self._error, self._left = error, at

    def __call__(self, *_arguments: object) -> None:
        self._left -= 1
        if self._left == 0:
            raise type(self._error)(*self._error.args)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("at", [1, 2, 3, 7])
def test_a_forward_pass_that_fails_ends_its_requests_by_name_and_later_ones_go_on(error: Exception, at: int) -> None:
    forward = TokenForward()
    with engine_over(forward, max_batch_tokens=16) as engine:
        held = forward.before = Held()
        streams = [engine.submit(prompt_of(9, seed), plain(n=1 + seed % 2)) for seed in range(5)]
        held.wait()
        forward.before = Failing(error, at)
        held.may_go.set()
        ended = [delta for stream in streams for delta in rest_of(stream) if delta.finish_reason]
        failed = [delta for delta in ended if delta.finish_reason == ERROR]
        assert len(ended) == 7
        assert failed
        assert len({id(delta.error) for delta in failed}) == len(failed)
        for stream, deltas in zip(streams, map(rest_of, streams), strict=True):
            assert deltas == []
            assert stream.request_id <= 5
        for delta in failed:
            assert isinstance(delta.error, DflashError)
            assert type(delta.error) is (type(error) if isinstance(error, DflashError) else DflashError)
            assert str(delta.error).startswith("request ")
            assert str(error) in str(delta.error)
        forward.before = lambda rows: None
        engine.check_integrity()
        assert forward.blocks.num_free == forward.blocks.num_blocks
        assert engine.stats()["failed_steps"] == 1
        assert tokens_of(rest_of(engine.submit(prompt_of(9), plain()))) == greedy(prompt_of(9), 8)


def test_who_waits_while_a_step_fails_is_computed_after_it() -> None:
    forward = TokenForward()
    with engine_over(forward, max_requests=2) as engine:
        held = forward.before = Held()
        streams = [engine.submit(prompt_of(5, seed), plain()) for seed in range(6)]
        held.wait()
        forward.before = Failing(RuntimeError("once"), 3)
        held.may_go.set()
        found = [rest_of(stream) for stream in streams]
        failed = [end_of(deltas).finish_reason == ERROR for deltas in found]
        # The first step may have begun before the second request had come.
        assert 1 <= sum(failed) <= 2
        for seed, (deltas, has_failed) in enumerate(zip(found, failed, strict=True)):
            assert tokens_of(deltas) == greedy(prompt_of(5, seed), 8)[: len(tokens_of(deltas)) if has_failed else 8]


@pytest.mark.parametrize("method", ["launch", "_read"])
@pytest.mark.parametrize("error", ERRORS[1:3], ids=lambda error: type(error).__name__)
def test_a_sampler_that_fails_commits_nothing(monkeypatch: pytest.MonkeyPatch, method: str, error: Exception) -> None:
    forward = TokenForward()
    owner = Sampler if method == "launch" else Sampled
    sound, fails = getattr(owner, method), Failing(error, 4)
    monkeypatch.setattr(owner, method, lambda *arguments: (fails(), sound(*arguments))[1])
    with engine_over(forward) as engine:
        deltas = rest_of(engine.submit(prompt_of(5), plain()))
        assert tokens_of(deltas) == greedy(prompt_of(5), 3)
        assert end_of(deltas).finish_reason == ERROR
        assert str(end_of(deltas).error).startswith("request 1: the step has failed: ")
        engine.check_integrity()
        assert tokens_of(rest_of(engine.submit(prompt_of(5), plain()))) == greedy(prompt_of(5), 8)


class Broken(BaseException):
    """An error that no code expects."""


@pytest.mark.parametrize("error", [MemoryError("no memory"), Broken("what"), EngineError("block 3 is released twice")])
@pytest.mark.parametrize("stage", ["plan", "apply", "_commit", "publish", "observe", "end", "step"])
def test_books_that_fail_end_the_engine_and_every_stream_once(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, stage: str
) -> None:
    """Nobody may go on with books that contradict each other; but nobody may wait for ever."""
    forward = TokenForward()
    held = forward.before = Held()
    engine = Engine(forward, EngineSettings(max_requests=3, call_timeout_s=PATIENCE_S))
    streams = [engine.submit(prompt_of(5, seed), plain(n=1 + seed % 2)) for seed in range(6)]
    held.wait()
    if stage == "step":
        # What the forward pass itself says of the books counts as theirs.
        error = EngineError("block 3 is released twice")
        owner, stage = forward, "before"
    else:
        owner = next(one for one in (engine._planner.scheduler, engine._planner, engine) if hasattr(one, stage))
    fails, sound = Failing(error, 2), getattr(owner, stage)
    monkeypatch.setattr(owner, stage, lambda *arguments, **named: (fails(), sound(*arguments, **named))[1])
    held.may_go.set()
    ends = [delta for stream in streams for delta in rest_of(stream) if delta.finish_reason]
    assert len(ends) == 9
    failed = [delta for delta in ends if delta.finish_reason == ERROR]
    assert failed
    for delta in failed:
        assert type(delta.error) is EngineError
        assert str(delta.error).startswith("request ")
    engine._thread.join(PATIENCE_S)
    with pytest.raises(EngineError, match="request 7: "):
        engine.submit([1])
    engine.close()
    assert engine._open.choices == {}


def test_books_that_cannot_even_end_a_request_still_end_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = TokenForward()
    held = forward.before = Held()
    engine = Engine(forward, EngineSettings(call_timeout_s=PATIENCE_S))
    streams = [engine.submit(prompt_of(5, seed), plain(n=2)) for seed in range(3)]
    held.wait()
    streams.append(engine.submit(prompt_of(3), plain()))
    streams[0].cancel()
    # From now on no request is found in the list of those that run.
    engine._planner.scheduler.running.clear()
    held.may_go.set()
    for stream in streams:
        deltas = rest_of(stream)
        for choice in {delta.choice for delta in deltas}:
            assert end_of(deltas, choice).finish_reason == ERROR
            assert str(end_of(deltas, choice).error).startswith(f"request {stream.request_id}")
    engine.close()


def not_finite_behind(token: int, value: float):
    """Spoils the logits of the steps in which a sequence ends with this token."""

    def change(rows, logits: torch.Tensor) -> None:
        ends = [entry.token_ids[-1] for entry in rows if entry.num_logits]
        logits[[place for place, last in enumerate(ends) if last == token]] = value

    return change


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logits_that_are_not_finite_end_their_request_alone(value: float, temperature: float) -> None:
    forward = TokenForward()
    forward.change = not_finite_behind(36, value)
    bad, *good = [[1, 2, 36], [3, 4, 5], [7, 8]]
    params = plain() if temperature == 0.0 else None
    with engine_over(forward) as engine:
        held = forward.before = Held()
        first = engine.submit([9], plain(1))
        held.wait()
        failing = engine.submit(bad, plain(n=2))
        others = [engine.submit(prompt, params or plain(8)) for prompt in good]
        held.may_go.set()
        rest_of(first)
        deltas = rest_of(failing)
        for choice in range(2):
            end = end_of(deltas, choice)
            assert end.finish_reason == ERROR
            assert str(end.error).startswith(f"request 2 choice {choice}: the model gave no finite largest logit")
        for prompt, stream in zip(good, others, strict=True):
            expected = greedy(prompt, 8)
            found = rest_of(stream)
            if 36 in expected[:-1]:
                assert tokens_of(found) == expected[: expected.index(36) + 1]
            else:
                assert tokens_of(found) == expected
        engine.check_integrity()


class Only:
    """A mask that allows one token after each number of new tokens, and notes what it is asked."""

    def __init__(self, *token_ids: int) -> None:
        self._token_ids = token_ids
        self.asked: list[tuple[int, ...]] = []

    def allowed(self, token_ids) -> np.ndarray:
        self.asked.append(tuple(token_ids))
        found = np.zeros(VOCAB, bool)
        found[self._token_ids[len(token_ids)]] = True
        return found


def test_a_mask_is_asked_about_the_new_tokens_alone_and_obeyed() -> None:
    mask = Only(5, 6, 7)
    with engine_over(TokenForward()) as engine:
        assert tokens_of(rest_of(engine.submit(prompt_of(6), plain(3, token_mask=mask)))) == [5, 6, 7]
    assert mask.asked == [(), (5,), (5, 6)]


class Slow:
    """A mask that returns when it is let go."""

    def __init__(self) -> None:
        self.is_asked, self.may_return = threading.Event(), threading.Event()

    def allowed(self, token_ids) -> None:
        self.is_asked.set()
        assert self.may_return.wait(PATIENCE_S)


@pytest.fixture
def slow() -> Iterator[Slow]:
    mask = Slow()
    yield mask
    mask.may_return.set()


def test_rows_with_a_slow_mask_sit_out_and_no_other_waits_for_them(slow: Slow) -> None:
    forward = TokenForward()
    with engine_over(forward, max_batch_tokens=8) as engine:
        masked = engine.submit(prompt_of(11), plain(n=2, token_mask=slow))
        assert slow.is_asked.wait(PATIENCE_S)
        for seed in range(3):
            assert tokens_of(rest_of(engine.submit(prompt_of(5, seed), plain()))) == greedy(prompt_of(5, seed), 8)
        engine.check_integrity()
        slow.may_return.set()
        deltas = rest_of(masked)
        assert [tokens_of(deltas, choice) for choice in range(2)] == [greedy(prompt_of(11), 8)] * 2


def test_a_request_that_awaits_its_mask_can_be_cancelled(slow: Slow) -> None:
    forward = TokenForward()
    with engine_over(forward) as engine:
        masked = engine.submit(prompt_of(6), plain(token_mask=slow))
        assert slow.is_asked.wait(PATIENCE_S)
        masked.cancel()
        assert end_of(rest_of(masked)).finish_reason == CANCELLED
        slow.may_return.set()
        # What the mask says now is for nobody.
        assert tokens_of(rest_of(engine.submit([1, 2], plain(2, token_mask=Only(3, 4))))) == [3, 4]
        assert_clean(engine, forward)


def raising(token_ids) -> None:
    raise ValueError("a bad grammar")


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (raising, "token_mask: it raised ValueError('a bad grammar')"),
        (lambda token_ids: [False] * VOCAB, "the token mask allows no token"),
        (lambda token_ids: [True] * 3, "token_mask: it gave torch.bool [3]"),
        (lambda token_ids: "yes", "token_mask: it raised"),
    ],
)
def test_a_mask_that_is_wrong_ends_its_request_alone(mask, text: str) -> None:
    with engine_over(TokenForward()) as engine:
        wrong = engine.submit(prompt_of(6), plain(token_mask=mask))
        right = engine.submit(prompt_of(7), plain(2, token_mask=Only(3, 4)))
        other = engine.submit(prompt_of(8), plain())
        end = end_of(rest_of(wrong))
        assert isinstance(end.error, ConfigError)
        assert str(end.error).startswith(f"request 1: {text}")
        assert tokens_of(rest_of(right)) == [3, 4]
        assert tokens_of(rest_of(other)) == greedy(prompt_of(8), 8)


def test_masks_that_never_return_end_their_requests_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a thread of its own in the end; where there may be no more, masks are refused."""
    monkeypatch.setattr(step_planner, "MaskThread", functools.partial(MaskThread, max_call_s=0.02))
    masks = [Slow() for _ in range(MAX_STUCK + 2)]
    forward = TokenForward()
    with engine_over(forward) as engine:
        try:
            for mask in masks[:-1]:
                stuck = engine.submit(prompt_of(6), plain(token_mask=mask))
                other = engine.submit(prompt_of(8), plain())
                assert "it did not return within 0.02 s" in str(end_of(rest_of(stuck)).error)
                assert tokens_of(rest_of(other)) == greedy(prompt_of(8), 8)
            beside = engine.submit(prompt_of(8), plain())
            refused = engine.submit(prompt_of(6), plain(n=2, token_mask=masks[-1]))
            deltas = rest_of(refused)
            for choice in range(2):
                text = str(end_of(deltas, choice).error)
                assert text.startswith(f"request {refused.request_id} choice {choice}: token_mask: the thread")
            assert tokens_of(rest_of(beside)) == greedy(prompt_of(8), 8)
            # Alone, so that there is nothing to compute once it is refused.
            assert end_of(rest_of(engine.submit([1], plain(token_mask=masks[-1])))).finish_reason == ERROR
            assert tokens_of(rest_of(engine.submit(prompt_of(8), plain()))) == greedy(prompt_of(8), 8)
        finally:
            for mask in masks:
                mask.may_return.set()


def test_a_prompt_whose_logits_are_spoilt_once_is_sound_afterwards() -> None:
    """The blocks of a request that failed may be found by others, and hold what was computed."""
    forward = TokenForward()
    forward.change = not_finite_behind(36, float("nan"))
    prompt = [*prompt_of(12), 36]
    with engine_over(forward) as engine:
        assert end_of(rest_of(engine.submit(prompt, plain()))).finish_reason == ERROR
        forward.change = lambda rows, logits: None
        assert end_of(deltas := rest_of(engine.submit(prompt, plain()))).finish_reason == LENGTH
        assert tokens_of(deltas) == greedy(prompt, 8)
        assert int(logits_after(prompt).argmax()) == tokens_of(deltas)[0]
