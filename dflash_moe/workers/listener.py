"""Accepts connections for a worker: it authenticates every one, hands control connections to the
worker and the others to the running session. Unauthenticated connections are few and short-lived
whatever strangers do (strangers.py), and a host that speaks at once always gets through.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import queue
import select
import socket
import stat
import threading
import time
from dataclasses import dataclass
from functools import partial

from dflash_moe.errors import ConfigError, DflashError, ProtocolError
from dflash_moe.protocol.auth import HANDSHAKE_S, PEER_CREDENTIAL_KEY, Peer, authenticate_host
from dflash_moe.protocol.encryption import SETTING, Encryption, require_library
from dflash_moe.protocol.failures import (
    busy_refusal,
    crowded_refusal,
    leaving_refusal,
    system_failure,
    to_refusal,
)
from dflash_moe.protocol.framing import Connection, PeerGone, size_buffers
from dflash_moe.protocol.messages import Open, Role
from dflash_moe.topology.addresses import Address
from dflash_moe.workers.mailbox import Mailbox
from dflash_moe.workers.strangers import MAX_STRANGERS, Stranger, Strangers, origin_of

log = logging.getLogger(__name__)

# A host sends its opening as soon as it is connected. Who says nothing for so long is no host, or
# will try again.
FIRST_BYTE_S = 1.0
# A host that calls as soon as the former one has said goodbye waits so long for that one's session
# to end.
PARTING_S = 0.5
# At most this many connections wait to be accepted; the kernel refuses more.
BACKLOG = 128
# After the system refused to accept, the listener pauses so that it does not spin.
ACCEPT_RETRY_S = 0.1
# Strangers cause at most one line of the log in this time.
COMPLAINT_EVERY_S = 1.0
_TCP_REMEDIES = {
    errno.EADDRINUSE: "another program listens there; stop it or take another port",
    errno.EADDRNOTAVAIL: "this machine has no such address; take one of its own, or 0.0.0.0 for all of them",
    errno.EACCES: "ports below 1024 belong to root; take a higher one",
}
# The lock of a directory is awaited for at most this time. Another worker holds it only while it
# binds its socket.
LOCK_S = 5.0


def open_tcp_listener(host: str, port: int, buffer_bytes: int = 0) -> socket.socket:
    """Returns a listening TCP socket, which the caller owns. Port 0 lets the system choose, and
    `buffer_bytes` sizes the buffers as `size_buffers` does. Raises ConfigError when the address
    cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        size_buffers(sock, buffer_bytes)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        remedy = _TCP_REMEDIES.get(error.errno or 0, "check the worker's address in the topology, or pass --listen")
        raise ConfigError(f"cannot listen on tcp://{host}:{port}: {error.strerror}; {remedy}") from None
    return sock


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
    """The control connection of an authenticated host, which whoever holds this owns."""

    connection: Connection
    peer: Peer


class Listener:
    """The accept loop of a worker. It owns `sock`. `key` authenticates control connections; where
    it is None, only data and pulse connections of a session are taken.

    One thread accepts, and every handshake under way has one of its own. `close()` ends them all
    and removes the path of a Unix socket.
    """

    def __init__(
        self, sock: socket.socket, *, worker: str, key: bytes | None, path: str = "", encryption: Encryption | None = None
    ) -> None:
        self._encryption = encryption
        self._sock = sock
        self._worker = worker
        self._key = key
        self._path = path
        self._mailbox: Mailbox | None = None
        # One caller at most, because of the lock below, and None from `stop` and `close`.
        self._callers: queue.SimpleQueue[Caller | None] = queue.SimpleQueue()
        # The lock is held from the acceptance of a control connection, which is `_served`, to the
        # end of its session.
        self._has_caller = threading.Lock()
        self._served: Connection | None = None
        self._strangers = Strangers()
        # The thread of a displaced stranger still has to wake and close its socket. There may be as
        # many of those as strangers; then the next connection waits in the backlog.
        self._threads = threading.BoundedSemaphore(2 * MAX_STRANGERS)
        self._complaints = Complaints()
        try:
            self._stop_read, self._stop_write = os.pipe()
        except OSError as error:
            sock.close()
            raise system_failure(f"worker {worker} cannot listen", error) from None
        self._thread = threading.Thread(target=self._accept_loop, name="listener", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The TCP port that is bound, 0 on Unix sockets."""
        return 0 if self._sock.family == socket.AF_UNIX else int(self._sock.getsockname()[1])

    def use_mailbox(self, mailbox: Mailbox | None) -> None:
        """Takes the data and pulse connections of the session of `mailbox` from now on, or none
        where that is None.
        """
        self._mailbox = mailbox

    def next_caller(self) -> Caller | None:
        """Waits for a host and returns its connection, or None once the listener was stopped or
        closed. The wait has no limit, because it is a worker's life between two sessions. The
        caller ends the session with `end_session()` before it asks again.
        """
        return self._callers.get()

    def end_session(self) -> None:
        """Takes a control connection again, because the worker is free for another host."""
        self._mailbox = self._served = None
        with contextlib.suppress(RuntimeError):
            self._has_caller.release()

    def stop(self) -> None:
        """Ends the session that is served, and has `next_caller` return None. Any thread may call;
        it may be called again.
        """
        # A host that comes after this line finds None before it in the queue.
        self._callers.put(None)
        served, mailbox = self._served, self._mailbox
        if served is not None:
            served.hang_up(parting=leaving_refusal(self._worker))
        if mailbox is not None:
            mailbox.close()

    def close(self) -> None:
        """Stops accepting and closes the socket. It may be called again."""
        if self._stop_write < 0:
            return
        os.close(self._stop_write)
        self._stop_write = -1
        self._thread.join(HANDSHAKE_S + 1)
        self._sock.close()
        os.close(self._stop_read)
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self._callers.put(None)

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
                self._complaints.log(f"cannot accept a connection: {system_failure('accept', error)}")
                time.sleep(ACCEPT_RETRY_S)
                continue
            self._admit(accepted, origin_of(address))

    def _admit(self, accepted: socket.socket, origin: str) -> None:
        """Starts the handshake of a new connection. Where there are too many, an older one goes."""
        if not self._threads.acquire(timeout=HANDSHAKE_S):
            self._complaints.log(f"dropped a connection from {origin or 'this user'}: no handshake ended for {HANDSHAKE_S:g} s")
            accepted.close()
            return
        try:
            newcomer = Stranger(Connection(accepted), origin, is_plain=self._encryption is None)
        except PeerGone:
            self._threads.release()
            return
        displaced = self._strangers.admit(newcomer)
        if displaced is not None:
            self._complaints.log(
                f"dropped a connection from {displaced.origin or 'this user'} that had not proved the key, for a newer one"
            )
            # The thread of its handshake closes it. The parting word tells a host why; one that
            # encrypts could not read it, and tries again all the same.
            displaced.connection.hang_up(parting=crowded_refusal(self._worker, MAX_STRANGERS) if displaced.is_plain else None)
        try:
            threading.Thread(target=self._handshake, args=(newcomer,), name="handshake", daemon=True).start()
        except RuntimeError as error:
            # The process has as many threads as the system allows.
            self._complaints.log(f"dropped a connection: {error}")
            self._dismiss(newcomer)
            newcomer.connection.close()

    def _handshake(self, stranger: Stranger) -> None:
        connection = stranger.connection
        try:
            connection.require_same_user()
            now = time.monotonic()
            connection.await_byte(deadline=now + FIRST_BYTE_S, waiting_for="the first byte of a host")
            stranger.has_spoken = True
            deadline = now + HANDSHAKE_S
            if self._encryption is not None:
                takes_control = self._key is not None
                self._encryption.answer(connection, worker=self._worker, takes_control=takes_control, deadline=deadline)
                stranger.is_plain = not connection.is_encrypted
            peer = authenticate_host(connection, key_for=partial(self._key_for, connection), deadline=deadline)
            # A newer connection may have displaced this one until here; from here on none can.
            if not self._strangers.leave(stranger):
                raise PeerGone("displaced at the end of its handshake")
            self._dispatch(connection, peer)
        except ProtocolError as error:
            self._complaints.log(f"refused a connection from {stranger.origin or 'this user'}: {error}")
            with contextlib.suppress(DflashError):
                connection.send(to_refusal(error), deadline=time.monotonic() + 1.0)
            connection.close()
        except (DflashError, OSError) as error:
            if not stranger.was_displaced:
                self._complaints.log(f"a connection from {stranger.origin or 'this user'} ended in its handshake: {error}")
            connection.close()
        finally:
            self._dismiss(stranger)

    def _dismiss(self, stranger: Stranger) -> None:
        self._strangers.leave(stranger)
        self._threads.release()

    def _key_for(self, connection: Connection, opening: Open) -> bytes:
        if opening.role != Role.CONTROL:
            mailbox = self._mailbox
            if mailbox is None:
                raise ProtocolError("session_id: this worker has no session")
            if mailbox.is_encrypted and not connection.is_encrypted:
                raise ProtocolError(f"{SETTING}: the session is encrypted and this connection of it is not")
            return mailbox.key_for(opening)
        if self._key is None:
            raise ProtocolError("role: this listener takes no control connections")
        return self._key

    def _dispatch(self, connection: Connection, peer: Peer) -> None:
        mailbox = self._mailbox
        if peer.role != Role.CONTROL:
            if mailbox is None or mailbox.session_id != peer.session_id:
                connection.close()
                return
            mailbox.deliver(peer.role, peer.generation, connection.detach())
            return
        self._end_former(mailbox, peer)
        if self._has_caller.acquire(timeout=PARTING_S):
            self._served = connection
            self._callers.put(Caller(connection, peer))
        else:
            connection.send(busy_refusal(self._worker), deadline=time.monotonic() + 1.0)
            connection.close()

    def _end_former(self, mailbox: Mailbox | None, peer: Peer) -> None:
        """Ends the session that is served where its own host comes back. After a cut of the network
        the host has given it up long before its farewell arrives, which TCP sends again after ever
        longer pauses. And what it asked for last may arrive first: the worker then waits for a data
        connection that the host does not dial any more.
        """
        served = self._served
        if mailbox is not None and served is not None and mailbox.session_id == peer.session_id:
            log.info("worker %s: its host is back and has given up the session that is served", self._worker)
            served.hang_up()
            mailbox.close()


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


def open_listener(
    address: Address, *, worker: str, key: bytes | None, buffer_bytes: int = 0, encryption: str = "auto"
) -> Listener:
    """Opens the listener of a worker that is started by hand. TCP needs a key; a Unix socket does
    without, because the kernel vouches for the peer's uid. `buffer_bytes` is for TCP, as in
    `open_tcp_listener`, and so is `encryption`, the setting of this name.

    Raises ConfigError when TCP has no key, connections shall be encrypted and this machine has no
    libssl, or the address cannot be had.
    """
    if address.path:
        sock = open_unix_listener(address.path)
        return Listener(sock, worker=worker, key=key or PEER_CREDENTIAL_KEY, path=address.path)
    if key is None:
        reach = "any local user" if address.is_loopback else "anyone on the network"
        raise ConfigError(
            f"{address}: {reach} can reach it, so a shared key is needed; make one with `dflash-moe key make FILE` "
            "and give --key-file FILE on both ends"
        )
    require_library(encryption, address, who=f"worker {worker}")
    sock = open_tcp_listener(address.host, address.port, buffer_bytes)
    return Listener(sock, worker=worker, key=key, encryption=Encryption(encryption, key))
