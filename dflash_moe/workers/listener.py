"""Takes connections for a worker that listens: it authenticates every one, hands control
connections to the worker and the others to the sessions that they belong to. What strangers can do
is bounded in protocol/doorway.py.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import socket
import stat
import threading
import time
from dataclasses import dataclass
from functools import partial

from dflash_moe.errors import ConfigError, DflashError, ProtocolError
from dflash_moe.protocol.auth import PEER_CREDENTIAL_KEY, Peer, authenticate_host
from dflash_moe.protocol.doorway import DoorTerms, Doorway
from dflash_moe.protocol.encryption import SETTING, Encryption, require_library
from dflash_moe.protocol.failures import busy_refusal, leaving_refusal
from dflash_moe.protocol.framing import Connection
from dflash_moe.protocol.mailbox import Mailbox
from dflash_moe.protocol.messages import Open, Refusal, Role
from dflash_moe.protocol.strangers import Stranger
from dflash_moe.protocol.tcp_sockets import BACKLOG, open_tcp_listener
from dflash_moe.topology.addresses import Address

log = logging.getLogger(__name__)

# A host that calls as soon as another has said goodbye, or comes back itself, waits so long for a
# session to end.
PARTING_S = 0.5
# The lock of a directory is awaited for at most this time. Another worker holds it only while it
# binds its socket.
LOCK_S = 5.0


def open_unix_listener(path: str) -> socket.socket:
    """Returns a listening Unix socket at `path` with mode 0600, which the caller owns. The socket
    that a dead worker left is replaced. Raises ConfigError where a live one listens, or the path
    cannot be had.
    """
    directory = os.path.dirname(path) or "/"
    try:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"cannot listen on unix://{path}: {directory}: {error.strerror}; make that folder first") from None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _lock_directory(lock, path)
        _remove_stale_socket(path)
        # Linux gives this mode to the file that bind() makes, which is never open to others.
        os.fchmod(sock.fileno(), 0o600)
        sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on unix://{path}: {error.strerror}; take a path in a folder of yours") from None
    except DflashError:
        sock.close()
        raise
    finally:
        os.close(lock)
    return sock


def _lock_directory(lock: int, path: str) -> None:
    # The directory itself is locked, so that no lock file stays behind. The kernel drops the lock
    # with its holder.
    until = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise ConfigError(f"cannot listen on unix://{path}: its directory stayed locked for {LOCK_S} s") from None
            time.sleep(0.01)


def _remove_stale_socket(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"cannot listen on unix://{path}: the path exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError as error:
            raise ConfigError(f"cannot listen on unix://{path}: probing the old socket: {error.strerror}") from None
    raise ConfigError(f"cannot listen on unix://{path}: another worker is listening there; stop it or take another path")


@dataclass(frozen=True, slots=True)
class Caller:
    """The control connection of an authenticated host, which whoever holds this owns, with the
    place where its other connections arrive.
    """

    connection: Connection
    mailbox: Mailbox


class Listener:
    """The door of a worker. It owns `sock`. `key` authenticates control connections; where it is
    None, only data and pulse connections of a session are taken. At most `max_sessions` hosts are
    served at a time.

    `close()` ends all handshakes under way, and removes the path of a Unix socket.
    """

    def __init__(
        self, sock: socket.socket, *, worker: str, key: bytes | None, path: str = "", encryption: Encryption | None = None,
        max_sessions: int = 1,
    ) -> None:  # fmt: skip
        self._encryption = encryption
        self._worker = worker
        self._key = key
        self._path = path
        # No more callers than sessions, because of the places below, and None from `stop` and
        # `close`.
        self._callers: queue.SimpleQueue[Caller | None] = queue.SimpleQueue()
        self._max_sessions = max_sessions
        # Guards what follows; notified where a session ends.
        self._changed = threading.Condition()
        # The places of sessions, by their ids, from the acceptance of their control connections to
        # their ends.
        self._served: dict[bytes, Caller] = {}
        # That of the host which started this process, whose control connection did not come here.
        self._private: Mailbox | None = None
        self._door = Doorway(sock, self._welcome, DoorTerms(f"worker {worker}", "a host"), is_plain=encryption is None)
        self._door.start()

    @property
    def port(self) -> int:
        """The TCP port that is bound, 0 on Unix sockets."""
        return self._door.port

    def use_mailbox(self, mailbox: Mailbox) -> None:
        """Takes the data and pulse connections of the session of `mailbox` from now on, whose
        control connection came in another way.
        """
        self._private = mailbox

    def next_caller(self) -> Caller | None:
        """Waits for a host and returns its connection, or None once the listener was stopped or
        closed. The wait has no limit, because it is a worker's life between two hosts. Whoever
        serves a caller ends its session with `end_session()`.
        """
        return self._callers.get()

    def end_session(self, caller: Caller) -> None:
        """Gives the place of a session to whoever comes. Any thread."""
        with self._changed:
            self._served.pop(caller.mailbox.session_id, None)
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends all sessions, and has `next_caller` return None. Any thread may call; it may be
        called again.
        """
        # A host that comes after this line finds None before it in the queue.
        self._callers.put(None)
        with self._changed:
            served = list(self._served.values())
        for caller in served:
            caller.connection.hang_up(parting=leaving_refusal(self._worker))
            caller.mailbox.close()

    def close(self) -> None:
        """Stops accepting and closes the socket. It may be called again."""
        if not self._door.close():
            return
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self._callers.put(None)

    def _welcome(self, stranger: Stranger, deadline: float) -> None:
        """Makes the handshake of a connection whose first byte is there, and hands it on."""
        connection = stranger.connection
        if self._encryption is not None:
            takes_control = self._key is not None
            self._encryption.answer(connection, worker=self._worker, takes_control=takes_control, deadline=deadline)
            stranger.is_plain = not connection.is_encrypted
        peer = authenticate_host(connection, key_for=partial(self._key_for, connection), deadline=deadline)
        self._door.admit_proven(stranger)
        self._dispatch(connection, peer)

    def _key_for(self, connection: Connection, opening: Open) -> bytes:
        if opening.role != Role.CONTROL:
            mailbox = self._mailbox_of(opening.session_id)
            if mailbox is None:
                raise ProtocolError("session_id: this worker has no such session")
            if mailbox.is_encrypted and not connection.is_encrypted:
                raise ProtocolError(f"{SETTING}: the session is encrypted and this connection of it is not")
            return mailbox.key_for(opening)
        if self._key is None:
            raise ProtocolError("role: this listener takes no control connections")
        return self._key

    def _mailbox_of(self, session_id: bytes) -> Mailbox | None:
        with self._changed:
            served, private = self._served.get(session_id), self._private
        if served is not None:
            return served.mailbox
        return private if private is not None and private.session_id == session_id else None

    def _dispatch(self, connection: Connection, peer: Peer) -> None:
        if peer.role != Role.CONTROL:
            mailbox = self._mailbox_of(peer.session_id)
            if mailbox is None:
                connection.close()
                return
            mailbox.deliver(peer.role, peer.generation, connection.detach())
            return
        mailbox = Mailbox(peer.session_id, peer.session_key, is_encrypted=connection.is_encrypted)
        refusal = self._take_place(Caller(connection, mailbox))
        if refusal is not None:
            connection.send(refusal, deadline=time.monotonic() + 1.0)
            connection.close()

    def _take_place(self, caller: Caller) -> Refusal | None:
        """Gives a host one of the places, or returns why it gets none.

        A host that comes back ends its own former session before. After a cut of the network it has
        given that up long before its farewell arrives, which TCP sends again after ever longer
        pauses. And what it asked for last may arrive first: the worker then waits for a data
        connection that the host does not dial any more.
        """
        session_id, until = caller.mailbox.session_id, time.monotonic() + PARTING_S
        with self._changed:
            former = self._served.get(session_id)
        if former is not None:
            log.info("worker %s: a host is back and has given up its session that is served", self._worker)
            former.connection.hang_up()
            former.mailbox.close()
        with self._changed:
            while session_id in self._served or len(self._served) >= self._max_sessions:
                left = until - time.monotonic()
                if left <= 0:
                    return busy_refusal(self._worker, self._max_sessions, is_back=session_id in self._served)
                self._changed.wait(left)
            self._served[session_id] = caller
            self._callers.put(caller)
        return None


def open_listener(
    address: Address, *, worker: str, key: bytes | None, buffer_bytes: int = 0, encryption: str = "auto",
    max_sessions: int = 1,
) -> Listener:  # fmt: skip
    """Opens the listener of a worker that is started by hand. TCP needs a key; a Unix socket does
    without, because the kernel vouches for the peer's uid. `buffer_bytes` is for TCP, as in
    `open_tcp_listener`, and so is `encryption`, the setting of this name. It takes `max_sessions`
    hosts at a time.

    Raises ConfigError when TCP has no key, connections shall be encrypted and this machine has no
    libssl, or the address cannot be had.
    """
    if address.path:
        sock = open_unix_listener(address.path)
        return Listener(sock, worker=worker, key=key or PEER_CREDENTIAL_KEY, path=address.path, max_sessions=max_sessions)
    if key is None:
        reach = "any local user" if address.is_loopback else "anyone on the network"
        raise ConfigError(
            f"{address}: {reach} can reach it, so a shared key is needed; make one with `dflash-moe key make FILE` "
            "and give --key-file FILE on both ends"
        )
    require_library(encryption, address, who=f"worker {worker}")
    sock = open_tcp_listener(address.host, address.port, buffer_bytes)
    return Listener(sock, worker=worker, key=key, encryption=Encryption(encryption, key), max_sessions=max_sessions)
