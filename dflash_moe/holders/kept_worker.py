"""One worker as the keeper of workers sees it, and what it tells people about it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_moe.holders.membership import State

if TYPE_CHECKING:
    import threading

    from dflash_moe.holders.member import Member
    from dflash_moe.holders.membership import Member as Life


@dataclass(frozen=True, slots=True)
class WorkerState:
    """How one holder of experts stands: a state of membership.State, why it is not ready, for how
    many seconds it has been so, how often it died since the start, and of a waiting one in how many
    seconds it is tried again.
    """

    name: str
    state: str
    reason: str
    since_s: float
    deaths: int
    next_try_s: float | None


@dataclass(frozen=True, slots=True)
class Parting:
    """How a worker is let go that is removed, or ended to be started anew. The keeper calls `end`
    when it has drained, before its session ends, and `gone` once it is no member any more. A worker
    that was not ready has nothing to end.

    What is in flight after `drain_s` is asked of other holders, or fails where there are none.
    """

    drain_s: float
    end: Callable[[Member], None]
    gone: Callable[[Member], None]


class KeptWorker:
    """One worker of the keeper. Only the keeper's thread touches `errand`, `pidfd` and
    `drained_by`.
    """

    def __init__(self, member: Member, life: Life) -> None:
        self.member, self.life = member, life
        # What is under way for it, or was last.
        self.errand: threading.Thread | None = None
        # Readable once the process that the host started has ended; -1 where there is none.
        self.pidfd = -1
        # Set by who lets it go, before the keeper hears of that.
        self.parting: Parting | None = None
        # Of a draining one: it is ended then at the latest.
        self.drained_by = 0.0

    def open_pidfd(self) -> None:
        started = self.member.session.started if self.member.session is not None else None
        if self.pidfd < 0 and started is not None and started.process.poll() is None:
            # Without it, the control connection tells.
            with suppress(OSError, AttributeError):
                self.pidfd = os.pidfd_open(started.process.pid)

    def close_pidfd(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def next_look(self) -> float | None:
        """Returns when the worker has to be looked at again without an event: it waits for its next
        try, or its time to drain is over. None means never.
        """
        if self.life.state is State.WAITING:
            return self.life.next_try
        return self.drained_by if self.life.state is State.DRAINING and self.life.serves else None

    def stands(self, now: float) -> WorkerState:
        """Returns how it stands. The caller holds the lock that guards its life."""
        life = self.life
        until = max(0.0, life.next_try - now) if life.state is State.WAITING else None
        reason = "" if life.state in (State.READY, State.DRAINING) else life.reason
        return WorkerState(self.member.name, life.state.value, reason, now - life.since, life.num_deaths, until)
