"""What people are told of workers that come and go: once for each coming and going, with the
worker's name and the way to it. It all goes to one logger, which whoever has a terminal shows.

A loss is a warning, and so is the return after it, since who has heard of the one waits for the
other. What somebody wanted is none: a worker that was told to stop, or was let go. Attempts to
reach a lost worker are not told; `runtime.workers()` has them.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dflash_moe.holders.membership import State

if TYPE_CHECKING:
    from dflash_moe.holders.holder import Holder

# The name is what command lines and programs attach a handler to.
log = logging.getLogger("dflash_moe.notices")

# Why a worker is not there any more that said so itself.
TOLD_TO_STOP = "it was told to stop"
_WAYS = {"shared": "shared memory", "unix": "a Unix socket", "loopback": "the host's own process"}


def way_of(member: Holder) -> str:
    """Says how a worker is reached, and over TCP whether that is encrypted."""
    if member.transport != "tcp" or member.session is None:
        return _WAYS.get(member.transport, member.transport)
    return f"TCP, {'encrypted' if member.session.is_encrypted else 'not encrypted'}"


class WorkerNotices:
    """Tells of the workers of one runtime. One thread at a time calls."""

    def __init__(self) -> None:
        # What was told last of each worker: the level of its going, or 0 where it is there.
        self._gone: dict[str, int] = {}

    def tell(self, member: Holder) -> None:
        """Tells how a worker stands where that is news."""
        name, life, state = member.name, member.life, member.life.state
        if state is State.READY:
            self._tell_there(member)
        elif state is State.LOST and not self._gone.get(name, logging.WARNING):
            is_wanted = life.reason == TOLD_TO_STOP
            again = "started again" if life.is_started_by_host else "dialled until it is back"
            coming = f"; it is {again}" if life.is_coming else ""
            self._gone[name] = logging.INFO if is_wanted else logging.WARNING
            going = "has left" if is_wanted else "is lost"
            log.log(self._gone[name], "worker %s (%s) %s: %s%s", name, way_of(member), going, life.reason, coming)
        elif state is State.DRAINING and not self._gone.get(name, logging.WARNING):
            self._gone[name] = logging.INFO
            log.info("worker %s (%s) is let go, and finishes what it has", name, way_of(member))
        elif state is State.QUARANTINED:
            self._gone[name] = logging.ERROR
            log.error("worker %s is left alone: %s", name, life.reason)
        elif state is State.GONE and self._gone.pop(name, None) is not None:
            log.info("worker %s is gone", name)

    def _tell_there(self, member: Holder) -> None:
        gone = self._gone.get(member.name)
        self._gone[member.name] = 0
        if gone:
            log.log(min(gone, logging.WARNING), "worker %s is back (%s)", member.name, way_of(member))
        elif gone is None and not member.address.is_started_by_host:
            log.info("worker %s at %s is connected (%s)", member.name, member.address, way_of(member))
