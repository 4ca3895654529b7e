"""Between callers and the engine thread: commands go in, tokens come out. There is one lock, which
the engine thread takes once a step, however many requests there are.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dflash_moe.engine.request import TokenDelta
from dflash_moe.errors import DflashError, EngineError, QueueFull, WorkerTimeout

# A waiting caller looks this often whether the engine thread is alive.
LOOK_S = 1.0
# An idle engine wakes up this often, for nothing.
IDLE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Submit:
    """A caller's new requests, one per choice."""

    requests: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """A caller no longer wants a request: one choice, or where that is None all of them."""

    request_id: int
    choice: int | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """Something that the engine thread does between two steps."""

    function: Callable[[], None]


Command = Submit | Cancel | Call


class TokenStream:
    """The tokens of one submission, as its caller takes them. Any thread may; each delta is taken
    once.
    """

    def __init__(self, door: EngineDoor, request_id: int, num_choices: int) -> None:
        self._door = door
        self.request_id = request_id
        self._deltas: deque[TokenDelta] = deque()
        self._num_open = num_choices
        # An event loop that waits for deltas, and what wakes its waiter.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived: asyncio.Event | None = None

    def take(self, timeout: float | None = None) -> list[TokenDelta]:
        """Waits for deltas and returns those that have come; an empty list where all choices have
        ended and nothing is left. Raises WorkerTimeout where none come within `timeout` seconds.
        """
        return self._door.take(self, timeout)

    def __iter__(self) -> Iterator[TokenDelta]:
        while deltas := self.take():
            yield from deltas

    async def atake(self) -> list[TokenDelta]:
        """As `take`, for one event loop."""
        return await self._door.atake(self)

    def cancel(self, choice: int | None = None) -> None:
        """Ends the request, or one choice of it, within one step. Where it has ended already,
        nothing happens.
        """
        self._door.send(Cancel(self.request_id, choice))

    # Only the door calls these, with its lock.
    def put(self, delta: TokenDelta) -> None:
        """Adds a delta."""
        self._deltas.append(delta)
        if delta.finish_reason is not None:
            self._num_open -= 1

    def drain(self) -> list[TokenDelta] | None:
        """Returns what has come, None where the caller has to wait for more."""
        if self._deltas:
            found = list(self._deltas)
            self._deltas.clear()
            return found
        return [] if self._num_open == 0 else None


class EngineDoor:
    """The commands that wait for the engine thread, and the streams that callers wait at."""

    def __init__(self, max_queue: int, lock: Any = None) -> None:
        # Tests count how often the engine thread takes it.
        self._changed = threading.Condition(lock)
        self._max_queue = max_queue
        self._commands: deque[Command] = deque()
        self._num_submitted = 0
        self._num_waiting = 0
        self._seconds_per_request = 0.0
        self._closed: DflashError | None = None
        self._is_alive: Callable[[], bool] = lambda: True

    def watch(self, is_alive: Callable[[], bool]) -> None:
        """Sets what tells waiting callers that the engine thread still runs."""
        self._is_alive = is_alive

    # -- callers -------------------------------------------------------------------------------
    def send(self, command: Command) -> None:
        """Hands over a command. Raises QueueFull for requests beyond max_queue, and the error that
        closed the engine; a Cancel is then too late and forgotten.
        """
        with self._changed:
            if self._closed is not None:
                if isinstance(command, Cancel):
                    return
                raise self._closed.reworded(str(self._closed))
            if isinstance(command, Submit):
                self._refuse_more(len(command.requests))
                self._num_submitted += len(command.requests)
            self._commands.append(command)
            self._changed.notify_all()

    def _refuse_more(self, count: int) -> None:
        waiting = self._num_waiting + self._num_submitted
        if waiting + count > self._max_queue:
            retry_after_s = max(1.0, waiting * self._seconds_per_request)
            raise QueueFull(
                f"{waiting} requests wait and at most {self._max_queue} may (engine.max_queue); {count} more were refused; try "
                f"again in {retry_after_s:.0f} s",
                retry_after_s=retry_after_s,
            )

    def take(self, stream: TokenStream, timeout: float | None) -> list[TokenDelta]:
        """As `TokenStream.take`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while (found := stream.drain()) is None:
                left = LOOK_S if deadline is None else min(LOOK_S, deadline - time.monotonic())
                if left <= 0:
                    raise WorkerTimeout(f"request {stream.request_id}: no token within {timeout:g} s; it goes on")
                self._changed.wait(left)
                if not self._is_alive() and stream.drain() is None:
                    raise EngineError(f"request {stream.request_id}: the engine thread has ended without an answer")
        return found

    async def atake(self, stream: TokenStream) -> list[TokenDelta]:
        """As `TokenStream.atake`."""
        with self._changed:
            if stream._arrived is None:
                stream._loop, stream._arrived = asyncio.get_running_loop(), asyncio.Event()
        arrived = stream._arrived
        while True:
            arrived.clear()
            with self._changed:
                found = stream.drain()
            if found is not None:
                return found
            try:
                await asyncio.wait_for(arrived.wait(), LOOK_S)
            except TimeoutError:
                if not self._is_alive():
                    raise EngineError(f"request {stream.request_id}: the engine thread has ended without an answer") from None

    # -- the engine thread -----------------------------------------------------------------------
    def exchange(
        self, deltas: list[tuple[TokenStream, TokenDelta]], *, num_waiting: int, seconds_per_request: float, wait: bool
    ) -> list[Command]:
        """Hands deltas to their streams and returns the commands that have come; where `wait` is
        set it waits for one. The lock is taken once.
        """
        with self._changed:
            self._num_waiting, self._seconds_per_request = num_waiting, seconds_per_request
            self._put(deltas)
            if wait:
                self._changed.wait_for(lambda: self._commands or self._closed, IDLE_S)
            commands = list(self._commands)
            self._commands.clear()
            self._num_submitted = 0
            self._num_waiting += sum(len(command.requests) for command in commands if isinstance(command, Submit))
        return commands

    def deliver(self, deltas: list[tuple[TokenStream, TokenDelta]]) -> None:
        """Hands deltas to their streams."""
        with self._changed:
            self._put(deltas)

    def _put(self, deltas: list[tuple[TokenStream, TokenDelta]]) -> None:
        if deltas:
            for stream, delta in deltas:
                stream.put(delta)
            self._changed.notify_all()
            _wake_loops({stream for stream, _ in deltas if stream._loop is not None})

    def close(self, error: DflashError) -> list[Command]:
        """Refuses everything from now on with this error, and returns the commands that nobody
        took.
        """
        with self._changed:
            self._closed = self._closed or error
            left = list(self._commands)
            self._commands.clear()
            self._changed.notify_all()
        return left

    @property
    def is_closed(self) -> bool:
        """Whether everything is refused."""
        return self._closed is not None


def _wake_loops(streams: set[TokenStream]) -> None:
    """Wakes event loops, each once, for the streams that they wait at."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
    for stream in streams:
        if stream._loop is not None and stream._arrived is not None:
            by_loop.setdefault(stream._loop, []).append(stream._arrived)
    for loop, events in by_loop.items():
        try:
            loop.call_soon_threadsafe(_set_all, events)
        except RuntimeError:
            # The loop was closed; nobody waits at its streams any more.
            continue


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
