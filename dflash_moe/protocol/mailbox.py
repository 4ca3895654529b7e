"""The place where a listener leaves authenticated data and pulse connections for the session that
waits for them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dflash_moe.errors import ProtocolError, WorkerTimeout
from dflash_moe.protocol.framing import Detached, PeerGone, close_detached
from dflash_moe.protocol.messages import Open, Role

# A session needs two connections at a time. A peer that leaves more than this misbehaves.
MAX_WAITING = 8
# Whoever waits for a connection looks so often whether the host still means it to come.
LOOK_S = 0.05


class Mailbox:
    """The data and pulse connections of one session, by (role, generation). It owns those that wait
    until somebody collects them or `close()`. Any thread may call.

    With `is_encrypted`, the control connection is encrypted, and so must these be.
    """

    def __init__(self, session_id: bytes, session_key: bytes, *, is_encrypted: bool = False) -> None:
        self.session_id = session_id
        self.is_encrypted = is_encrypted
        self._session_key = session_key
        self._arrived: dict[tuple[Role, int], Detached] = {}
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

    def deliver(self, role: Role, generation: int, connection: Detached) -> None:
        """Takes ownership of `connection`. A duplicate, one too many, or one that comes after
        `close()` is closed.
        """
        with self._changed:
            if self._is_closed or (role, generation) in self._arrived or len(self._arrived) >= MAX_WAITING:
                close_detached(connection)
                return
            self._arrived[role, generation] = connection
            self._changed.notify_all()

    def collect(
        self, role: Role, generation: int, *, seconds: float, is_given_up: Callable[[], bool] = lambda: False
    ) -> Detached:
        """Waits up to `seconds` for a connection and returns it, which the caller now owns. Raises
        WorkerTimeout when it does not arrive in time, or `is_given_up` says that the host does not
        dial it any more; and PeerGone as soon as `close()` was called.
        """
        what = f"{role.name.lower()} connection of generation {generation}"
        until = time.monotonic() + seconds
        with self._changed:
            while (role, generation) not in self._arrived:
                if self._is_closed:
                    raise PeerGone(f"the session ended before the {what} arrived")
                if is_given_up():
                    raise WorkerTimeout(f"no {what} arrived before the host asked for something else")
                left = until - time.monotonic()
                if left <= 0:
                    raise WorkerTimeout(f"no {what} arrived within {seconds} s")
                self._changed.wait(min(left, LOOK_S))
            return self._arrived.pop((role, generation))

    def close(self) -> None:
        """Closes the connections that nobody collected, and all that still come, and ends the wait
        for one. It may be called again.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            for connection in self._arrived.values():
                close_detached(connection)
            self._arrived.clear()
