"""The place where a listener leaves authenticated data and pulse connections for the session that
waits for them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import threading

from dflash_moe.errors import ProtocolError, WorkerTimeout
from dflash_moe.protocol.messages import Open, Role

# A session needs two connections at a time. A peer that leaves more than this misbehaves.
MAX_WAITING = 8


class Mailbox:
    """The data and pulse connections of one session, by (role, generation). It owns the descriptors
    that wait until somebody collects them or `close()`. Any thread may call.
    """

    def __init__(self, session_id: bytes, session_key: bytes) -> None:
        self.session_id = session_id
        self._session_key = session_key
        self._arrived: dict[tuple[Role, int], int] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def key_for(self, opening: Open) -> bytes:
        """Returns the session key if `opening` belongs to this session. Otherwise it raises
        ProtocolError naming the field.
        """
        if opening.session_id != self.session_id:
            raise ProtocolError("session_id: this worker has no such session")
        if opening.role not in (Role.DATA, Role.PULSE):
            raise ProtocolError(f"role: found {opening.role}, allowed in a running session are data and pulse")
        return self._session_key

    def deliver(self, role: Role, generation: int, descriptor: int) -> None:
        """Takes ownership of `descriptor`. A duplicate, one too many, or one that comes after
        `close()` is closed.
        """
        with self._changed:
            if self._is_closed or (role, generation) in self._arrived or len(self._arrived) >= MAX_WAITING:
                os.close(descriptor)
                return
            self._arrived[role, generation] = descriptor
            self._changed.notify_all()

    def collect(self, role: Role, generation: int, *, seconds: float) -> int:
        """Waits up to `seconds` for a connection and returns its descriptor, which the caller now
        owns. Raises WorkerTimeout when it does not arrive in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: (role, generation) in self._arrived, seconds):
                raise WorkerTimeout(f"no {role.name.lower()} connection of generation {generation} arrived within {seconds} s")
            return self._arrived.pop((role, generation))

    def close(self) -> None:
        """Closes the connections that nobody collected, and all that still come."""
        with self._changed:
            self._is_closed = True
            for descriptor in self._arrived.values():
                os.close(descriptor)
            self._arrived.clear()
