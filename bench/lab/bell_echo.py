"""Answers a card in `doorbell`, from a thread of this process or from a process of its own.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import select
import signal
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dflash_moe import _measure

# An echo outlives the patience of its card, so that the report of the card itself stands.
GRACE_S = 1.0
# This is far beyond the limit of an echo itself; it ends the wait for one that is stuck.
JOIN_S = 60.0


class EchoThread:
    """Answers `rounds` numbers from the one that `begin` names."""

    def __init__(self, memory: _measure.BellMemory, *, rounds: int, timeout_s: float) -> None:
        self._memory, self._rounds, self._timeout_s = memory, rounds, timeout_s
        self._seen: list[int] = []
        self._thread: threading.Thread | None = None

    def begin(self, first: int) -> None:
        """Returns at once."""
        self._thread = threading.Thread(target=self._answer, args=(first,), name="bell-echo", daemon=True)
        self._thread.start()

    def _answer(self, first: int) -> None:
        self._seen = self._memory.answer(first=first, rounds=self._rounds, timeout_s=self._timeout_s + GRACE_S)

    def seen(self) -> list[int]:
        """Returns when each number was seen, in nanoseconds, once all are answered or the time is
        over.
        """
        if self._thread is not None:
            self._thread.join(JOIN_S)
        return self._seen


class EchoProcess:
    """Answers from a forked child, which asks for nothing until `begin`."""

    def __init__(self, pid: int, orders: int, answers: int) -> None:
        """`forked` makes it."""
        self.pid = pid
        self._orders, self._answers = orders, answers

    @classmethod
    @contextmanager
    def forked(cls, memory: _measure.BellMemory, *, rounds: int, timeout_s: float) -> Iterator[EchoProcess]:
        """Forks the child, for segments only and before a driver is opened in this process. Leaving
        the block kills it.
        """
        (read_order, write_order), (read_answer, write_answer) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(write_order)
                os.close(read_answer)
                _serve(memory, read_order, write_answer, rounds, timeout_s)
                status = 0
            finally:
                os._exit(status)
        os.close(read_order)
        os.close(write_answer)
        try:
            yield cls(pid, write_order, read_answer)
        finally:
            os.close(write_order)
            os.close(read_answer)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def begin(self, first: int) -> None:
        """Returns at once, and the child may take a moment to begin."""
        os.write(self._orders, struct.pack("<I", first))

    def seen(self) -> list[int]:
        """Returns what `EchoThread.seen` returns, or what has come by then of a child that is
        stuck.
        """
        found, deadline = b"", time.monotonic() + JOIN_S
        while select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
            part = os.read(self._answers, 1 << 16)
            if not part:
                break
            found += part
        return list(struct.unpack_from(f"<{len(found) // 8}q", found))


def _serve(memory: _measure.BellMemory, orders: int, answers: int, rounds: int, timeout_s: float) -> None:
    """Runs in the child: it answers one ping-pong, and then writes the times to the pipe, which
    ends with the process.
    """
    order = os.read(orders, 4)
    if len(order) < 4:
        # The parent has left.
        return
    seen = memory.answer(first=struct.unpack("<I", order)[0], rounds=rounds, timeout_s=timeout_s + GRACE_S)
    with suppress(BrokenPipeError), os.fdopen(answers, "wb") as out:
        out.write(struct.pack(f"<{len(seen)}q", *seen))
