"""Accepts connections that strangers may make, for a worker that listens and for a host at which
workers register. Connections without a proof are few and short-lived whatever strangers do
(strangers.py), and who speaks at once always gets through.

What the proof is, and what becomes of a connection after it, its owner says.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from dflash_moe.errors import DflashError, ProtocolError
from dflash_moe.protocol.auth import HANDSHAKE_S
from dflash_moe.protocol.failures import crowded_refusal, system_failure, to_refusal
from dflash_moe.protocol.framing import Connection, PeerGone
from dflash_moe.protocol.strangers import MAX_STRANGERS, Stranger, Strangers, origin_of

log = logging.getLogger(__name__)

# Who dials speaks as soon as it is connected. Who says nothing for so long has nothing to say, or
# will try again.
FIRST_BYTE_S = 1.0
# After the system refused to accept, the loop pauses so that it does not spin.
ACCEPT_RETRY_S = 0.1
# Strangers cause at most one line of the log in this time.
COMPLAINT_EVERY_S = 1.0
# Makes the handshake of a connection whose first byte is there, by a time of the monotonic clock.
Welcome = Callable[[Stranger, float], None]


@dataclass(frozen=True, slots=True)
class DoorTerms:
    """Who listens, as messages name it, for whom, and how many strangers for how many seconds."""

    owner: str
    guest: str
    max_strangers: int = MAX_STRANGERS
    handshake_s: float = HANDSHAKE_S


class Doorway:
    """The accept loop. It owns `sock`; `welcome` takes the connections over.

    One thread accepts, and every handshake under way has one of its own. `close()` ends them all.
    """

    def __init__(self, sock: socket.socket, welcome: Welcome, terms: DoorTerms, *, is_plain: bool = False) -> None:
        """`welcome` calls `admit_proven` once the connection has proved what it must, and owns it
        then; it raises DflashError for one that has not, which is closed here. With `is_plain` no
        connection is ever encrypted. Raises DflashError where this process is out of descriptors.
        """
        self._sock = sock
        self._welcome = welcome
        self._terms = terms
        self._is_plain = is_plain
        self._strangers = Strangers(terms.max_strangers)
        # The thread of a displaced stranger still has to wake and close its socket. There may be as
        # many of those as strangers; then the next connection waits in the backlog.
        self._threads = threading.BoundedSemaphore(2 * terms.max_strangers)
        self._complaints = Complaints()
        try:
            self._stop_read, self._stop_write = os.pipe()
        except OSError as error:
            sock.close()
            raise system_failure(f"{terms.owner} cannot listen", error) from None
        self._thread = threading.Thread(target=self._accept_loop, name="listener", daemon=True)

    def start(self) -> None:
        """Begins to accept; its owner is ready for `welcome` by then."""
        self._thread.start()

    @property
    def port(self) -> int:
        """The TCP port that is bound, 0 on Unix sockets."""
        return 0 if self._sock.family == socket.AF_UNIX else int(self._sock.getsockname()[1])

    def close(self) -> bool:
        """Stops accepting and closes the socket. Returns False where that was done before."""
        if self._stop_write < 0:
            return False
        os.close(self._stop_write)
        self._stop_write = -1
        if self._thread.ident is not None:
            self._thread.join(self._terms.handshake_s + 1)
        self._sock.close()
        os.close(self._stop_read)
        return True

    def admit_proven(self, stranger: Stranger) -> None:
        """Counts a connection that has proved what it must among the strangers no longer, and keeps
        it from being displaced. Raises PeerGone where a newer connection displaced it before.
        """
        if not self._strangers.leave(stranger):
            raise PeerGone("displaced at the end of its handshake")

    def complain(self, text: str) -> None:
        """Logs what somebody who dialled has done, at most one line a second."""
        self._complaints.log(text)

    def _accept_loop(self) -> None:
        self._sock.setblocking(False)
        poller = select.poll()
        poller.register(self._sock.fileno(), select.POLLIN)
        poller.register(self._stop_read, select.POLLIN | select.POLLHUP)
        while True:
            # This wait has no deadline, because the next connection or `close` ends it.
            if any(descriptor == self._stop_read for descriptor, _ in poller.poll()):
                return
            try:
                accepted, address = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue
            except OSError as error:
                # The process is out of descriptors or memory. Others may free some, and this thread
                # must not spin meanwhile.
                self.complain(f"cannot accept a connection: {system_failure('accept', error)}")
                time.sleep(ACCEPT_RETRY_S)
                continue
            self._admit(accepted, origin_of(address))

    def _admit(self, accepted: socket.socket, origin: str) -> None:
        """Starts the handshake of a new connection. Where there are too many, an older one goes."""
        if not self._threads.acquire(timeout=self._terms.handshake_s):
            self.complain(
                f"dropped a connection from {origin or 'this user'}: no handshake ended for {self._terms.handshake_s:g} s"
            )
            accepted.close()
            return
        try:
            newcomer = Stranger(Connection(accepted), origin, is_plain=self._is_plain)
        except PeerGone:
            self._threads.release()
            return
        displaced = self._strangers.admit(newcomer)
        if displaced is not None:
            self.complain(
                f"dropped a connection from {displaced.origin or 'this user'} that had not proved the key, for a newer one"
            )
            # The thread of its handshake closes it. The parting word tells a host why; one that
            # encrypts could not read it, and tries again all the same.
            parting = crowded_refusal(self._terms.owner, self._terms.max_strangers) if displaced.is_plain else None
            displaced.connection.hang_up(parting=parting)
        try:
            threading.Thread(target=self._handshake, args=(newcomer,), name="handshake", daemon=True).start()
        except RuntimeError as error:
            # The process has as many threads as the system allows.
            self.complain(f"dropped a connection: {error}")
            self._dismiss(newcomer)
            newcomer.connection.close()

    def _handshake(self, stranger: Stranger) -> None:
        connection = stranger.connection
        try:
            connection.require_same_user()
            now = time.monotonic()
            first_byte_by = now + min(FIRST_BYTE_S, self._terms.handshake_s)
            connection.await_byte(deadline=first_byte_by, waiting_for=f"the first byte of {self._terms.guest}")
            stranger.has_spoken = True
            self._welcome(stranger, now + self._terms.handshake_s)
        except ProtocolError as error:
            self.complain(f"refused a connection from {stranger.origin or 'this user'}: {error}")
            with contextlib.suppress(DflashError):
                connection.send(to_refusal(error), deadline=time.monotonic() + 1.0)
            connection.close()
        except (DflashError, OSError) as error:
            if not stranger.was_displaced:
                self.complain(f"a connection from {stranger.origin or 'this user'} ended in its handshake: {error}")
            connection.close()
        finally:
            self._dismiss(stranger)

    def _dismiss(self, stranger: Stranger) -> None:
        self._strangers.leave(stranger)
        self._threads.release()


class Complaints:
    """Writes the log lines that strangers cause, at most one a second, so that they cannot fill a
    disk. Each line says how many were left out before it. Any thread may call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._quiet_until = 0.0
        self._num_withheld = 0

    def log(self, text: str) -> None:
        """Logs a warning, or counts it where one was logged less than a second ago."""
        with self._lock:
            now = time.monotonic()
            if now < self._quiet_until:
                self._num_withheld += 1
                return
            num_withheld, self._num_withheld = self._num_withheld, 0
            self._quiet_until = now + COMPLAINT_EVERY_S
        log.warning("%s%s", text, f" (and {num_withheld} more such lines, withheld)" if num_withheld else "")
