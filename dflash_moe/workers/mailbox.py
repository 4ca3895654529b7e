"""Where a listener leaves authenticated data and pulse connections for the session that waits for
them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import threading

from dflash_moe.errors import ProtocolError, WorkerTimeout
from dflash_moe.protocol.messages import Open, Role

MAX_WAITING = 8  # a session needs two at a time; more is a peer that misbehaves


class Mailbox:
    """The secondary connections of one session, by (role, generation). Any thread; owns waiting
    descriptors until `close()`.
    """

    def __init__(self, session_id: bytes, session_key: bytes) -> None:
        self.session_id = session_id
        self._session_key = session_key
        self._arrived: dict[tuple[Role, int], int] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def key_for(self, opening: Open) -> bytes:
        """The session key, if `opening` belongs to this session; ProtocolError naming the field
        otherwise.
        """
        if opening.session_id != self.session_id:
            raise ProtocolError("session_id: this worker has no such session")
        if opening.role not in (Role.DATA, Role.PULSE):
            raise ProtocolError(f"role: found {opening.role}, allowed in a running session are data and pulse")
        return self._session_key

    def deliver(self, role: Role, generation: int, descriptor: int) -> None:
        """Takes ownership of `descriptor`; refuses duplicates and floods by closing it."""
        with self._changed:
            if self._is_closed or (role, generation) in self._arrived or len(self._arrived) >= MAX_WAITING:
                os.close(descriptor)
                return
            self._arrived[role, generation] = descriptor
            self._changed.notify_all()

    def collect(self, role: Role, generation: int, *, seconds: float) -> int:
        """Returns the descriptor (now the caller's); WorkerTimeout when it does not arrive in
        time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: (role, generation) in self._arrived, seconds):
                raise WorkerTimeout(f"no {role.name.lower()} connection of generation {generation} arrived within {seconds} s")
            return self._arrived.pop((role, generation))

    def close(self) -> None:
        """Closes what nobody collected."""
        with self._changed:
            self._is_closed = True
            for descriptor in self._arrived.values():
                os.close(descriptor)
            self._arrived.clear()
