"""Accepts connections for a worker: authenticates every one, hands control connections to the
worker and the others to the running session. Unauthenticated connections are few and short-lived,
whatever strangers do.

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

from dflash_moe.errors import ConfigError, DflashError, ProtocolError
from dflash_moe.protocol.auth import HANDSHAKE_S, PEER_CREDENTIAL_KEY, Peer, authenticate_host
from dflash_moe.protocol.failures import busy_refusal, to_refusal
from dflash_moe.protocol.framing import Connection, require_same_user, size_buffers
from dflash_moe.protocol.messages import Open, Role
from dflash_moe.topology.addresses import Address
from dflash_moe.workers.mailbox import Mailbox

log = logging.getLogger(__name__)

MAX_UNAUTHENTICATED = 16  # handshakes under way; further strangers are hung up on at once
BACKLOG = 16
ACCEPT_RETRY_S = 0.1
_TCP_REMEDIES = {
    errno.EADDRINUSE: "another program listens there; stop it or take another port",
    errno.EADDRNOTAVAIL: "this machine has no such address; take one of its own, or 0.0.0.0 for all of them",
    errno.EACCES: "ports below 1024 belong to root; take a higher one",
}
LOCK_S = 5.0  # another worker holds the directory lock only while it binds


def open_tcp_listener(host: str, port: int, buffer_bytes: int = 0) -> socket.socket:
    """Binds and listens; ConfigError when the address cannot be had. `buffer_bytes` as
    `size_buffers`.
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
    """Binds a 0600 socket at `path`. A dead worker's socket is replaced; a live one's never:
    ConfigError.
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
        os.fchmod(sock.fileno(), 0o600)  # Linux gives the mode to the file that bind() makes
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
    # The lock is the directory itself: no lock file stays behind, and the kernel drops it with its
    # holder.
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
    """An authenticated host's control connection."""

    connection: Connection
    peer: Peer


class Listener:
    """Accept loop of a worker. `key` authenticates control connections (None: none are taken here,
    only a session's own).

    Threads: one accepts, one per handshake under way. `close()` ends them all and removes a Unix
    socket's path.
    """

    def __init__(self, sock: socket.socket, *, worker: str, key: bytes | None, path: str = "") -> None:
        self._sock = sock
        self._worker = worker
        self._key = key
        self._path = path
        self._mailbox: Mailbox | None = None
        self._callers: queue.Queue[Caller | None] = queue.Queue(maxsize=1)
        # held from a control connection's acceptance to the end of its session
        self._has_caller = threading.Lock()
        self._handshakes = threading.BoundedSemaphore(MAX_UNAUTHENTICATED)
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._accept_loop, name="listener", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The bound TCP port; 0 on Unix sockets."""
        return 0 if self._sock.family == socket.AF_UNIX else int(self._sock.getsockname()[1])

    def use_mailbox(self, mailbox: Mailbox | None) -> None:
        """Whose data and pulse connections are taken from now on."""
        self._mailbox = mailbox

    def next_caller(self) -> Caller | None:
        """Waits for a host; None once the listener was closed. Call `end_session()` before asking
        again.
        """
        return self._callers.get()

    def end_session(self) -> None:
        """The worker is free for another host."""
        self._mailbox = None
        with contextlib.suppress(RuntimeError):
            self._has_caller.release()

    def close(self) -> None:
        """Stops accepting; safe to call again."""
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
        with contextlib.suppress(queue.Full):
            self._callers.put_nowait(None)

    def _accept_loop(self) -> None:
        self._sock.setblocking(False)
        poller = select.poll()
        poller.register(self._sock.fileno(), select.POLLIN)
        poller.register(self._stop_read, select.POLLIN | select.POLLHUP)
        while True:
            if any(descriptor == self._stop_read for descriptor, _ in poller.poll()):
                return
            try:
                accepted, _ = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue
            # out of descriptors or memory: others may free some; do not spin meanwhile
            except OSError as error:
                log.warning("cannot accept a connection: %s", error.strerror)
                time.sleep(ACCEPT_RETRY_S)
                continue
            if not self._handshakes.acquire(blocking=False):
                log.warning("refused a connection: %d handshakes are under way", MAX_UNAUTHENTICATED)
                accepted.close()
                continue
            threading.Thread(target=self._handshake, args=(accepted,), name="handshake", daemon=True).start()

    def _handshake(self, accepted: socket.socket) -> None:
        connection: Connection | None = None
        try:
            if accepted.family == socket.AF_UNIX:
                require_same_user(accepted)
            connection = Connection(accepted)
            peer = authenticate_host(connection, key_for=self._key_for, deadline=time.monotonic() + HANDSHAKE_S)
            self._dispatch(connection, peer)
        except ProtocolError as error:
            log.warning("refused a connection: %s", error)
            if connection is not None:
                with contextlib.suppress(DflashError):
                    connection.send(to_refusal(error), deadline=time.monotonic() + 1.0)
                connection.close()
        except (DflashError, OSError) as error:
            log.info("a connection ended in its handshake: %s", error)
            if connection is not None:
                connection.close()
        finally:
            self._handshakes.release()

    def _key_for(self, opening: Open) -> bytes:
        if opening.role != Role.CONTROL:
            mailbox = self._mailbox
            if mailbox is None:
                raise ProtocolError("session_id: this worker has no session")
            return mailbox.key_for(opening)
        if self._key is None:
            raise ProtocolError("role: this listener takes no control connections")
        return self._key

    def _dispatch(self, connection: Connection, peer: Peer) -> None:
        if peer.role != Role.CONTROL:
            mailbox = self._mailbox
            if mailbox is None or mailbox.session_id != peer.session_id:
                connection.close()
                return
            mailbox.deliver(peer.role, peer.generation, connection.detach())
        elif self._has_caller.acquire(blocking=False):
            self._callers.put(Caller(connection, peer))
        else:
            connection.send(busy_refusal(self._worker), deadline=time.monotonic() + 1.0)
            connection.close()


def open_listener(address: Address, *, worker: str, key: bytes | None, buffer_bytes: int = 0) -> Listener:
    """The listener of a worker started by hand; ConfigError when TCP has no key, or the address
    cannot be had.

    Unix sockets do without: the kernel vouches for the peer's uid. `buffer_bytes` as
    `open_tcp_listener`.
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
    return Listener(open_tcp_listener(address.host, address.port, buffer_bytes), worker=worker, key=key)
