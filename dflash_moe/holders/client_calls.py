"""The calls of a runtime as the keeper of its workers sees them: what the client knows of losses,
and how it hears that a worker is gone or back.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from dflash_moe.errors import DflashError
from dflash_moe.holders.events import Notice, PathLate, StandInsChanged, WeightsDamaged
from dflash_moe.holders.membership import Happening, State
from dflash_moe.holders.notices import WorkerNotices

if TYPE_CHECKING:
    from dflash_moe import _core
    from dflash_moe.holders.fleet import Fleet
    from dflash_moe.holders.holder import Holder
    from dflash_moe.holders.host_fallback import HostFallback
    from dflash_moe.holders.path_keeper import PathKeeper
    from dflash_moe.holders.row_audit import Audit


log = logging.getLogger(__name__)


class ClientCalls:
    """What worker_keeper.Calls asks for, of a client in this process."""

    def __init__(self, client: _core.Client, fleet: Fleet, paths: PathKeeper, fallback: HostFallback, audit: Audit) -> None:
        self._client = client
        self._fleet = fleet
        self._paths = paths
        self._fallback = fallback
        self._audit = audit
        self._notices = WorkerNotices()
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
                for member in self._fleet.members.values():
                    if member.session is not None:
                        self._tell(member)

    def tell(self, member: Holder) -> None:
        """Says whether calls that need the worker shall wait for it, and whether it gets those that
        others can have.
        """
        with self._lock:
            self._notices.tell(member)
            self._tell(member)

    def _tell(self, member: Holder) -> None:
        name, index, life = member.name, member.client_index, member.life
        with suppress(DflashError):  # the runtime was closed meanwhile
            self._client.set_remedy(index, life.is_coming or self._fallback.is_coming(name))
            self._client.set_stand_in(index, self._fallback.may_stand_in(name))
            self._client.set_draining(index, life.state is State.DRAINING)

    def descriptor(self) -> int:
        """Returns the descriptor of the client's events."""
        return self._client.event_fd()
