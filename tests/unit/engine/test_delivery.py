"""What is between callers and the engine thread: how often its lock is taken, who waits where, and
how waits end: by tokens, limits, cancels, interrupts, closing, and a thread that has died.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from dflash_moe.engine import engine as engine_module
from dflash_moe.engine.delivery import EngineDoor, TokenStream
from dflash_moe.engine.engine import Engine
from dflash_moe.engine.engine_settings import EngineSettings
from dflash_moe.engine.request import CANCELLED, LENGTH, TokenDelta
from dflash_moe.errors import ConfigError, EngineError, QueueFull, RequestCancelled, WorkerTimeout
from tests.token_forward import (
    PATIENCE_S,
    Held,
    TokenForward,
    assert_clean,
    end_of,
    engine_over,
    greedy,
    plain,
    prompt_of,
    rest_of,
    tokens_of,
)


class CountingLock:
    """Counts how often the engine thread takes it. `Condition` finds what it asks of an RLock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.count = 0
        for name in ("release", "_is_owned", "_release_save", "_acquire_restore"):
            setattr(self, name, getattr(self._lock, name))

    def acquire(self, *arguments) -> bool:
        if threading.current_thread().name == "dflash-moe-engine":
            self.count += 1
        return self._lock.acquire(*arguments)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_exception: object) -> None:
        self._lock.release()


def locks_per_step(count: int, params) -> tuple[list[int], list[int]]:
    """Returns how often each step of `count` requests took the lock of the door, and that of the
    masks.
    """
    forward, lock, lock_of_masks = TokenForward(), CountingLock(), CountingLock()
    marks: list[tuple[int, int]] = []
    held = forward.before = Held()
    with Engine(forward, EngineSettings(), lock=lock) as engine:
        engine._planner.masks._condition = threading.Condition(lock_of_masks)
        first = engine.submit(prompt_of(3), plain(1))
        held.wait()
        streams = [engine.submit(prompt_of(5, seed), params) for seed in range(count)]
        forward.before = lambda rows: marks.append((lock.count, lock_of_masks.count))
        held.may_go.set()
        assert all(end_of(rest_of(stream)).finish_reason == LENGTH for stream in (first, *streams))
        engine.check_integrity()
        marks.append((lock.count, lock_of_masks.count))
    steps = list(itertools.pairwise(marks))
    return [after[0] - before[0] for before, after in steps[:-1]], [after[1] - before[1] for before, after in steps]


@pytest.mark.parametrize("count", [1, 4, 16])
def test_a_step_takes_the_lock_once_however_many_requests_it_has(count: int) -> None:
    found, _ = locks_per_step(count, plain(10))
    assert found == [1] * 9


@pytest.mark.parametrize("count", [1, 4, 16])
def test_a_step_takes_the_lock_of_masks_three_times_at_most(count: int) -> None:
    found, of_masks = locks_per_step(count, plain(10, token_mask=lambda token_ids: None))
    assert set(found) == {1}
    # Masks are asked for, answers are taken, and those of all requests that have ended are dropped.
    assert max(of_masks) <= 3


def test_threads_get_their_own_tokens_each_once() -> None:
    forward = TokenForward()

    def caller(place: int) -> None:
        for turn in range(8):
            prompt = prompt_of(3 + turn, place)
            assert tokens_of(rest_of(engine.submit(prompt, plain(6)))) == greedy(prompt, 6)

    with engine_over(forward) as engine, ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(caller, range(8), timeout=PATIENCE_S))) == 8


async def rest_of_async(stream: TokenStream) -> list[TokenDelta]:
    found: list[TokenDelta] = []
    while deltas := await asyncio.wait_for(stream.atake(), PATIENCE_S):
        found += deltas
    return found


def test_event_loops_get_their_own_tokens_each_once() -> None:
    async def callers(place: int) -> None:
        prompts = [prompt_of(3 + turn, place) for turn in range(12)]
        streams = [engine.submit(prompt, plain(6)) for prompt in prompts]
        found = await asyncio.gather(*map(rest_of_async, streams))
        assert [tokens_of(deltas) for deltas in found] == [greedy(prompt, 6) for prompt in prompts]

    with engine_over(TokenForward()) as engine, ThreadPoolExecutor(3) as pool:
        loops = [pool.submit(asyncio.run, callers(place)) for place in range(3)]
        for loop in loops:
            loop.result(PATIENCE_S)


def test_takers_of_one_stream_share_its_deltas_and_all_return() -> None:
    with engine_over(TokenForward()) as engine, ThreadPoolExecutor(5) as pool:
        stream = engine.submit(prompt_of(5), plain(30))
        shares = [pool.submit(rest_of, stream) for _ in range(4)] + [pool.submit(asyncio.run, rest_of_async(stream))]
        found = [delta for share in shares for delta in share.result(PATIENCE_S)]
    assert sorted(token for delta in found for token in delta.token_ids) == sorted(greedy(prompt_of(5), 30))
    assert [delta.finish_reason for delta in found if delta.finish_reason] == [LENGTH]


def test_a_stream_outlives_the_event_loop_that_waited_for_it() -> None:
    async def give_up(stream: TokenStream) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(stream.atake(), 0.01)

    forward = TokenForward()
    held = forward.before = Held()
    with engine_over(forward) as engine:
        streams = [engine.submit(prompt_of(4, seed), plain()) for seed in range(2)]
        held.wait()
        for stream in streams:
            asyncio.run(give_up(stream))
            assert not stream.arrivals
        # A task that is left behind waits in a loop that is closed, and nobody wakes it.
        loop = asyncio.new_event_loop()
        task = loop.create_task(streams[0].atake())
        loop.run_until_complete(asyncio.sleep(0))
        assert streams[0].arrivals
        loop.close()
        held.may_go.set()
        assert tokens_of(asyncio.run(rest_of_async(streams[0]))) == greedy(prompt_of(4, 0), 8)
        assert tokens_of(rest_of(streams[1])) == greedy(prompt_of(4, 1), 8)
        task.get_coro().close()
        task._log_destroy_pending = False


def test_a_take_with_a_limit_says_who_has_no_token_and_the_request_goes_on() -> None:
    forward = TokenForward()
    held = forward.before = Held()
    with engine_over(forward) as engine:
        stream = engine.submit(prompt_of(4), plain())
        held.wait()
        for timeout in (0.0, 0.01, -1.0):
            with pytest.raises(WorkerTimeout, match=rf"request 1: no token within {timeout:g} s; it goes on"):
                stream.take(timeout)
        assert not stream.bells
        held.may_go.set()
        assert tokens_of(rest_of(stream)) == greedy(prompt_of(4), 8)
        assert stream.take() == stream.take(0.0) == []


def test_a_full_queue_refuses_by_name_and_says_when_to_come_again() -> None:
    forward = TokenForward()
    held = forward.before = Held(skip=1)
    with engine_over(forward, max_queue=3, max_requests=1) as engine:
        streams = [engine.submit(prompt_of(4, 0), plain())]
        held.wait()
        streams += [engine.submit(prompt_of(4, seed), plain()) for seed in (1, 2)]
        with pytest.raises(QueueFull, match=r"^request 4: 2 requests wait and at most 3 may .*; 2 more were refused") as caught:
            engine.submit(prompt_of(4), plain(n=2))
        assert caught.value.retry_after_s >= 1.0
        streams.append(engine.submit(prompt_of(4, 3), plain()))
        with pytest.raises(QueueFull):
            engine.submit(prompt_of(4), plain())
        with pytest.raises(ConfigError, match=r"request 7: n=4 is not allowed; allowed: at most 3 \(engine.max_queue\)"):
            engine.submit(prompt_of(4), plain(n=4))
        held.may_go.set()
        for seed, stream in enumerate(streams):
            assert tokens_of(rest_of(stream)) == greedy(prompt_of(4, seed), 8)
        assert tokens_of(rest_of(engine.submit(prompt_of(4), plain(n=3))), 2) == greedy(prompt_of(4), 8)


def test_what_is_retried_after_a_pause_does_not_wait_for_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr(engine_module, "time", clock)
    forward = TokenForward()
    with engine_over(forward, max_queue=2, max_requests=1) as engine:
        for _ in range(4):
            now[0] += 36000.0
            rest_of(engine.submit(prompt_of(4), plain()))
        held = forward.before = Held(skip=1)
        streams = [engine.submit(prompt_of(4), plain())]
        held.wait()
        streams += [engine.submit(prompt_of(4), plain()) for _ in range(2)]
        with pytest.raises(QueueFull) as caught:
            engine.submit(prompt_of(4), plain())
        assert caught.value.retry_after_s == 1.0
        held.may_go.set()
        for stream in streams:
            rest_of(stream)


def test_an_error_that_is_said_in_other_words_keeps_when_to_come_again() -> None:
    assert QueueFull("full", retry_after_s=7.5).reworded("still full").retry_after_s == 7.5  # type: ignore[attr-defined]


def test_cancels_end_a_request_wherever_it_is_and_no_other() -> None:
    forward = TokenForward()
    held = forward.before = Held()
    with engine_over(forward, max_batch_tokens=8, max_requests=2) as engine:
        long, short, waits = (engine.submit(prompt_of(count, count), plain()) for count in (29, 3, 5))
        held.wait()
        others = [engine.submit(prompt_of(6, 6), plain()), engine.submit(prompt_of(7, 7), plain())]
        # One has computed a part of its prompt, one is not admitted and one was not accepted yet.
        for stream in (long, waits, others[0]):
            stream.cancel()
            stream.cancel()
        short.cancel(99)
        held.may_go.set()
        for stream in (long, waits, others[0]):
            assert end_of(rest_of(stream)) == TokenDelta(0, finish_reason=CANCELLED)
        assert tokens_of(rest_of(short)) == greedy(prompt_of(3, 3), 8)
        assert tokens_of(rest_of(others[1])) == greedy(prompt_of(7, 7), 8)
        short.cancel()
        engine.check_integrity()
        assert engine.stats()["finished"] == {"cancelled": 3, "length": 2}


@pytest.mark.parametrize("cancelled", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2), (0, 2)])
@pytest.mark.parametrize("is_admitted", [False, True])
def test_choices_whose_siblings_are_cancelled_go_on(cancelled: tuple[int, ...], is_admitted: bool) -> None:
    """The first one computes the prompt for all of them, and another takes its place."""
    forward = TokenForward()
    held = forward.before = Held()
    with engine_over(forward, max_batch_tokens=4) as engine:
        # A prompt of three steps; or one that waits behind another one, which takes all rows.
        first = None if is_admitted else engine.submit(prompt_of(9, 1), plain(2))
        if first is not None:
            held.wait()
        stream = engine.submit(prompt_of(11), plain(n=3))
        held.wait()
        for choice in cancelled:
            stream.cancel(choice)
        held.may_go.set()
        deltas = rest_of(stream)
        for choice in range(3):
            expected = [] if choice in cancelled else greedy(prompt_of(11), 8)
            assert tokens_of(deltas, choice) == expected
        engine.check_integrity()


def test_a_burst_of_a_thousand_submits_ends_with_the_right_tokens() -> None:
    forward = TokenForward(1024)
    with engine_over(forward) as engine:
        prompts = [prompt_of(1 + seed % 5, seed) for seed in range(1000)]
        streams = [engine.submit(prompt, plain(3)) for prompt in prompts]
        assert [tokens_of(rest_of(stream)) for stream in streams] == [greedy(prompt, 3) for prompt in prompts]
        engine.check_integrity()
        assert engine.stats()["waiting"] == engine.stats()["running"] == 0


@pytest.mark.parametrize("speculate", ["off", "prompt", "auto"])
def test_two_thousand_requests_leave_nothing_behind(speculate: str) -> None:
    forward = TokenForward(1024)
    with engine_over(forward, speculate=speculate, max_queue=4000) as engine:
        streams = []
        for seed in range(1000):
            mask = (lambda token_ids: None) if seed % 5 == 0 else None
            stream = engine.submit([seed % 7, 1, 2] * 3, plain(1 + seed % 7, n=1 + seed % 3, token_mask=mask))
            if seed % 4 == 0:
                stream.cancel(0 if seed % 8 else None)
            streams.append(stream)
        for stream in streams:
            rest_of(stream)
        assert sum(engine.stats()["finished"].values()) == 1999
        # A request that never computes a step, beside others that do not either.
        held = forward.before = Held()
        last = engine.submit([1], plain(1))
        held.wait()
        engine.submit([1], plain(1, token_mask=lambda token_ids: None)).cancel()
        held.may_go.set()
        rest_of(last)
        engine.check_integrity()
        assert_clean(engine, forward)


def test_an_idle_engine_wakes_up_for_each_command() -> None:
    with engine_over(TokenForward()) as engine:
        for turn in range(50):
            engine.check_integrity()
            assert tokens_of(rest_of(engine.submit(prompt_of(3, turn), plain(2)))) == greedy(prompt_of(3, turn), 2)
            engine.drop_prefix_cache()


def test_closing_ends_all_who_wait_by_name_and_closes_once() -> None:
    forward = TokenForward()
    held = forward.before = Held()
    engine = Engine(forward, EngineSettings(max_requests=2, call_timeout_s=PATIENCE_S))
    with ThreadPoolExecutor(16) as pool:
        streams = [engine.submit(prompt_of(4, seed), plain(n=2 if seed == 3 else 1)) for seed in range(6)]
        held.wait()
        waiting = [pool.submit(rest_of, stream) for stream in streams[:4]]
        waiting += [pool.submit(asyncio.run, rest_of_async(stream)) for stream in streams[4:]]
        # Of these the engine thread has not heard yet.
        streams += [engine.submit(prompt_of(4, seed), plain()) for seed in (6, 7)]
        waiting += [pool.submit(rest_of, stream) for stream in streams[6:]]
        checking = pool.submit(engine.check_integrity, 100 * PATIENCE_S)
        while not engine._door._commands or len(engine._door._commands) < 3:
            time.sleep(0.001)
        closing = [pool.submit(engine.close) for _ in range(2)]
        while not engine._stopping:
            time.sleep(0.001)
        held.may_go.set()
        for one in (*closing, checking):
            assert one.result(PATIENCE_S) is None
        ends = [end_of(one.result(PATIENCE_S)) for one in waiting]
    assert {delta.finish_reason for delta in ends} == {CANCELLED}
    for place, delta in enumerate(ends, start=1):
        assert isinstance(delta.error, RequestCancelled)
        assert re.match(rf"request {place}( choice 0)?: the engine was closed", str(delta.error))
    assert len({id(delta.error) for delta in ends}) == 8
    engine.close()
    with pytest.raises(RequestCancelled, match=r"request 9: the engine is closed; open another one"):
        engine.submit([1])
    with pytest.raises(RequestCancelled):
        engine.check_integrity()
    streams[0].cancel()
    assert streams[0].take() == []
    assert_clean(engine, forward)


def test_a_race_of_submits_and_closing_ends_every_stream_once() -> None:
    for turn in range(30):
        forward = TokenForward()
        engine = Engine(forward)
        streams: list[TokenStream] = []

        def submit(engine: Engine = engine, streams: list[TokenStream] = streams) -> None:
            with contextlib.suppress(RequestCancelled):
                while True:
                    streams.append(engine.submit([1, 2, 3], plain(2)))

        with ThreadPoolExecutor(3) as pool:
            callers = [pool.submit(submit) for _ in range(3)]
            while len(streams) < turn:
                time.sleep(0)
            engine.close()
            for caller in callers:
                with contextlib.suppress(QueueFull):
                    caller.result(PATIENCE_S)
        assert {end_of(rest_of(stream)).finish_reason for stream in streams} <= {LENGTH, CANCELLED}
        assert_clean(engine, forward)


def test_who_waits_for_a_thread_that_hangs_learns_it_when_the_engine_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "CLOSE_S", 0.01)
    forward = TokenForward()
    held = forward.before = Held()
    engine = Engine(forward, EngineSettings(call_timeout_s=0.01))
    streams = [engine.submit([1, 2], plain()) for _ in range(2)]
    held.wait()
    engine.close()
    with pytest.raises(EngineError, match="request 1: the engine thread has ended without an answer"):
        streams[0].take()
    with pytest.raises(EngineError, match="request 2: the engine thread has ended without an answer"):
        asyncio.run(streams[1].atake())
    held.may_go.set()
    engine._thread.join(PATIENCE_S)
    assert not engine._thread.is_alive()


class Interrupted(BaseException):
    """What the signal raises."""


def test_interrupts_at_any_place_leave_the_lock_to_others() -> None:
    """Ctrl-C comes between any two steps of a caller. With a lock lost, the engine would stand."""
    door = EngineDoor(10)
    stream = TokenStream(door, 1, 1)
    is_over, exchanges = threading.Event(), itertools.count()

    def exchange() -> None:
        while not is_over.is_set():
            door.exchange([], num_waiting=0, seconds_per_request=0.0, wait=next(exchanges) % 2 == 0)

    def interrupt(*_signal: object) -> None:
        raise Interrupted

    engine = threading.Thread(target=exchange, daemon=True)
    engine.start()
    # pytest-timeout has the same timer, which goes on afterwards.
    former, timer = signal.signal(signal.SIGALRM, interrupt), signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        for turn in range(2000):
            with contextlib.suppress(Interrupted):
                signal.setitimer(signal.ITIMER_REAL, 2e-5 + 1e-7 * turn)
                # Not for ever: an interrupt within a call-back of the interpreter is lost.
                for _ in range(200):
                    with contextlib.suppress(WorkerTimeout):
                        stream.take(2e-5)
                    stream.cancel()
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, former)
        signal.setitimer(signal.ITIMER_REAL, *timer)
    is_over.set()
    assert door._lock.acquire(timeout=PATIENCE_S)
    door._lock.release()
    door.refuse(RequestCancelled("over"))
    engine.join(PATIENCE_S)
    assert not engine.is_alive()
