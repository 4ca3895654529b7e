"""Runs two halves of a step at the same time: the first on the thread that calls, the second on a
thread that is kept for this. Both have ended when `run` returns or raises.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch

from dflash_moe import _core
from dflash_moe.errors import EngineError
from dflash_moe.forward.halves.half_turns import HalfStopped, HalfTurns

# What computes a half. It is told the turns of its step.
Half = Callable[[HalfTurns], torch.Tensor]


@dataclass(frozen=True, slots=True)
class HalvesDone:
    """What two halves computed, the seconds in which one of them awaited its experts, and those of
    them in which the other one computed.
    """

    first: torch.Tensor
    second: torch.Tensor
    awaited_s: float
    hidden_s: float


# Seconds within which an idle second thread ends. Whoever drops the halves waits no longer.
END_S = 10.0


class TwoHalves:
    """One thread calls it at a time. `close` ends the second thread, as do dropping the object and
    the end of the interpreter. Each waits until the thread has freed its tensors, because freeing
    one while the interpreter ends aborts the process.
    """

    def __init__(self, limit_s: Callable[[], float]) -> None:
        """`limit_s` gives the seconds after which every expert call has ended."""
        self._limit_s = limit_s
        self._second = _SecondThread()
        # The thread must not keep this object alive.
        self._finalizer = weakref.finalize(self, self._second.end, END_S)
        self._is_stuck = False

    def run(self, first: Half, second: Half) -> HalvesDone:
        """Computes both halves. Where one raises, the other is stopped and awaited, and the error
        is raised. Raises EngineError where a half does not end within the limit; nothing can be
        computed after that, because its thread may still write.
        """
        if self._is_stuck:
            raise EngineError("a half of an earlier step has not ended, and may still write; open the model again")
        limit_s = self._limit_s()
        turns = HalfTurns(limit_s)
        numbers = turns.draw(), turns.draw()
        other = self._second.begin(lambda: _compute(second, turns, numbers[1]))
        try:
            found = _compute(first, turns, numbers[0])
            # Longer than any wait of the other half that began before, which says better what was
            # missing.
            wait((other,), 2 * limit_s)
        except BaseException as error:
            self._stop(turns, other, limit_s)
            if isinstance(error, HalfStopped) and (cause := other.exception(0)) is not None:
                raise cause from None
            raise
        if not other.done():
            self._stop(turns, other, limit_s)
        return HalvesDone(found, other.result(0), turns.awaited_s, turns.hidden_s)

    def close(self) -> None:
        """Ends the second thread, which is awaited for the limit."""
        self._second.end(self._limit_s())

    def _stop(self, turns: HalfTurns, other: Future[torch.Tensor], limit_s: float) -> None:
        """Stops the second half and returns once it has ended."""
        turns.stop()
        try:
            wait((other,), limit_s)
        finally:
            self._is_stuck = not other.done()
        if self._is_stuck:
            raise EngineError(f"the second half of a step had not ended {limit_s:g} s after it was stopped")


def _compute(half: Half, turns: HalfTurns, number: int) -> torch.Tensor:
    try:
        turns.begin(number)
        with torch.inference_mode():
            found = half(turns)
        turns.end()
        return found
    except BaseException:
        turns.stop()
        raise


_Job = tuple[Callable[[], Any], "Future[Any]"]


class _SecondThread:
    """Computes what it is given. The thread begins with the first job, and again with the first one
    after its end.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, compute: Callable[[], torch.Tensor]) -> Future[torch.Tensor]:
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="dflash-moe-half", daemon=True)
            self._thread.start()
        future: Future[torch.Tensor] = Future()
        self._jobs.put((compute, future))
        return future

    def end(self, limit_s: float) -> None:
        """Ends the thread, and returns once it has freed what was its own, or after the limit."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._jobs.put(None)
        # The collector of cycles may call this on the thread itself.
        if thread is not threading.current_thread():
            thread.join(limit_s)


def _serve(jobs: queue.SimpleQueue[_Job | None]) -> None:
    _core.set_canonical_float_mode()
    while (job := jobs.get()) is not None:
        compute, future = job
        try:
            future.set_result(compute())
        except BaseException as error:  # noqa: BLE001 - whoever waits raises it
            future.set_exception(error)
        # Nothing of a step is kept until the next one.
        del job, compute, future
