"""The calls of a runtime as the keeper of its workers sees them: what the client knows of losses,
and how it hears that a worker is gone or back.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from dflash_moe.errors import DflashError
from dflash_moe.runtime.membership import State

if TYPE_CHECKING:
    from dflash_moe import _core
    from dflash_moe.runtime.fleet import Member
    from dflash_moe.runtime.membership import Member as Life
    from dflash_moe.runtime.path_keeper import PathKeeper


log = logging.getLogger(__name__)


class ClientCalls:
    """What worker_keeper.Calls asks for, of a client in this process."""

    def __init__(self, client: _core.Client, paths: PathKeeper) -> None:
        self._client = client
        self._paths = paths
        # Called with the number of a worker that drains and has nothing in flight any more.
        self.on_idle: Callable[[int], None] = lambda _index: None

    def lose(self, member: Member, reason: str) -> None:
        """Ends the calls that need a worker which is gone, or has them wait for it."""
        log.warning("worker %s is lost: %s", member.name, reason)
        self._client.mark_lost(member.client_index, reason)

    def join(self, member: Member) -> None:
        """Gives a worker that has loaded its shards a path. Errors are those of
        `PathKeeper.revive`.
        """
        self._paths.revive(member)

    def losses(self) -> list[tuple[str, str]]:
        """Returns the workers that the client has lost, with the reason."""
        try:
            # Taking the events empties their descriptor. What holds in the end, the reports say.
            for event in self._client.take_events():
                log.debug("worker %d: %s %s", event["worker"], event["kind"], event["reason"])
                if event["kind"] == "idle":
                    self.on_idle(event["worker"])
            return [(report["name"], report["reason"]) for report in self._client.workers() if report["state"] == "lost"]
        except DflashError:  # the runtime was closed meanwhile
            return []

    def tell(self, member: Member, life: Life) -> None:
        """Says whether calls that need the worker shall wait for it, and whether it gets those that
        others can have.
        """
        if life.state is State.QUARANTINED:
            log.error("worker %s is left alone: %s", member.name, life.reason)
        with suppress(DflashError):  # the runtime was closed meanwhile
            self._client.set_remedy(member.client_index, life.is_coming)
            self._client.set_draining(member.client_index, life.state is State.DRAINING)

    def descriptor(self) -> int:
        """Returns the descriptor of the client's events."""
        return self._client.event_fd()
