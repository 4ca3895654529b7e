"""The door alone, with a scripted engine behind it: who waits at it, in threads and event loops,
and what a program reads through it, is served and let go whatever comes at the same time.

Nothing but the standard library is imported, and no test runner is needed, so that every Python
that the project names can run this file (tests/checks/interpreters.py).
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import threading
import time
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from dflash_moe.engine import delivery
from dflash_moe.engine.delivery import Cancel, EngineDoor, StreamGroup, Submit, TokenStream
from dflash_moe.engine.prompt_runs import PromptRun, PromptRuns
from dflash_moe.engine.request import CANCELLED, LENGTH, TokenDelta
from dflash_moe.engine.text import RequestText
from dflash_moe.errors import ConfigError, EngineError, QueueFull

# What must come is awaited so long. Only a failing test waits for all of it.
PATIENCE_S = 20.0


def say(door: EngineDoor, *deltas: tuple[TokenStream, TokenDelta]) -> list[Any]:
    """Hands deltas over as the engine thread does, and returns the commands that have come."""
    return door.exchange(list(deltas), num_waiting=0, seconds_per_request=0.0, wait=False)


def opened(num_streams: int = 1) -> tuple[EngineDoor, list[TokenStream]]:
    door = EngineDoor(100)
    return door, [TokenStream(door, number, 1) for number in range(1, num_streams + 1)]


def dying_door(delta: TokenDelta | None) -> tuple[EngineDoor, TokenStream]:
    """A door whose engine thread ends just when a caller asks whether it lives."""
    door, (stream,) = opened()

    def is_alive() -> bool:
        if delta is not None and stream._num_open:
            say(door, (stream, delta))
        return False

    door.watch(is_alive)
    return door, stream


class EventLoopTest(unittest.TestCase):
    """Tasks that wait at the door."""

    def test_tokens_that_take_longer_than_a_look_are_waited_for(self) -> None:
        door, (stream,) = opened()
        looks: list[int] = []

        def is_alive() -> bool:
            looks.append(1)
            if len(looks) == 5:
                say(door, (stream, TokenDelta(0, (7,), finish_reason=LENGTH)))
            return True

        door.watch(is_alive)
        with patch.object(delivery, "LOOK_S", 0.001):
            found = asyncio.run(asyncio.wait_for(stream.atake(), PATIENCE_S))
        assert [delta.token_ids for delta in found] == [(7,)]
        assert len(looks) >= 5
        assert stream.arrivals == {}

    def test_a_reader_that_is_cancelled_while_tokens_come_is_cancelled(self) -> None:
        """However many turns of the event loop lie between the two, and whichever is first."""

        async def cancelled(turns: int, cancels_first: bool) -> tuple[bool, bool]:
            door, (stream,) = opened()
            task = asyncio.ensure_future(stream.atake())
            await asyncio.sleep(0)
            steps: list[Callable[[], Any]] = [lambda: say(door, (stream, TokenDelta(0, (7,)))), task.cancel]
            first, second = reversed(steps) if cancels_first else steps
            results = [first()]
            for _ in range(turns):
                await asyncio.sleep(0)
            results.append(second())
            await asyncio.wait([task], timeout=PATIENCE_S)
            assert stream.arrivals == {}
            return results[0 if cancels_first else 1], task.cancelled()

        for turns in range(6):
            for cancels_first in (False, True):
                with self.subTest(turns=turns, cancels_first=cancels_first):
                    was_asked, was_cancelled = asyncio.run(cancelled(turns, cancels_first))
                    # A task that had ended before says that it cannot be cancelled any more.
                    assert was_cancelled == was_asked

    @unittest.skipUnless(hasattr(asyncio, "timeout"), "asyncio.timeout came with Python 3.11")
    def test_a_time_limit_that_passes_while_tokens_come_is_kept(self) -> None:
        async def limited(turns: int) -> bool:
            door, (stream,) = opened()
            limits: list[Any] = []

            async def read() -> bool:
                try:
                    async with asyncio.timeout(None) as limit:
                        limits.append(limit)
                        while await stream.atake():
                            pass
                except TimeoutError:
                    return True
                return False

            task = asyncio.ensure_future(read())
            await asyncio.sleep(0)
            say(door, (stream, TokenDelta(0, (7,))))
            for _ in range(turns):
                await asyncio.sleep(0)
            limits[0].reschedule(asyncio.get_running_loop().time())
            done, _ = await asyncio.wait([task], timeout=PATIENCE_S / 4)
            task.cancel()
            return bool(done) and task.result()

        for turns in range(6):
            with self.subTest(turns=turns):
                assert asyncio.run(limited(turns))

    def test_a_client_that_leaves_a_stream_has_its_request_cancelled(self) -> None:
        async def left(turns: int) -> list[Any]:
            door, (stream,) = opened()

            async def read() -> None:
                async for _ in RequestText(stream, None, params()).aread():
                    pass

            task = asyncio.ensure_future(read())
            await asyncio.sleep(0)
            commands = say(door, (stream, TokenDelta(0, (7,))))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task], timeout=PATIENCE_S)
            assert task.cancelled()
            return commands + say(door)

        for turns in range(8):
            with self.subTest(turns=turns):
                assert asyncio.run(left(turns)) == [Cancel(1)]

    def test_many_tasks_of_several_loops_get_their_own_tokens_each_once(self) -> None:
        door, streams = opened(24)
        found: dict[int, list[int]] = {}

        async def read(stream: TokenStream) -> None:
            while deltas := await asyncio.wait_for(stream.atake(), PATIENCE_S):
                found.setdefault(stream.request_id, []).extend(token for delta in deltas for token in delta.token_ids)

        async def read_all(mine: Sequence[TokenStream]) -> None:
            await asyncio.gather(*map(read, mine))

        loops = [threading.Thread(target=asyncio.run, args=(read_all(streams[place::3]),)) for place in range(3)]
        for loop in loops:
            loop.start()
        for token in range(50):
            reason = LENGTH if token == 49 else None
            say(door, *((stream, TokenDelta(0, (token,), finish_reason=reason)) for stream in streams))
        for loop in loops:
            loop.join(PATIENCE_S)
        assert found == {stream.request_id: list(range(50)) for stream in streams}

    def test_who_waits_in_a_loop_that_was_closed_is_no_hindrance(self) -> None:
        door, streams = opened(2)
        loop = asyncio.new_event_loop()
        task = loop.create_task(streams[0].atake())
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        say(door, *((stream, TokenDelta(0, (5,), finish_reason=LENGTH)) for stream in streams))
        assert [len(stream.take(PATIENCE_S)) for stream in streams] == [1, 1]
        task.get_coro().close()  # type: ignore[union-attr]
        task._log_destroy_pending = False  # type: ignore[attr-defined]


class LastWordsTest(unittest.TestCase):
    """An engine thread that ends."""

    def test_what_it_said_last_is_heard(self) -> None:
        last = TokenDelta(0, (5,), finish_reason=LENGTH)
        _, stream = dying_door(last)
        assert (stream.take(), stream.take()) == ([last], [])
        _, stream = dying_door(last)
        assert asyncio.run(stream.atake()) == [last]
        _, stream = dying_door(last)
        group = StreamGroup()
        group.add(stream)
        assert group.take() == [(stream, [last])]

    def test_where_it_said_nothing_that_is_an_error_and_no_wait(self) -> None:
        _, stream = dying_door(None)
        with self.assertRaisesRegex(EngineError, "request 1: the engine thread has ended"):  # noqa: PT027 - no pytest here
            stream.take()
        with self.assertRaisesRegex(EngineError, "request 1: the engine thread has ended"):  # noqa: PT027 - no pytest here
            asyncio.run(stream.atake())
        assert not stream.bells
        assert not stream.arrivals
        group = StreamGroup()
        group.add(stream)
        assert group.take() == []


class Letters:
    """A tokenizer whose tokens are characters."""

    all_special_ids: Sequence[int] = ()

    def decode(self, token_ids: Sequence[int], **_options: Any) -> str:
        return "".join(map(chr, token_ids))


def params(stop: Sequence[str] = ()) -> Any:
    """What a `RequestText` reads of `SamplingParams`."""
    return SimpleNamespace(stop=stop, n=1)


class ScriptedEngine:
    """Gives every request the letters of "abc" over and over, one a step, and heeds cancels. A
    request ends where `ends` says so of its number, which is counted from 1.
    """

    def __init__(self, ends: Callable[[int], bool], max_queue: int = 100) -> None:
        self.door = EngineDoor(max_queue)
        self._ends = ends
        self._num_submitted = 0
        self._open: dict[int, TokenStream] = {}
        self._num_tokens: dict[int, int] = {}
        self.cancelled: list[int] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def submit(self, stop: Sequence[str] = ()) -> RequestText:
        stream = TokenStream(self.door, self._num_submitted + 1, 1)
        self.door.send(Submit((stream,)))
        self._num_submitted += 1
        return RequestText(stream, Letters(), params(stop))

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        deltas: list[tuple[TokenStream, TokenDelta]] = []
        while not self._is_over.wait(1e-4):
            # As many wait as run: a full queue has room when one has ended.
            num_waiting = len(self._open) - sum(delta.finish_reason is not None for _, delta in deltas)
            commands = self.door.exchange(deltas, num_waiting=num_waiting, seconds_per_request=0.0, wait=False)
            deltas = [delta for command in commands for delta in self._heed(command)]
            deltas += [self._next(number) for number in list(self._open)]

    def _heed(self, command: Any) -> list[tuple[TokenStream, TokenDelta]]:
        if isinstance(command, Submit):
            self._open[command.requests[0].request_id] = command.requests[0]
        elif command.request_id in self._open:
            self.cancelled.append(command.request_id)
            return [(self._open.pop(command.request_id), TokenDelta(0, finish_reason=CANCELLED))]
        return []

    def _next(self, number: int) -> tuple[TokenStream, TokenDelta]:
        count = self._num_tokens[number] = self._num_tokens.get(number, 0) + 1
        token, reason = ord("abc"[(count - 1) % 3]), LENGTH if self._ends(number) else None
        stream = self._open.pop(number) if reason else self._open[number]
        return stream, TokenDelta(0, (token,), finish_reason=reason)


class GenerateTest(unittest.TestCase):
    """Prompts that are generated together."""

    def generated(
        self, engine: ScriptedEngine, stops: Sequence[Sequence[str]], on_chunk: Callable[[int, Any], None] | None = None
    ) -> PromptRuns:
        runs = [PromptRun(place, 3, lambda stop=stop: engine.submit(stop)) for place, stop in enumerate(stops)]
        return PromptRuns(runs, on_chunk)

    def test_prompts_that_have_met_their_stop_string_end_while_the_first_one_goes_on(self) -> None:
        deadline = time.monotonic() + PATIENCE_S

        def ends(number: int) -> bool:
            return time.monotonic() > deadline or (number == 1 and len(engine.cancelled) == 15)

        engine = ScriptedEngine(ends)
        with engine.running():
            outcomes = list(self.generated(engine, [(), *[("ca",)] * 15]).outcomes())
        assert sorted(engine.cancelled) == list(range(2, 17))
        assert [outcome[0].finish_reason for outcome in outcomes] == [LENGTH, *(["stop"] * 15)]  # type: ignore[index]
        assert {outcome[0].text for outcome in outcomes[1:]} == {"ab"}  # type: ignore[index]
        assert [outcome[0].prompt for outcome in outcomes] == list(range(16))  # type: ignore[index]

    def test_what_a_caller_raises_over_a_chunk_is_the_callers_and_ends_all(self) -> None:
        mine = ConfigError("mine")

        def on_chunk(place: int, _chunk: Any) -> None:
            if place == 2:
                raise mine

        engine = ScriptedEngine(lambda _number: False)
        with engine.running():
            outcomes = self.generated(engine, [()] * 4, on_chunk).outcomes()
            with self.assertRaises(ConfigError) as caught:  # noqa: PT027 - no pytest here
                next(outcomes)
            deadline = time.monotonic() + PATIENCE_S
            while len(engine.cancelled) < 4 and time.monotonic() < deadline:
                time.sleep(0.001)
        assert caught.exception is mine
        assert sorted(engine.cancelled) == [1, 2, 3, 4]

    def test_prompts_begin_as_others_end_where_the_queue_is_short(self) -> None:
        engine = ScriptedEngine(lambda number: engine._num_tokens[number] == 1 + number % 5, max_queue=3)
        with engine.running():
            outcomes = list(self.generated(engine, [()] * 40).outcomes())
        assert [len(outcome[0].token_ids) for outcome in outcomes] == [1 + number % 5 for number in range(1, 41)]  # type: ignore[index]

    def test_a_queue_that_others_have_filled_is_the_prompts_outcome(self) -> None:
        engine = ScriptedEngine(lambda _number: False, max_queue=2)
        others = [engine.submit(), engine.submit()]
        with engine.running():
            outcomes = list(self.generated(engine, [()] * 2).outcomes())
        assert [type(outcome) for outcome in outcomes] == [QueueFull, QueueFull]
        assert len(others) == 2

    def test_an_engine_thread_that_is_gone_ends_each_prompt_by_its_name(self) -> None:
        engine = ScriptedEngine(lambda _number: False)
        alive = iter([True] * 2)
        engine.door.watch(lambda: next(alive, False))
        with patch.object(delivery, "LOOK_S", 0.001):
            outcomes = list(self.generated(engine, [()] * 3).outcomes())
        assert [str(outcome) for outcome in outcomes] == [
            f"request {number}: the engine thread has ended without an answer" for number in (1, 2, 3)
        ]


if __name__ == "__main__":
    unittest.main()
