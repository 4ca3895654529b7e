"""What happens to the holders of one runtime: whoever sees something puts it into one queue, and
one thread takes it out, that which keeps the workers (worker_keeper.py).

Who puts never waits and calls nobody, so that it may be done under any lock. The queue is made
before all who put into it.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_moe.holders.membership import Event, Happening
from dflash_moe.protocol.failures import system_failure

if TYPE_CHECKING:
    from dflash_moe.holders.holder import Holder

log = logging.getLogger(__name__)

# While so many events wait, further changes of weights are left out: two of a worker within a day
# take it out, and one that tells of them without end must not fill the memory. Other events come
# once for each attempt, order or verdict, and are never left out.
MAX_WAITING = 4096


@dataclass(frozen=True, slots=True)
class LifeEvent:
    """Something for the state machine of a holder."""

    holder: Holder
    event: Event


@dataclass(frozen=True, slots=True)
class WeightsDamaged:
    """A shard's weights changed in a holder's memory, in this attempt. `failure` says why they
    could not be loaded again, and is empty where they were.
    """

    holder: Holder
    attempt: int
    layer: int
    shard: int
    failure: str


@dataclass(frozen=True, slots=True)
class PathLate:
    """A worker has not got a fresh path after the time in which one that computes would be
    suspected.
    """

    holder: Holder


@dataclass(frozen=True, slots=True)
class StandInsChanged:
    """Stand-ins of the host have been made, or could not be."""


# What is nothing for a state machine.
Notice = WeightsDamaged | PathLate | StandInsChanged


class Bell:
    """A descriptor that becomes readable when it is rung. It is there from `open`, which whoever
    waits for it calls, to `close`; in between, any thread may ring, also one that is within a ring
    and collects a runtime which nobody closed.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._fd = -1

    def open(self, of: str) -> None:
        """Makes the descriptor. Raises DflashError naming `of`, who waits for it, where this
        process has none left.
        """
        try:
            self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise system_failure(f"the bell of {of} could not be made", error) from None

    def fileno(self) -> int:
        """Returns the descriptor, -1 where it is not open."""
        return self._fd

    def ring(self) -> None:
        """Wakes who waits, now or the next time; never raises, and does nothing where it is not
        open.
        """
        with self._lock, suppress(OSError):
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def hush(self) -> None:
        """Makes it silent until it is rung again; never raises."""
        with self._lock, suppress(OSError):
            if self._fd >= 0:
                os.eventfd_read(self._fd)

    def close(self) -> None:
        """Closes the descriptor; it may be closed already."""
        with self._lock:
            descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            os.close(descriptor)


class HolderEvents:
    """The queue. Any thread may put; one takes."""

    def __init__(self) -> None:
        self.bell = Bell()
        self._waiting: deque[LifeEvent | Notice] = deque()

    def happen(
        self, holder: Holder, what: Happening, reason: str = "", *, attempt: int | None = None, is_death: bool = True,
        is_last: bool = False,
    ) -> None:  # fmt: skip
        """Says what happened to a holder, in its latest attempt where `attempt` names no other."""
        number = holder.life.attempt if attempt is None else attempt
        self._put(LifeEvent(holder, Event(what, number, reason, is_death, is_last)))

    def damage(self, holder: Holder, layer: int, shard: int, failure: str) -> None:
        """Says that weights changed in a holder's memory (WeightsDamaged)."""
        if len(self._waiting) < MAX_WAITING:
            self._put(WeightsDamaged(holder, holder.life.attempt, layer, shard, failure))
        else:
            log.debug("worker %s tells of more changed weights than are looked at", holder.name)

    def note(self, notice: Notice) -> None:
        """Says something that is nothing for a state machine."""
        self._put(notice)

    def take(self) -> Iterator[LifeEvent | Notice]:
        """Takes what waits, and not what comes meanwhile. One thread calls."""
        for _ in range(len(self._waiting)):
            yield self._waiting.popleft()

    def _put(self, happened: LifeEvent | Notice) -> None:
        self._waiting.append(happened)
        self.bell.ring()
