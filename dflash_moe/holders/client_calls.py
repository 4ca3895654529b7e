"""The calls of a runtime as the keeper of its workers sees them: what the client knows of losses,
and how it hears that a worker is gone or back.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from dflash_moe.errors import DflashError
from dflash_moe.holders.membership import State
from dflash_moe.holders.notices import WorkerNotices

if TYPE_CHECKING:
    from dflash_moe import _core
    from dflash_moe.holders.holder import Holder
    from dflash_moe.holders.host_fallback import HostFallback
    from dflash_moe.holders.path_keeper import PathKeeper


log = logging.getLogger(__name__)


class ClientCalls:
    """What worker_keeper.Calls asks for, of a client in this process."""

    def __init__(self, client: _core.Client, paths: PathKeeper, fallback: HostFallback) -> None:
        self._client = client
        self._paths = paths
        # Called with the number of a worker that drains and has nothing in flight any more.
        self.on_idle: Callable[[int], None] = lambda _index: None
        self._notices = WorkerNotices()
        self._fallback = fallback
        fallback.on_change = self._tell_all
        # Guards that of two threads which tell the client of one worker the later one is right.
        self._lock = threading.Lock()
        # What is told of each worker: whether it serves or is being brought back, and whether it
        # drains.
        self._lives: dict[str, tuple[Holder, bool, bool]] = {}

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

    def losses(self) -> list[tuple[str, str]]:
        """Returns the workers that the client has lost, with the reason."""
        try:
            # Taking the events empties their descriptor. What holds in the end, the reports say.
            events = self._client.take_events()
            reports = self._client.workers()
            for event in events:
                log.debug("worker %d: %s %s", event["worker"], event["kind"], event["reason"])
                if event["kind"] == "idle":
                    self.on_idle(event["worker"])
                elif event["kind"] == "suspect":
                    self._fallback.miss(reports[event["worker"]]["name"])
            return [(report["name"], report["reason"]) for report in reports if report["state"] == "lost"]
        except DflashError:  # the runtime was closed meanwhile
            return []

    def tell(self, member: Holder) -> None:
        """Says whether calls that need the worker shall wait for it, and whether it gets those that
        others can have.
        """
        with self._lock:
            self._notices.tell(member)
            self._lives[member.name] = member, member.life.is_coming, member.life.state is State.DRAINING
            self._tell(*self._lives[member.name])

    def _tell_all(self) -> None:
        with self._lock:
            for told in self._lives.values():
                self._tell(*told)

    def _tell(self, member: Holder, is_coming: bool, is_draining: bool) -> None:
        with suppress(DflashError):  # the runtime was closed meanwhile
            self._client.set_remedy(member.client_index, is_coming or self._fallback.is_coming(member.name))
            self._client.set_stand_in(member.client_index, self._fallback.may_stand_in(member.name))
            self._client.set_draining(member.client_index, is_draining)

    def descriptor(self) -> int:
        """Returns the descriptor of the client's events."""
        return self._client.event_fd()
