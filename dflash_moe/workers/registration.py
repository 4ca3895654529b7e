"""A worker that dials its host: the control connection of one session after the other, and the data
and pulse connections of the session that is served.

It comes again by itself after whatever passes, and ends with an error that only a person can mend.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import random
import threading
import time

from dflash_moe.errors import CheckpointError, ConfigError, DflashError, ProtocolError, UnsupportedError, WorkerLost
from dflash_moe.protocol.auth import HANDSHAKE_S, Peer, authenticate_host
from dflash_moe.protocol.failures import CrowdedOut, leaving_refusal
from dflash_moe.protocol.framing import Connection, Detached, PeerGone
from dflash_moe.protocol.keys import FileKey
from dflash_moe.protocol.mailbox import Mailbox
from dflash_moe.protocol.messages import Open, Role
from dflash_moe.protocol.registering import dial_registered
from dflash_moe.protocol.tcp_sockets import CONNECT_S, connect_tcp
from dflash_moe.topology.addresses import Address
from dflash_moe.workers.session import ATTACH_S

log = logging.getLogger(__name__)

# The first and the longest pause between two tries to register, which double in between, and the
# part of a pause around which it is drawn, so that workers of a host that was away spread.
FIRST_PAUSE_S, LONGEST_PAUSE_S, JITTER = 0.1, 5.0, 0.2
# These say that coming again would only repeat the answer.
FOR_GOOD = (ConfigError, ProtocolError, UnsupportedError, CheckpointError)


class Registrant:
    """Registers `worker` at the host at `head`. One thread registers and dials; any may `stop`. A
    worker of several hosts has one for each.
    """

    def __init__(self, worker: str, head: Address, key: FileKey) -> None:
        self._worker = worker
        self.head = head
        self._key = key
        self._stopped = threading.Event()
        self._connection: Connection | None = None
        self._mailbox: Mailbox | None = None
        self._pause_s = FIRST_PAUSE_S
        self._rng = random.Random()

    def next_host(self) -> tuple[Connection, Peer] | None:
        """Registers until the host takes this worker, and returns the control connection, which the
        caller owns, and who proved what there; None once `stop` was called. It waits for as long as
        it takes, because that is a worker's life between two sessions.

        Errors: ConfigError, ProtocolError, UnsupportedError, which another try would only repeat,
        and which only who has the key can cause.
        """
        said = ""
        while not self._stopped.is_set():
            try:
                taken = self._register()
                self._pause_s = FIRST_PAUSE_S
                return taken
            except FOR_GOOD:
                raise
            except (DflashError, OSError) as error:
                text = f"{getattr(error, 'strerror', None) or error}"
                if not self._stopped.is_set() and text != said:
                    log.warning("worker %s is not taken at %s, and comes again: %s", self._worker, self.head, text)
                said = text
            self._stopped.wait(self._pause_s * self._rng.uniform(1.0 - JITTER, 1.0 + JITTER))
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return None

    def _register(self) -> tuple[Connection, Peer]:
        connection = self._connect(Role.CONTROL, time.monotonic() + CONNECT_S + HANDSHAKE_S, 0)
        self._connection = connection
        try:
            if self._stopped.is_set():
                raise PeerGone("this worker was told to stop")
            log.info("worker %s has registered at %s, and waits to be taken", self._worker, self.head)
            return connection, authenticate_host(connection, key_for=self._control_key, deadline=None, worker=self._worker)
        except BaseException:
            self._connection = None
            connection.close()
            raise

    def _control_key(self, opening: Open) -> bytes:
        if opening.role != Role.CONTROL:
            raise ProtocolError(f"role: found {opening.role}, this is a control connection")
        return self._key.key

    def _connect(self, role: Role, deadline: float, buffer_bytes: int) -> Connection:
        seconds = max(0.001, min(CONNECT_S, deadline - time.monotonic()))
        connection = Connection(connect_tcp(self.head, buffer_bytes, seconds))
        try:
            dial_registered(connection, self._key, worker=self._worker, role=role, deadline=deadline)
        except ProtocolError as error:
            # Until TLS stands, anybody on the path may have answered. Who comes again for that
            # cannot be made to leave by a stranger.
            connection.close()
            raise WorkerLost(
                f"nobody proved this worker's key there; is that the host, with the same key file? {error}"
            ) from None
        except BaseException:
            connection.close()
            raise
        return connection

    def serve(self, mailbox: Mailbox) -> None:
        """Has `stop` end the session of `mailbox` too."""
        self._mailbox = mailbox

    def dial(self, role: Role, generation: int, buffer_bytes: int) -> Detached:
        """Dials a data or pulse connection of the session that is served. One that strangers crowd
        out is dialled again, for ATTACH_S. The caller owns it. Errors: WorkerLost, ProtocolError,
        WorkerTimeout.
        """
        deadline, pause_s = time.monotonic() + ATTACH_S, FIRST_PAUSE_S
        while True:
            try:
                return self._dial_once(role, generation, buffer_bytes, deadline)
            except (PeerGone, CrowdedOut, OSError) as error:
                if self._stopped.wait(pause_s) or time.monotonic() >= deadline:
                    text = f"worker {self._worker}: the host takes no {role.name.lower()} connection: {error}"
                    raise WorkerLost(text) from None
                pause_s *= 2

    def _dial_once(self, role: Role, generation: int, buffer_bytes: int, deadline: float) -> Detached:
        mailbox = self._mailbox
        if mailbox is None:
            raise ProtocolError("no session is served")
        connection = self._connect(role, deadline, buffer_bytes)
        try:
            peer = authenticate_host(connection, key_for=mailbox.key_for, deadline=deadline, worker=self._worker)
            if (peer.role, peer.generation) != (role, generation):
                raise ProtocolError(f"generation: the host opened {peer.generation}, this connection is for {generation}")
            return connection.detach()
        finally:
            connection.close()

    def stop(self) -> None:
        """Ends the session that is served and the wait for one, telling the host that this was
        wanted; it may be called again.
        """
        self._stopped.set()
        connection, mailbox = self._connection, self._mailbox
        if connection is not None:
            connection.hang_up(parting=leaving_refusal(self._worker))
        if mailbox is not None:
            mailbox.close()
