"""One outbox for many requests: all deltas of a step in one call without a lock, what happens where
it fails, and how an engine is drained.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dflash_moe.engine.delivery import Outbox
from dflash_moe.engine.engine import Engine
from dflash_moe.engine.engine_settings import EngineSettings
from dflash_moe.engine.request import CANCELLED, LENGTH, TokenDelta
from dflash_moe.errors import ConfigError, QueueFull, RequestCancelled
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


class Kept:
    """What an outbox delivered: the deltas of each call, and those of each request."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[int, TokenDelta]]] = []
        self.outbox = Outbox(self._deliver)
        self._came = threading.Condition()

    def _deliver(self, deltas: list[tuple[int, TokenDelta]]) -> None:
        with self._came:
            self.calls.append(deltas)
            self._came.notify_all()

    def of(self, request_id: int) -> list[TokenDelta]:
        return [delta for call in self.calls for found, delta in call if found == request_id]

    def wait(self, request_id: int, num_choices: int = 1) -> list[TokenDelta]:
        """Returns all deltas of a request, once its choices have ended."""

        def num_ended() -> int:
            return sum(delta.finish_reason is not None for delta in self.of(request_id))

        with self._came:
            assert self._came.wait_for(lambda: num_ended() == num_choices, PATIENCE_S)
        return self.of(request_id)


def refused(_deltas: list[tuple[int, TokenDelta]]) -> None:
    raise OSError("the client has gone")


def test_all_requests_of_an_outbox_come_with_one_call_a_step_beside_streams_and_other_outboxes() -> None:
    forward, kept, other = TokenForward(), Kept(), Kept()
    held = forward.before = Held()
    with engine_over(forward) as engine:
        first = engine.submit(prompt_of(3), plain(1), outbox=kept.outbox)
        held.wait()
        ids = [engine.submit(prompt_of(5, seed), plain(6), outbox=kept.outbox) for seed in range(8)]
        alone = engine.submit(prompt_of(5, 8), plain(6), outbox=other.outbox)
        stream = engine.submit(prompt_of(5, 9), plain(6))
        held.may_go.set()
        for seed, request_id in enumerate(ids):
            assert tokens_of(kept.wait(request_id)) == greedy(prompt_of(5, seed), 6)
        assert tokens_of(other.wait(alone)) == greedy(prompt_of(5, 8), 6)
        assert tokens_of(rest_of(stream)) == greedy(prompt_of(5, 9), 6)
        assert len(set(ids) | {first, alone, stream.request_id}) == 11
    # The first request's only step, and six of the others.
    assert [sorted(request_id for request_id, _ in call) for call in kept.calls] == [[first], *[ids] * 6]
    assert [[request_id for request_id, _ in call] for call in other.calls] == [[alone]] * 6


def test_choices_of_an_outbox_are_told_apart_and_one_of_them_is_cancelled() -> None:
    forward, kept = TokenForward(), Kept()
    held = forward.before = Held(skip=1)
    with engine_over(forward) as engine:
        request_id = engine.submit(prompt_of(5), plain(n=3), outbox=kept.outbox)
        held.wait()
        engine.cancel(request_id, 1)
        engine.cancel(request_id + 1)
        held.may_go.set()
        deltas = kept.wait(request_id, 3)
        for choice in (0, 2):
            assert tokens_of(deltas, choice) == greedy(prompt_of(5), 8)
        assert (end_of(deltas, 1).finish_reason, end_of(deltas, 1).error) == (CANCELLED, None)
        assert len(tokens_of(deltas, 1)) < 8


class CountingLock:
    """Counts how often it is taken, and knows whether it is now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self.count += threading.current_thread().name == "dflash-moe-engine"

    def __exit__(self, *_exception: object) -> None:
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()


@pytest.mark.parametrize("count", [1, 16])
def test_a_step_takes_the_lock_once_and_delivers_without_it(count: int) -> None:
    forward, lock, kept = TokenForward(), CountingLock(), Kept()
    taken: list[int] = []
    # Only the engine thread takes the lock then, since nobody submits.
    held_while_delivering: list[bool] = []

    def deliver(deltas: list[tuple[int, TokenDelta]]) -> None:
        held_while_delivering.append(lock.locked())
        kept._deliver(deltas)

    outbox, held = Outbox(deliver), Held()
    forward.before = held
    with Engine(forward, EngineSettings(), lock=lock) as engine:
        ids = [engine.submit(prompt_of(5), plain(10), outbox=outbox)]
        held.wait()
        ids += [engine.submit(prompt_of(5, seed), plain(10), outbox=outbox) for seed in range(1, count)]
        forward.before = lambda _rows: taken.append(lock.count)
        held.may_go.set()
        for request_id in ids:
            kept.wait(request_id)
    assert len(taken) >= 9
    assert {after - before for before, after in zip(taken, taken[1:], strict=False)} == {1}
    assert set(held_while_delivering) == {False}


@pytest.mark.parametrize("kind", [OSError, SystemExit])
def test_an_outbox_that_fails_ends_its_requests_and_nothing_else(kind: type[BaseException], caplog) -> None:
    forward, kept, calls = TokenForward(), Kept(), []

    is_called, may_fail = threading.Event(), threading.Event()

    def fail(deltas: list[tuple[int, TokenDelta]]) -> None:
        calls.append(deltas)
        is_called.set()
        assert may_fail.wait(PATIENCE_S)
        raise kind("the client has gone")

    broken = Outbox(fail)
    with engine_over(forward, max_requests=4) as engine:
        kept_id = engine.submit(prompt_of(4), plain(20), outbox=kept.outbox)
        mine = [engine.submit(prompt_of(5, seed), plain(20, n=2), outbox=broken) for seed in range(4)]
        assert is_called.wait(PATIENCE_S)
        # The engine thread hears of these after the outbox has failed.
        late = [engine.submit(prompt_of(5, seed), plain(20), outbox=broken) for seed in range(4)]
        stream = engine.submit(prompt_of(6), plain(20))
        may_fail.set()
        assert tokens_of(kept.wait(kept_id)) == greedy(prompt_of(4), 20)
        assert tokens_of(rest_of(stream)) == greedy(prompt_of(6), 20)
        engine.check_integrity()
        assert len(calls) == 1
        assert {request_id for request_id, _ in calls[0]} <= set(mine)
        assert not set(late) & set(mine)
        with pytest.raises(RequestCancelled, match="its outbox has failed, and takes no tokens any more"):
            engine.submit(prompt_of(3), plain(), outbox=broken)
        assert_clean_but_cached(engine, forward)
        assert tokens_of(rest_of(engine.submit(prompt_of(3), plain()))) == greedy(prompt_of(3), 8)
    assert [record.message for record in caplog.records].count("an outbox has failed, and its requests end with it") == 1


def assert_clean_but_cached(engine: Engine, forward: TokenForward) -> None:
    assert (engine._open.num, engine._open.choices) == (0, {})
    assert forward.blocks.num_free == forward.blocks.num_blocks


def test_what_a_submission_is_refused_for_is_raised_and_not_delivered() -> None:
    forward, kept = TokenForward(), Kept()
    held = forward.before = Held()
    with engine_over(forward, max_requests=1, max_queue=2) as engine:
        first = engine.submit(prompt_of(3), plain(1), outbox=kept.outbox)
        held.wait()
        second = engine.submit(prompt_of(3), plain(1), outbox=kept.outbox)
        with pytest.raises(QueueFull, match="request 3"):
            engine.submit(prompt_of(3), plain(1), outbox=kept.outbox)
        with pytest.raises(ConfigError, match="request 4: cache_salt 'key' is not allowed; allowed: bytes"):
            engine.submit(prompt_of(3), plain(1), outbox=kept.outbox, cache_salt="key")  # type: ignore[call-overload]
        held.may_go.set()
        kept.wait(second)
    assert {request_id for call in kept.calls for request_id, _ in call} == {first, second}


def test_closing_ends_the_requests_of_an_outbox_with_the_reason() -> None:
    forward, kept = TokenForward(), Kept()
    held = forward.before = Held()
    engine = Engine(forward, EngineSettings(call_timeout_s=PATIENCE_S))
    failing = engine.submit(prompt_of(4), plain(), outbox=Outbox(refused))
    request_id = engine.submit(prompt_of(4), plain(), outbox=kept.outbox)
    held.wait()
    threading.Timer(0.05, held.may_go.set).start()
    engine.close()
    (*_, last) = kept.wait(request_id)
    assert last.finish_reason == CANCELLED
    assert isinstance(last.error, RequestCancelled)
    assert str(last.error).startswith(f"request {request_id}: the engine was closed")
    assert failing != request_id
    assert_clean(engine, forward)


# -- draining --------------------------------------------------------------------------------------


def test_a_drained_engine_ends_what_is_open_and_takes_no_more() -> None:
    forward, kept = TokenForward(), Kept()
    held = forward.before = Held()
    with engine_over(forward, max_requests=2) as engine, ThreadPoolExecutor(2) as pool:
        stream = engine.submit(prompt_of(4), plain())
        held.wait()
        ids = [engine.submit(prompt_of(5, seed), plain(), outbox=kept.outbox) for seed in range(4)]
        assert engine.refusal() == ""
        drains = [pool.submit(engine.drain, PATIENCE_S) for _ in range(2)]
        while not engine.refusal():
            time.sleep(0.001)
        with pytest.raises(RequestCancelled, match=r"request 6: the engine is draining and takes no more") as found:
            engine.submit(prompt_of(3), plain())
        assert found.value.code == "draining"
        engine.cancel(ids[3])
        assert not any(drain.done() for drain in drains)
        held.may_go.set()
        assert [drain.result(PATIENCE_S) for drain in drains] == [True, True]
        # All was delivered before it said so.
        for seed, request_id in enumerate(ids[:3]):
            assert tokens_of(kept.of(request_id)) == greedy(prompt_of(5, seed), 8)
        assert end_of(kept.of(ids[3])).finish_reason == CANCELLED
        assert tokens_of(rest_of(stream)) == greedy(prompt_of(4), 8)
        assert engine.drain(0.0), "nothing is open any more"
        engine.check_integrity()


def test_what_has_not_ended_by_the_deadline_is_cancelled_and_says_why() -> None:
    forward, kept = TokenForward(), Kept()
    held = forward.before = Held()
    with engine_over(forward, max_requests=2) as engine, ThreadPoolExecutor(1) as pool:
        ids = [engine.submit(prompt_of(4, 0), plain(), outbox=kept.outbox)]
        held.wait()
        ids += [engine.submit(prompt_of(4, seed), plain(), outbox=kept.outbox) for seed in (1, 2)]
        draining = pool.submit(engine.drain, 0.02)
        # Two requests, and that the engine is drained and that its time has passed.
        while len(engine._door._commands) < 4:
            time.sleep(0.001)
        held.may_go.set()
        assert draining.result(PATIENCE_S) is False
        for request_id in ids:
            last = end_of(kept.wait(request_id))
            assert last.finish_reason == CANCELLED
            assert isinstance(last.error, RequestCancelled)
            assert last.error.code == "draining"
            assert str(last.error) == f"request {request_id}: it had not ended 0.02 s after the engine began to drain"
        engine.check_integrity()
        assert engine.drain(-1.0)


def test_a_drain_ends_with_an_engine_that_is_closed_meanwhile() -> None:
    forward = TokenForward()
    held = forward.before = Held()
    engine = Engine(forward, EngineSettings(call_timeout_s=PATIENCE_S))
    with ThreadPoolExecutor(2) as pool:
        stream = engine.submit(prompt_of(4), plain())
        held.wait()
        draining = pool.submit(engine.drain, PATIENCE_S)
        while not engine._door._commands:
            time.sleep(0.001)
        closing = pool.submit(engine.close)
        while not engine._stopping:
            time.sleep(0.001)
        held.may_go.set()
        assert draining.result(PATIENCE_S) is False
        closing.result(PATIENCE_S)
    assert end_of(rest_of(stream)).finish_reason in (CANCELLED, LENGTH)
    with pytest.raises(RequestCancelled, match="the engine is closed"):
        engine.drain(1.0)
    assert engine.refusal() == "the engine is closed; open another one"
