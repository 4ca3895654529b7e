"""Two halves on two threads: turns, keys that one half awaits, failures, and a thread that ends.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from dflash_moe.errors import EngineError
from dflash_moe.forward.halves.half_turns import HalfStopped, HalfTurns
from dflash_moe.forward.halves.two_halves import TwoHalves
from dflash_moe.operators.step_clock import StepClock

LIMIT_S = 30.0
LAYERS = 20


def halves(limit_s: float = LIMIT_S) -> TwoHalves:
    return TwoHalves(lambda: limit_s)


def call_experts(turns: HalfTurns) -> None:
    clock = StepClock(turns)
    clock.enter(clock.leave())


def test_one_half_at_a_time_computes():
    both = halves()
    computing, most = [], []

    def half(turns):
        clock = StepClock(turns)
        for _ in range(LAYERS):
            computing.append(None)
            most.append(len(computing))
            time.sleep(0.0005)
            computing.pop()
            left = clock.leave()
            time.sleep(0.0005)
            clock.enter(left)
        return torch.zeros(1)

    done = both.run(half, half)
    assert max(most) == 1
    assert len(most) == 2 * LAYERS
    assert 0 < done.hidden_s <= done.awaited_s
    both.close()


def test_the_first_half_computes_first_and_both_results_come_back():
    both = halves()
    order = []

    def half(name, value):
        def compute(_turns):
            order.append((name, threading.current_thread() is threading.main_thread()))
            assert torch.is_inference_mode_enabled()
            return torch.tensor([value])

        return compute

    for _ in range(5):
        done = both.run(half("first", 1), half("second", 2))
        assert (done.first.item(), done.second.item()) == (1, 2)
    assert order == [("first", True), ("second", False)] * 5
    both.close()


def test_keys_are_awaited_layer_by_layer_while_the_other_half_computes():
    both = halves()
    stored, read = [], []

    def first(turns):
        for layer in range(LAYERS):
            stored.append(layer)
            turns.keys_stored(layer)
            call_experts(turns)
        return torch.zeros(1)

    def second(turns):
        for layer in range(LAYERS):
            turns.await_keys(layer)
            assert layer in stored
            read.append(layer)
        return torch.zeros(1)

    both.run(first, second)
    assert read == list(range(LAYERS))
    both.close()


class Failure(Exception):
    """What a half raises."""


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failing_half_stops_the_other_which_has_ended_when_the_error_comes(failing):
    both = halves()
    ended = []

    def fails(turns):
        call_experts(turns)
        raise Failure

    def goes_on(turns):
        try:
            while True:
                call_experts(turns)
        finally:
            ended.append(True)

    with pytest.raises(Failure):
        both.run(*((fails, goes_on) if failing == 0 else (goes_on, fails)))
    assert ended == [True]
    done = both.run(lambda _: torch.ones(1), lambda _: torch.ones(1))
    assert done.first.item() == done.second.item() == 1
    both.close()


def test_a_half_that_does_not_end_is_reported_and_nothing_is_computed_after_it():
    both = halves(0.1)
    may_end = threading.Event()

    def stuck(turns):
        turns.end()
        may_end.wait(LIMIT_S)
        turns.begin(turns.draw())
        return torch.zeros(1)

    with pytest.raises(EngineError, match="had not ended"):
        both.run(lambda _: torch.zeros(1), stuck)
    with pytest.raises(EngineError, match="may still write"):
        both.run(lambda _: torch.zeros(1), lambda _: torch.zeros(1))
    may_end.set()
    both.close()


def test_a_wait_names_layer_and_limit():
    turns = HalfTurns(0.01)
    turns.begin(turns.draw())
    with pytest.raises(EngineError, match=r"layer 7: .* limit of 0.01 s"):
        turns.await_keys(7)
    turns.stop()
    with pytest.raises(HalfStopped):
        turns.begin(turns.draw())


def test_whoever_drops_the_halves_waits_until_the_second_thread_freed_what_was_its_own():
    both = halves()
    own, threads, freed = threading.local(), [], []

    class Kept:
        def __del__(self):
            # Long enough that a thread that nobody awaits is seen here.
            time.sleep(0.2)
            freed.append(threading.get_ident())

    def half(_turns):
        if threading.current_thread() is not threading.main_thread():
            threads.append(threading.current_thread())
            own.kept = Kept()
        return torch.zeros(1)

    both.run(half, half)
    assert freed == []
    del both
    gc.collect()
    assert freed == [threads[0].ident]
    assert not threads[0].is_alive()


def test_a_closed_second_thread_begins_again_with_the_next_step():
    both = halves()
    for value in (1.0, 2.0):
        done = both.run(lambda _turns, value=value: torch.tensor([value]), lambda _turns, value=value: torch.tensor([-value]))
        assert (float(done.first), float(done.second)) == (value, -value)
        both.close()


def test_a_clock_books_what_was_awaited():
    clock = StepClock()
    submitted = time.perf_counter()
    left = clock.leave()
    clock.enter(left, submitted - 5.0)
    assert 0 <= clock.awaited_s < 5.0 <= clock.remote_s
