"""The two threads that parse, tokenise and render what is too large for the event loop, and who
waits for them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from dflash_moe.server.front.api_error import ApiError

# The niceness of the threads. The engine's thread and this process's event loop have 0, and so get
# a processor first wherever there is only one.
NICENESS = 10
# What may wait: so many jobs, and characters, bytes or ids of all of them, which the threads take
# about half a minute for.
MAX_WAITING = 1000
MAX_WAITING_SIZE = 64 << 20
# A thread does no larger job, and first the smallest, so that whoever asks with little waits for
# little; it takes some 50 ms.
SMALL_SIZE = 64 << 10
# Characters that a thread tokenises in a second, for the time after which to try again.
_SIZE_PER_S = 1e6

T = TypeVar("T")


class _Job(Generic[T]):
    """Work of a size that is to be done, and the future of what comes of it."""

    def __init__(self, size: int, function: Callable[[], T], done: asyncio.Future[T]) -> None:
        self.size = size
        self.function = function
        self.done = done


class TextThreads:
    """Two threads, which end with the process. One takes the jobs as they come, and so each one in
    the end; the other takes small ones alone. One event loop uses it.
    """

    def __init__(self, max_waiting: int = MAX_WAITING, max_waiting_size: int = MAX_WAITING_SIZE) -> None:
        self._max_waiting = max_waiting
        self._max_waiting_size = max_waiting_size
        # In the order in which they came.
        self._waiting: list[_Job[Any]] = []
        self._size = 0
        # Each thread with the size of the largest job that it takes, while it has none.
        self._idle = [
            (ThreadPoolExecutor(1, thread_name_prefix="text-small", initializer=_give_way), SMALL_SIZE),
            (ThreadPoolExecutor(1, thread_name_prefix="text", initializer=_give_way), None),
        ]

    async def run(self, size: int, function: Callable[[], T]) -> T:
        """Returns what a function returns, for which work of this size is done. Raises ApiError
        where too much waits already.
        """
        if len(self._waiting) >= self._max_waiting or (self._waiting and self._size + size > self._max_waiting_size):
            text = f"{len(self._waiting)} texts with {self._size} characters wait to be read, and no more may; try again"
            raise ApiError(429, text, code="busy", retry_after_s=1.0 + self._size / _SIZE_PER_S)
        job = _Job(size, function, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._size += size
        self._start()
        try:
            found: T = await job.done
            return found
        finally:
            # Whoever was cancelled waits for nothing any more.
            if job in self._waiting:
                self._leave(job)

    def _leave(self, job: _Job[Any]) -> None:
        self._waiting.remove(job)
        self._size -= job.size

    def _start(self) -> None:
        for thread in list(self._idle):
            pool, largest = thread
            fitting = self._waiting if largest is None else [job for job in self._waiting if job.size <= largest]
            if not fitting:
                continue
            job = fitting[0] if largest is None else min(fitting, key=lambda one: one.size)
            self._leave(job)
            self._idle.remove(thread)
            computing = asyncio.get_running_loop().run_in_executor(pool, job.function)
            computing.add_done_callback(lambda done, job=job, thread=thread: self._ended(done, job, thread))  # type: ignore[misc]

    def _ended(self, computed: asyncio.Future[Any], job: _Job[Any], thread: tuple[ThreadPoolExecutor, int | None]) -> None:
        # Small ones first, so that the thread that takes all is free for the others.
        self._idle = sorted([*self._idle, thread], key=lambda one: one[1] is None)
        error = computed.exception()
        if not job.done.done():
            if error is None:
                job.done.set_result(computed.result())
            else:
                job.done.set_exception(error)
        self._start()


def _give_way() -> None:
    # On Linux a thread has a niceness of its own.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
