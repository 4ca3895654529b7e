"""Between callers and the engine thread: commands go in, tokens come out. There is one lock, which
the engine thread takes once a step, however many requests there are.

Ctrl-C raises in a caller between any two of its steps, and must not leave the lock held: it is the
interpreter's own lock, taken by `with` and never given up to wait. Whoever waits has a bell of its
own. (`threading.Condition` is Python code, in which an interrupt loses the lock.)
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from dflash_moe.engine.request import TokenDelta
from dflash_moe.errors import DflashError, EngineError, QueueFull, WorkerTimeout

log = logging.getLogger(__name__)

# A waiting caller looks this often whether the engine thread is alive.
LOOK_S = 1.0
# An idle engine looks this often whether it has commands, whoever may have failed to wake it.
IDLE_S = 60.0


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
class BetweenSteps:
    """Something that the engine thread does between two steps."""

    function: Callable[[], None]


Command = Submit | Cancel | BetweenSteps


class Bell:
    """Wakes the one thread that waits at it. It stays rung until then.

    It is a lock whose release is the ring: `queue.SimpleQueue.get` of Python 3.11 waits for ever
    where its limit passes before it begins to wait.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire(blocking=False)

    def ring(self) -> None:
        """Lets the present or the next `wait` return. Several rings are as one."""
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def wait(self, timeout: float) -> bool:
        """Returns whether it was rung within `timeout` seconds."""
        return self._lock.acquire(timeout=timeout)


class TokenStream:
    """The tokens of one submission, as its caller takes them. Any thread may; each delta is taken
    once.
    """

    def __init__(self, door: EngineDoor, request_id: int, num_choices: int) -> None:
        self._door = door
        self.request_id = request_id
        self._deltas: deque[TokenDelta] = deque()
        self._num_open = num_choices
        # What wakes those who wait now: threads, tasks with their event loops, and the thread that
        # waits for this stream among others.
        self.bells: set[Bell] = set()
        self.arrivals: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}
        self.group: StreamGroup | None = None

    def take(self, timeout: float | None = None) -> list[TokenDelta]:
        """Waits for deltas and returns those that have come; an empty list where all choices have
        ended and nothing is left. Raises WorkerTimeout where none come within `timeout` seconds.
        """
        return self._door.take(self, timeout)

    def __iter__(self) -> Iterator[TokenDelta]:
        while deltas := self.take():
            yield from deltas

    async def atake(self) -> list[TokenDelta]:
        """As `take` without a limit, for tasks of event loops."""
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
        if self.group is not None:
            self.group.arrived[self] = None
        if delta.finish_reason is not None:
            self._num_open -= 1

    def drain(self) -> list[TokenDelta] | None:
        """Returns what has come, None where the caller has to wait for more."""
        if self._deltas:
            found = list(self._deltas)
            self._deltas.clear()
            return found
        return [] if self._num_open == 0 else None


class StreamGroup:
    """Streams of one engine for which one thread waits together. What it costs to wait depends on
    how many have got something, not on how many there are.
    """

    def __init__(self) -> None:
        self.bell = Bell()
        # Streams with deltas that were not taken; the door's lock guards it.
        self.arrived: dict[TokenStream, None] = {}
        self._door: EngineDoor | None = None

    def add(self, stream: TokenStream) -> None:
        """Has the streams wait together with this one, from which nothing was taken yet."""
        self._door = stream._door
        self._door.join(self, stream)

    def take(self) -> list[tuple[TokenStream, list[TokenDelta]]]:
        """Waits until some stream has deltas and returns all that have come; an empty list where
        the engine thread has ended and none will come. There must be a stream that has not ended.
        """
        assert self._door is not None
        return self._door.take_group(self)


class Outbox:
    """Where the tokens of all requests of one client go, however many there are. It costs a step
    one call, where streams cost one waiter for each request.
    """

    def __init__(self, deliver: Callable[[list[tuple[int, TokenDelta]]], None]) -> None:
        """The engine thread calls `deliver` at most once a step, with all deltas of the step that
        belong here, each with the id of its request. No lock is held then, and all requests wait
        meanwhile: it must not block, and does no more than put them into a queue and ring. Deltas
        of a request may come before `Engine.submit` has returned its id.

        What it raises is logged and ends the requests of this outbox, of which nobody hears any
        more; others go on.
        """
        self._deliver = deliver
        self._deltas: list[tuple[int, TokenDelta]] = []
        # Whether `deliver` has raised. Read by any thread, set by the engine's.
        self.has_failed = False

    # Only the engine thread calls these.
    def put(self, request_id: int, delta: TokenDelta) -> None:
        """Adds a delta to those of this step."""
        self._deltas.append((request_id, delta))

    def send(self) -> bool:
        """Delivers what was put. Returns False where that fails, once and for all."""
        deltas, self._deltas = self._deltas, []
        if self.has_failed:
            return False
        try:
            self._deliver(deltas)
        except BaseException:  # noqa: BLE001 - whatever a client's code raises, the engine goes on
            log.exception("an outbox has failed, and its requests end with it")
            self.has_failed = True
        return not self.has_failed


class EngineDoor:
    """The commands that wait for the engine thread, and the streams that callers wait at."""

    def __init__(self, max_queue: int, lock: Any = None) -> None:
        # Tests count how often the engine thread takes it.
        self._lock = lock or threading.Lock()
        self._max_queue = max_queue
        self._commands: deque[Command] = deque()
        self._num_submitted = 0
        self._num_waiting = 0
        self._seconds_per_request = 0.0
        self._closed: DflashError | None = None
        # Why requests are refused and nothing else is.
        self._draining: DflashError | None = None
        self._is_asleep = False
        self._bell = Bell()
        self._is_alive: Callable[[], bool] = lambda: True

    def watch(self, is_alive: Callable[[], bool]) -> None:
        """Sets what tells waiting callers that the engine thread still runs."""
        self._is_alive = is_alive

    # -- callers -------------------------------------------------------------------------------
    def send(self, command: Command) -> None:
        """Hands over a command. Raises QueueFull for requests beyond max_queue, and the error that
        closed the engine; a Cancel is then too late and forgotten.
        """
        with self._lock:
            if self._closed is not None:
                if isinstance(command, Cancel):
                    return
                raise self._closed.reworded(str(self._closed))
            if isinstance(command, Submit):
                if self._draining is not None:
                    raise self._draining.reworded(str(self._draining))
                self._refuse_more(len(command.requests))
            self._wake()
            self._commands.append(command)
            if isinstance(command, Submit):
                self._num_submitted += len(command.requests)

    def _wake(self) -> None:
        # Before the change that it is for, so that an interrupt between the two wakes in vain and
        # never leaves a command with a thread that sleeps. The lock is held meanwhile.
        if self._is_asleep:
            self._bell.ring()
            self._is_asleep = False

    def _refuse_more(self, count: int) -> None:
        waiting = self._num_waiting + self._num_submitted
        if waiting + count > self._max_queue:
            retry_after_s = max(1.0, waiting * self._seconds_per_request)
            raise QueueFull(
                f"{waiting} requests wait and at most {self._max_queue} may (engine.max_queue); {count} more were refused; try "
                f"again in {retry_after_s:.0f} s",
                retry_after_s=retry_after_s,
            )

    def drain(self, error: DflashError) -> None:
        """Refuses requests from now on with this error, and takes all other commands."""
        with self._lock:
            self._draining = self._draining or error

    def refusal(self) -> str:
        """Returns why no request is taken, empty where they are."""
        return str(self._closed or self._draining or "")

    def take(self, stream: TokenStream, timeout: float | None) -> list[TokenDelta]:
        """As `TokenStream.take`."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        bell = Bell()
        while True:
            # Asked before the stream is: what a thread that has ended left behind is there then.
            is_alive = self._is_alive()
            left = min(LOOK_S, deadline - time.monotonic())
            with self._lock:
                found = stream.drain()
                if found is None and is_alive and left > 0:
                    stream.bells.add(bell)
                else:
                    stream.bells.discard(bell)
            if found is not None:
                return found
            if not is_alive:
                raise _without_answer(stream)
            if left <= 0:
                raise WorkerTimeout(f"request {stream.request_id}: no token within {timeout:g} s; it goes on")
            bell.wait(left)

    async def atake(self, stream: TokenStream) -> list[TokenDelta]:
        """As `TokenStream.atake`."""
        loop = asyncio.get_running_loop()
        while True:
            arrived: asyncio.Future[None] = loop.create_future()
            is_alive = self._is_alive()
            with self._lock:
                found = stream.drain()
                if found is None and is_alive:
                    stream.arrivals[arrived] = loop
            if found is not None:
                return found
            if not is_alive:
                raise _without_answer(stream)
            # Not `asyncio.wait_for`: before Python 3.12 a cancellation that came together with the
            # result was lost in it, and its error is another class than TimeoutError in 3.10.
            look = loop.call_later(LOOK_S, _set_all, (arrived,))
            try:
                await arrived
            finally:
                look.cancel()
                with self._lock:
                    stream.arrivals.pop(arrived, None)

    def join(self, group: StreamGroup, stream: TokenStream) -> None:
        """As `StreamGroup.add`."""
        with self._lock:
            stream.group = group
            if stream._deltas:
                group.arrived[stream] = None

    def take_group(self, group: StreamGroup) -> list[tuple[TokenStream, list[TokenDelta]]]:
        """As `StreamGroup.take`."""
        while True:
            # Asked before the streams are: what a thread that has ended left behind is there then.
            is_alive = self._is_alive()
            with self._lock:
                found = [(stream, deltas) for stream in group.arrived if (deltas := stream.drain())]
                group.arrived.clear()
            if found or not is_alive:
                return found
            group.bell.wait(LOOK_S)

    # -- the engine thread -----------------------------------------------------------------------
    def exchange(
        self,
        deltas: list[tuple[TokenStream, TokenDelta]],
        *,
        num_waiting: int,
        seconds_per_request: float,
        wait: bool,
    ) -> list[Command]:
        """Hands deltas to their streams and returns the commands that have come; where `wait` is
        set it waits for one. The lock is taken once.
        """
        with self._lock:
            self._num_waiting, self._seconds_per_request = num_waiting, seconds_per_request
            self._put(deltas)
            self._is_asleep = wait and not self._commands and self._closed is None
            if not self._is_asleep:
                return self._take_commands()
        self._bell.wait(IDLE_S)
        with self._lock:
            self._is_asleep = False
            return self._take_commands()

    def _take_commands(self) -> list[Command]:
        commands = list(self._commands)
        self._commands.clear()
        self._num_submitted = 0
        self._num_waiting += sum(len(command.requests) for command in commands if isinstance(command, Submit))
        return commands

    def _put(self, deltas: list[tuple[TokenStream, TokenDelta]]) -> None:
        for stream, delta in deltas:
            stream.put(delta)
        loops: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        for stream in {stream for stream, _ in deltas}:
            if stream.group is not None:
                stream.group.bell.ring()
            for bell in stream.bells:
                bell.ring()
            stream.bells.clear()
            for arrived, loop in stream.arrivals.items():
                loops.setdefault(loop, []).append(arrived)
            stream.arrivals.clear()
        _wake_loops(loops)

    def refuse(self, error: DflashError) -> None:
        """Refuses everything from now on with this error, if nothing else does. The engine thread
        still takes the commands that are there.
        """
        with self._lock:
            self._wake()
            self._closed = self._closed or error


def _without_answer(stream: TokenStream) -> EngineError:
    return EngineError(f"request {stream.request_id}: the engine thread has ended without an answer")


def _wake_loops(loops: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]]) -> None:
    """Sets futures in their event loops, each of which is woken once."""
    for loop, arrivals in loops.items():
        # A loop that was closed has nobody who waits any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_set_all, arrivals)


def _set_all(arrivals: Iterable[asyncio.Future[None]]) -> None:
    for arrived in arrivals:
        # Its time may have passed meanwhile, or its task been cancelled.
        if not arrived.done():
            arrived.set_result(None)
