"""The calls of a runtime as the keeper of its workers sees them: what the client knows of losses,
and how it hears that a worker is gone or back. People hear of that too: once for each coming and
going, with the worker's name and the way to it, from one logger that whoever has a terminal shows.

A loss is a warning, and so is the return after it, since who has heard of the one waits for the
other. What somebody wanted is none: a worker that was told to stop, or was let go. Attempts to
reach a lost worker are not told; `runtime.workers()` has them.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from dflash_moe.errors import DflashError
from dflash_moe.holders.events import Notice, PathLate, StandInsChanged, WeightsDamaged
from dflash_moe.holders.holder import TOLD_TO_STOP
from dflash_moe.holders.membership import Happening, State

if TYPE_CHECKING:
    from dflash_moe import _core
    from dflash_moe.holders.fleet import Fleet
    from dflash_moe.holders.holder import Holder
    from dflash_moe.holders.host_fallback import HostFallback
    from dflash_moe.holders.path_keeper import PathKeeper
    from dflash_moe.holders.row_audit import Audit

log = logging.getLogger(__name__)
# The name is what command lines and programs attach a handler to.
log_notices = logging.getLogger("dflash_moe.notices")


class ClientCalls:
    """What worker_keeper.Calls asks for, of a client in this process."""

    def __init__(self, client: _core.Client, fleet: Fleet, paths: PathKeeper, fallback: HostFallback, audit: Audit) -> None:
        self._client = client
        self._fleet = fleet
        self._paths = paths
        self._fallback = fallback
        self._audit = audit
        # Guards that of two threads which tell the client of one worker the later one is right: one
        # that adds a worker tells of it while the keeper's does.
        self._lock = threading.Lock()

    def lose(self, member: Holder, reason: str) -> None:
        """Ends the calls that need a worker which is gone, or has them wait for it."""
        with suppress(DflashError):  # the runtime was closed meanwhile
            self._fallback.miss(member.name)
        self._client.mark_lost(member.client_index, reason)

    def join(self, member: Holder) -> None:
        """Gives a worker that has loaded its shards a path. Errors are those of
        `PathKeeper.revive`.
        """
        self._paths.revive(member)

    def news(self) -> list[tuple[str, Happening, str]]:
        """Returns the workers that drain and have nothing in flight any more, and those that the
        client has lost, with the reason.
        """
        try:
            # Taking the events empties their descriptor. What holds in the end, the reports say.
            events = self._client.take_events()
            reports = self._client.workers()
            found = []
            for event in events:
                name = reports[event["worker"]]["name"]
                log.debug("worker %s: %s %s", name, event["kind"], event["reason"])
                if event["kind"] == "idle":
                    found.append((name, Happening.DRAINED, ""))
                elif event["kind"] == "suspect":
                    self._fallback.miss(name)
            return found + [(one["name"], Happening.LOST, one["reason"]) for one in reports if one["state"] == "lost"]
        except DflashError:  # the runtime was closed meanwhile
            return []

    def note(self, notice: Notice) -> None:
        """Does what an event asks for that is nothing for a state machine."""
        if isinstance(notice, WeightsDamaged):
            self._audit.note_damage(notice)
        elif isinstance(notice, PathLate):
            with suppress(DflashError):  # the runtime was closed meanwhile
                self._fallback.miss(notice.holder.name)
        elif isinstance(notice, StandInsChanged):
            with self._lock:
                self._tell([member for member in self._fleet.members.values() if member.life.state is not State.GONE])

    def tell(self, member: Holder) -> None:
        """Says whether calls that need the worker shall wait for it, and whether it gets those that
        others can have.
        """
        with self._lock:
            tell_people(member)
            self._tell([member])

    def _tell(self, members: Sequence[Holder]) -> None:
        coming, able = self._fallback.prospects()
        with suppress(DflashError):  # the runtime was closed meanwhile
            for member in members:
                index, life = member.client_index, member.life
                self._client.set_remedy(index, (life.is_coming and not member.has_left) or member.name in coming)
                self._client.set_stand_in(index, member.name in able)
                self._client.set_draining(index, life.state is State.DRAINING)

    def descriptor(self) -> int:
        """Returns the descriptor of the client's events."""
        return self._client.event_fd()


def tell_people(member: Holder) -> None:
    """Tells how a worker stands where that is news. One thread at a time calls."""
    name, life, gone = member.name, member.life, member.told_gone
    if life.state is State.READY:
        member.told_gone = 0
        if gone:
            log_notices.log(min(gone, logging.WARNING), "worker %s is back (%s)", name, member.way)
        elif gone is None and not member.address.is_started_by_host:
            where = "" if member.address.is_registered else f" at {member.address}"
            log_notices.info("worker %s%s is connected (%s)", name, where, member.way)
    elif life.state is State.LOST and gone == 0:
        is_wanted = life.reason == TOLD_TO_STOP
        again = "started again" if life.is_started_by_host else "dialled until it is back"
        again = "waited for until it registers again" if member.address.is_registered else again
        coming = f"; it is {again}" if life.is_coming else ""
        member.told_gone = logging.INFO if is_wanted else logging.WARNING
        going = "has left" if is_wanted else "is lost"
        log_notices.log(member.told_gone, "worker %s (%s) %s: %s%s", name, member.way, going, life.reason, coming)
    elif life.state is State.DRAINING and gone == 0:
        member.told_gone = logging.INFO
        log_notices.info("worker %s (%s) is let go, and finishes what it has", name, member.way)
    elif life.state is State.QUARANTINED:
        member.told_gone = logging.ERROR
        log_notices.error("worker %s is left alone: %s", name, life.reason)
    elif life.state is State.GONE and gone is not None:
        member.told_gone = None
        log_notices.info("worker %s is gone", name)
