"""Dials workers that listen: the control connection of a session, and over TCP its data and pulse
connections.

A listener that strangers crowd drops connections before they prove the key, this host's among them.
So a handshake that was cut short is tried again for as long as its caller can wait.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from dflash_moe.errors import DflashError, WorkerLost, WorkerTimeout
from dflash_moe.protocol.auth import HANDSHAKE_S, Peer, authenticate_to_worker
from dflash_moe.protocol.encryption import SETTING, Encryption
from dflash_moe.protocol.failures import CrowdedOut, is_descriptor_limit, system_failure
from dflash_moe.protocol.framing import Connection, PeerGone, require_same_user
from dflash_moe.protocol.messages import Role
from dflash_moe.protocol.tcp_sockets import CONNECT_S, connect_tcp
from dflash_moe.topology.addresses import Address

log = logging.getLogger(__name__)

# A socket that may take no time at all would not wait for the answer of a listener that is there.
LEAST_S = 0.001
# These bound the pauses between two tries. The first try after a drop comes soon, because a
# listener that is full drops one connection for each that arrives; the later pauses double, to
# leave the listener time.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a connection proves in its handshake: that it knows `key`, and which session and role it
    belongs to.
    """

    role: Role
    key: bytes = field(repr=False)
    session_id: bytes
    # A data connection names the generation of its path; control and pulse connections have 0.
    generation: int = 0
    # None leaves the connection as it is.
    encryption: Encryption | None = None


class CallOff:
    """Lets another thread end a dialling: the handshake under way, and the tries that would follow.
    It cannot be taken back, and whatever is dialled afterwards fails at once.
    """

    def __init__(self) -> None:
        self._given_up = threading.Event()
        self._connection: Connection | None = None

    def give_up(self) -> None:
        """Ends the dialling under way and all that follow. Any thread may call."""
        self._given_up.set()
        connection = self._connection
        if connection is not None:
            connection.hang_up()

    @property
    def is_given_up(self) -> bool:
        """Whether `give_up` was called."""
        return self._given_up.is_set()

    @contextmanager
    def covering(self, connection: Connection) -> Iterator[None]:
        """Has `give_up` hang up `connection` within the block. Raises PeerGone where it was given
        up already.
        """
        self._connection = connection
        try:
            if self._given_up.is_set():
                # give_up() came too early to see this connection.
                raise PeerGone("the start was given up")
            yield
        finally:
            self._connection = None

    def pause(self, seconds: float) -> bool:
        """Sleeps for so long, and returns False at once where the dialling is given up."""
        return not self._given_up.wait(seconds)


def connect_authenticated(
    worker: str, address: Address, credentials: Credentials, *, deadline: float, call_off: CallOff, buffer_bytes: int = 0
) -> tuple[Connection, Peer]:
    """Dials a worker and returns a connection whose handshake is over, and who proved what there.
    The caller owns the connection. A connection that the worker drops in its handshake is dialled
    again until `deadline`, a time of the monotonic clock.

    Errors: those of `dial`, ProtocolError (version, key), the worker's refusal, and WorkerLost that
    says how often the handshake was cut short.
    """
    begun = time.monotonic()
    pause, num_dropped = FIRST_PAUSE_S, 0
    while True:
        connection = Connection(dial(worker, address, buffer_bytes, deadline=deadline))
        try:
            with call_off.covering(connection):
                return connection, _authenticate(worker, address, connection, credentials, deadline)
        except (PeerGone, CrowdedOut) as dropped:
            connection.close()
            num_dropped += 1
            if time.monotonic() + pause >= deadline:
                seconds = time.monotonic() - begun
                raise _crowded_out(worker, address, num_dropped, seconds, dropped, connection.is_encrypted) from None
            if num_dropped == 1:
                log.info("worker %s at %s dropped a connection in its handshake, trying again: %s", worker, address, dropped)
        except BaseException:
            connection.close()
            raise
        if not call_off.pause(pause):
            raise WorkerLost(f"worker {worker} at {address}: the start was given up", worker=worker)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def _authenticate(worker: str, address: Address, connection: Connection, credentials: Credentials, deadline: float) -> Peer:
    seconds = max(0.0, min(deadline - time.monotonic(), HANDSHAKE_S))
    until = time.monotonic() + seconds
    try:
        if credentials.encryption is not None:
            credentials.encryption.dial(connection, worker=worker, role=credentials.role, deadline=until)
        return authenticate_to_worker(
            connection,
            worker=worker,
            role=credentials.role,
            key=credentials.key,
            session_id=credentials.session_id,
            generation=credentials.generation,
            deadline=until,
        )
    except WorkerTimeout:
        raise WorkerTimeout(
            f"worker {worker} at {address} accepted a {credentials.role.name.lower()} connection and then did not finish its "
            f"handshake within {seconds:.1f} s; look at its own output there",
            worker=worker,
        ) from None


def _crowded_out(
    worker: str, address: Address, num_dropped: int, seconds: float, last: DflashError, is_encrypted: bool
) -> WorkerLost:
    other = f", it takes no encrypted connections (set {SETTING} alike at both ends)" if is_encrypted else ""
    return WorkerLost(
        f"worker {worker} at {address} dropped each of {num_dropped} connections before their handshake was over, within "
        f"{seconds:.1f} s; either it ends{other}, or strangers without its key crowd its listener; the last time: {last}; "
        "look at its own output there",
        worker=worker,
    )


def dial(worker: str, address: Address, buffer_bytes: int = 0, *, deadline: float) -> socket.socket:
    """Connects to the listener at `address` within CONNECT_S and by `deadline`, a time of the
    monotonic clock. Returns the socket, which the caller owns. Over TCP `buffer_bytes` sizes the
    socket's buffers as `size_buffers` does.

    Errors: WorkerLost, WorkerTimeout, ProtocolError (a Unix socket of another user), DflashError
    naming the limit where this process is out of descriptors. A host name is looked up within the
    bounds that the system's resolver sets itself.
    """
    seconds = max(LEAST_S, min(CONNECT_S, deadline - time.monotonic()))
    try:
        return _connect_unix(address.path, seconds) if address.path else connect_tcp(address, buffer_bytes, seconds)
    except TimeoutError:
        raise WorkerTimeout(
            f"worker {worker} at {address} did not accept a connection within {seconds:.1f} s", worker=worker
        ) from None
    except OSError as error:
        if is_descriptor_limit(error):
            raise system_failure(f"worker {worker} at {address} cannot be reached", error) from None
        raise WorkerLost(
            f"worker {worker} at {address} cannot be reached: {error.strerror or error}; "
            f"start it there with `dflash-moe worker --name {worker} ...`",
            worker=worker,
        ) from None


def _connect_unix(path: str, seconds: float) -> socket.socket:
    until = time.monotonic() + seconds
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(seconds)
        while True:
            try:
                sock.connect(path)
                break
            except BlockingIOError:
                # The backlog of the listener's Unix socket is full. TCP would wait by itself.
                if time.monotonic() > until:
                    raise TimeoutError from None
                time.sleep(FIRST_PAUSE_S)
        require_same_user(sock)
    except BaseException:
        sock.close()
        raise
    return sock
