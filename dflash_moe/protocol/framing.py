"""Frames over a connected stream socket. A frame is a u32 little-endian length, then that many
bytes, at most 64 KiB.

Every operation has a deadline (absolute, in seconds of `time.monotonic()`), or ends when the peer
hangs up where the caller says so. Descriptors may travel beside frames on Unix sockets. Whatever
the system answers becomes a typed error.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

from dflash_moe import _core
from dflash_moe.errors import DflashError, ProtocolError, WorkerLost, WorkerTimeout
from dflash_moe.protocol.failures import descriptor_limit_text, system_failure
from dflash_moe.protocol.handover import HandoverCodec, HandoverMessage
from dflash_moe.protocol.messages import CODEC
from dflash_moe.protocol.schema import MAX_FRAME_BYTES, Codec, Message
from dflash_moe.topology.addresses import is_loopback

# A frame that began must be complete after this time, so that a slow sender cannot hold a
# connection.
FRAME_REST_S = 5.0
# An Attach carries at most 4 descriptors. A peer that leaves more than two messages' worth of them
# here is hostile.
MAX_PENDING_DESCRIPTORS = 8
# A peer that acknowledges no sent bytes for so long is gone.
USER_TIMEOUT_MS = 10_000
# Pauses before TCP sends something again double up to here, the least that Linux allows, so that a
# connection goes on within so long once a network has healed. Kernels before 6.15 do not know it
# (TCP_RTO_MAX_MS of linux/tcp.h); there the pauses go on doubling.
_TCP_RTO_MAX_MS, LONGEST_PAUSE_MS = 44, 1000
_UCRED = struct.Struct("3i")
_DESCRIPTOR_BYTES = array.array("i").itemsize
_LENGTH = struct.Struct("<I")
# The code of what an encrypted connection says that this end has closed (docs/errors.md).
_CLOSED = "closed"


def require_same_user(sock: socket.socket) -> None:
    """Raises ProtocolError unless the process at the other end of a Unix socket runs under the uid
    of this process, or as root.
    """
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid not in (os.geteuid(), 0):
        raise ProtocolError(f"uid: the peer runs as {uid}, this process as {os.geteuid()}")


def size_buffers(sock: socket.socket, num_bytes: int) -> None:
    """Sets the size of the send and receive buffers of `sock`; 0 keeps the system's own.

    TCP agrees on its windows while connecting. So this is called before `connect`, and on a
    listener, from which accepted sockets inherit the sizes.
    """
    if num_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, num_bytes)


def _tune_tcp(sock: socket.socket) -> None:
    """Has the system notice within about 10 s that a peer vanished without a word (power, network).
    Small messages leave at once.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, LONGEST_PAUSE_MS)


# What `Connection.detach` gives away: a descriptor, or an encrypted connection.
Detached = int | _core.SecureSocket


def close_detached(connection: Detached) -> None:
    """Closes a connection that nobody took."""
    if isinstance(connection, int):
        os.close(connection)
    else:
        connection.close()


class PeerGone(DflashError):
    """The other end closed the connection."""


class Connection:
    """One connection of the control plane. Any thread may send, and one thread at a time receives.

    It owns `sock` and every received descriptor that was not taken, until `close()`.
    """

    def __init__(self, sock: socket.socket, codec: Codec | HandoverCodec = CODEC) -> None:
        """Takes ownership of `sock`, on which both ends speak the messages of `codec`, by default
        those of a session. Raises PeerGone where it is not connected any more, and closes it then.
        """
        try:
            sock.setblocking(False)
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                _tune_tcp(sock)
        except OSError as error:
            sock.close()
            raise PeerGone(f"the peer hung up at once: {error.strerror}") from None
        self._sock = sock
        self._codec: Any = codec
        self._can_pass = sock.family == socket.AF_UNIX
        self._secure: _core.SecureSocket | None = None
        self._send_lock = threading.Lock()
        self._buffer = bytearray()
        self._descriptors: list[int] = []
        # Descriptors came that this process had no room for. The message itself is whole, and stays
        # readable, so that the next one begins where it should.
        self._lacks_descriptors = False
        self.ignore_unknown = False  # set once the peer announced a higher minor version

    def fileno(self) -> int:
        """Returns the descriptor of the socket, -1 after close."""
        return self._sock.fileno()

    @property
    def is_tcp(self) -> bool:
        """Whether this is a connection over TCP, which strangers can reach."""
        return self._sock.family in (socket.AF_INET, socket.AF_INET6)

    @property
    def local_host(self) -> str:
        """The numeric address of this end; empty where it has none."""
        try:
            return str(self._sock.getsockname()[0]) if self.is_tcp else ""
        except OSError:
            return ""

    @property
    def is_local(self) -> bool:
        """Whether both ends are addresses that never leave this machine. Raises PeerGone."""
        try:
            ends = (self._sock.getsockname(), self._sock.getpeername())
        except OSError as error:
            raise PeerGone(f"the peer hung up: {error.strerror}") from None
        return all(is_loopback(str(end[0])) for end in ends)

    @property
    def is_encrypted(self) -> bool:
        """Whether `encrypt` was called; nothing is sent in clear from then on."""
        return self._secure is not None

    @property
    def identity(self) -> str:
        """The identity of the key under which the connection is encrypted; empty where it is
        not.
        """
        return self._secure.identity if self._secure is not None else ""

    @property
    def binding(self) -> bytes:
        """What only the two ends of this very connection know, with its identity; empty where it is
        not encrypted.
        """
        return self._secure.channel_binding() + self._secure.identity.encode() if self._secure is not None else b""

    def peek(self) -> bytes:
        """Returns the first byte that waits, without taking it; empty where there is none."""
        with contextlib.suppress(OSError):
            return self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return b""

    def peek_bytes(self, count: int, *, deadline: float, waiting_for: str) -> bytes:
        """Waits for the first `count` bytes and returns them without taking them. For connections
        over TCP before they are encrypted. Raises PeerGone, WorkerTimeout.
        """
        try:
            # poll then wakes once so many have come, and not for each of them.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._wait(select.POLLIN, deadline, waiting_for)
            found = self._sock.recv(count, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        except OSError as error:
            raise PeerGone(f"the peer hung up while waiting for {waiting_for}: {error.strerror}") from None
        if len(found) < count:
            raise PeerGone(f"the peer hung up while waiting for {waiting_for}")
        return found

    def has_news(self) -> bool:
        """Whether something has come that was not received yet, a hang-up included. The thread that
        receives calls it.
        """
        descriptor = self._sock.fileno()  # another thread may close it meanwhile
        if self._buffer or descriptor < 0:
            return True
        if self._secure is not None:
            # Only taking the first bytes tells a message from records of TLS itself.
            try:
                received = self._secure.receive(_LENGTH.size)
            except DflashError:
                return True  # whoever receives next is told
            self._buffer += received or b""
            return received is not None
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(0))

    def discard(self) -> None:
        """Takes and forgets what has come, a frame's worth at most."""
        with contextlib.suppress(OSError):
            self._sock.recv(MAX_FRAME_BYTES, socket.MSG_DONTWAIT)

    def encrypt(self, keys: Sequence[tuple[str, bytes]], *, is_dialling: bool, deadline: float, waiting_for: str) -> None:
        """Makes the TLS handshake; whatever is sent and received afterwards is encrypted. `keys`
        are (identity, key) as SecureSocket takes them.

        Errors: ProtocolError, UnsupportedError without libssl, PeerGone, WorkerTimeout, DflashError
        naming the limit where this process is out of descriptors.
        """
        try:
            # A descriptor of its own, so that another thread can hang up all the while.
            descriptor = os.dup(self._sock.fileno())
        except OSError as error:
            raise system_failure("a connection cannot be encrypted", error) from None
        secure = self._secure = _core.SecureSocket(descriptor, is_dialling=is_dialling, keys=keys)
        try:
            while not secure.handshake():
                self._wait(select.POLLIN | (select.POLLOUT if secure.has_unsent else 0), deadline, waiting_for)
        except WorkerLost:
            raise PeerGone(f"the peer hung up while waiting for {waiting_for}") from None

    def require_same_user(self) -> None:
        """Calls the function of this name on Unix sockets. Others do not know the peer's user."""
        if self._can_pass:
            require_same_user(self._sock)

    def await_byte(self, *, deadline: float, waiting_for: str) -> None:
        """Returns as soon as something can be received, a hang-up included. Raises WorkerTimeout
        naming `waiting_for`.
        """
        self._wait(select.POLLIN, deadline, waiting_for)

    def send(self, message: Message | HandoverMessage, *, deadline: float, descriptors: Sequence[int] = ()) -> None:
        """Writes one message. Copies of the descriptors travel with it, and the caller keeps its
        own. Raises PeerGone, WorkerTimeout, and ProtocolError for a field outside its limits.
        """
        self.send_payload(self._codec.encode(message), deadline=deadline, descriptors=descriptors)

    def send_payload(self, payload: bytes, *, deadline: float, descriptors: Sequence[int] = ()) -> None:
        """Writes one frame of raw bytes. `send` uses it, and the handshake, whose transcript is
        made of these bytes.
        """
        if descriptors and not self._can_pass:
            raise ProtocolError("descriptors cannot travel on this connection: it is not a Unix socket")
        # A frame of another thread may be on its way to a peer that reads slowly.
        if not self._send_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise WorkerTimeout("deadline passed while another control message was being sent")
        try:
            self._send_all(memoryview(_LENGTH.pack(len(payload)) + payload), deadline, descriptors)
        finally:
            self._send_lock.release()

    def _send_all(self, view: memoryview, deadline: float, descriptors: Sequence[int]) -> None:
        if self._secure is not None:
            self._send_encrypted(self._secure, view, deadline)
            return
        while view:
            try:
                if descriptors:
                    sent = socket.send_fds(self._sock, [view], list(descriptors))
                    descriptors = ()
                else:
                    sent = self._sock.send(view, socket.MSG_DONTWAIT)
                view = view[sent:]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline, "sending a control message")
            except OSError as error:
                raise PeerGone(f"the peer hung up while a control message was sent: {error.strerror}") from None

    def _send_encrypted(self, secure: _core.SecureSocket, view: memoryview, deadline: float) -> None:
        try:
            view = view[secure.send(view) :]
            while view or secure.has_unsent:
                self._wait(select.POLLOUT, deadline, "sending a control message")
                view = view[secure.send(view) :]
        except WorkerLost as error:
            raise PeerGone(f"the peer hung up while a control message was sent: {error}") from None
        except DflashError as error:
            # A session that another thread has found lost is closed while this one asks.
            if error.code == _CLOSED:
                raise PeerGone("this end was closed while a control message was sent") from None
            raise

    def receive(self, *, deadline: float | None, waiting_for: str) -> Message:
        """Returns the next message. A `deadline` of None waits until the peer sends the first byte
        or hangs up; of a peer that vanished, keep-alive makes one that hung up.

        Errors: WorkerTimeout naming `waiting_for`, PeerGone, ProtocolError; DflashError naming the
        limit where descriptors came that this process may not open.
        """
        payload = self.receive_payload(deadline=deadline, waiting_for=waiting_for)
        message: Message = self._codec.decode(payload, ignore_unknown=self.ignore_unknown)
        return message

    def receive_payload(self, *, deadline: float | None, waiting_for: str) -> bytes:
        """Returns the raw bytes of the next frame, with the waits and errors of `receive`."""
        if not self._buffer:
            self._fill(_LENGTH.size, deadline, waiting_for)
        rest = time.monotonic() + FRAME_REST_S
        rest = rest if deadline is None else min(rest, deadline)
        while len(self._buffer) < _LENGTH.size:
            self._fill(_LENGTH.size, rest, waiting_for)
        (num_bytes,) = _LENGTH.unpack_from(self._buffer)
        if not 0 < num_bytes <= MAX_FRAME_BYTES:
            raise ProtocolError(f"frame: length {num_bytes} is outside 1..{MAX_FRAME_BYTES}")
        end = _LENGTH.size + num_bytes
        while len(self._buffer) < end:
            self._fill(end, rest, waiting_for)
        payload = bytes(self._buffer[_LENGTH.size :])
        self._buffer.clear()
        return payload

    def take_descriptors(self, count: int) -> list[int]:
        """Hands over exactly the descriptors that came with the last message; ProtocolError when
        their number differs, DflashError where this process had no room for them.
        """
        taken, self._descriptors = self._descriptors, []
        was_short, self._lacks_descriptors = self._lacks_descriptors, False
        if len(taken) != count:
            for descriptor in taken:
                os.close(descriptor)
            if was_short:
                text = "descriptors that came with a control message could not be taken"
                raise DflashError(f"{text}: {descriptor_limit_text()}", code="system")
            raise ProtocolError(f"message announced {count} descriptors, {len(taken)} arrived")
        return taken

    def detach(self) -> Detached:
        """Gives the connection to the caller once the handshake is over, for a data or pulse
        connection: the socket's own descriptor, or the encrypted connection. Raises ProtocolError
        if other descriptors came along.
        """
        if self._descriptors:
            raise ProtocolError("descriptors arrived in the handshake")
        if self._secure is None:
            return self._sock.detach()
        secure, self._secure = self._secure, None
        self._sock.close()
        return secure

    def hang_up(self, parting: Message | None = None) -> None:
        """Ends every wait on this connection with PeerGone. Any thread may call. `parting` is sent
        before where that takes no waiting.
        """
        if parting is not None:
            with contextlib.suppress(DflashError):
                self.send(parting, deadline=time.monotonic())
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket and all descriptors that nobody took. It may be called again."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []
        if self._secure is not None:
            self._secure.close()
        with contextlib.suppress(OSError):
            self._sock.close()

    def _fill(self, num_bytes: int, deadline: float | None, waiting_for: str) -> None:
        """Reads once towards `num_bytes` buffered bytes, and never past them, because what follows
        a handshake belongs to the data path.
        """
        wanted = num_bytes - len(self._buffer)
        while True:
            try:
                if self._secure is not None:
                    received = self._receive_decrypted(self._secure, wanted)
                elif self._can_pass:
                    received = self._receive_with_descriptors(wanted)
                else:
                    received = self._sock.recv(wanted, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait(select.POLLIN, deadline, waiting_for)
                continue
            except WorkerLost as error:
                raise PeerGone(f"the peer hung up while waiting for {waiting_for}: {error}") from None
            except DflashError as error:
                if error.code == _CLOSED:
                    raise PeerGone(f"this end was closed while waiting for {waiting_for}") from None
                raise
            except OSError as error:
                raise PeerGone(f"the peer hung up while waiting for {waiting_for}: {error.strerror}") from None
            if len(self._descriptors) > MAX_PENDING_DESCRIPTORS:
                raise ProtocolError(f"more than {MAX_PENDING_DESCRIPTORS} descriptors arrived unasked")
            if not received:
                raise PeerGone(f"the peer hung up while waiting for {waiting_for}")
            self._buffer += received
            return

    def _receive_decrypted(self, secure: _core.SecureSocket, wanted: int) -> bytes:
        received = secure.receive(wanted)
        if received is None:
            raise BlockingIOError
        return received

    def _receive_with_descriptors(self, wanted: int) -> bytes:
        # socket.recv_fds would drop its flags argument, and the descriptors would be inherited by
        # the next exec. There is room for one descriptor more than an honest peer leaves untaken,
        # so that a truncated list which does not fill it was cut by the limit of this process.
        room = MAX_PENDING_DESCRIPTORS + 1
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        received, ancillary, found, _ = self._sock.recvmsg(wanted, socket.CMSG_LEN(room * _DESCRIPTOR_BYTES), flags)
        num_received = 0
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                whole = content[: len(content) - len(content) % _DESCRIPTOR_BYTES]
                descriptors = array.array("i", whole)
                num_received += len(descriptors)
                self._descriptors.extend(descriptors)
        self._lacks_descriptors |= bool(found & socket.MSG_CTRUNC) and num_received < room
        return received

    def _wait(self, events: int, deadline: float | None, waiting_for: str) -> None:
        descriptor = self._sock.fileno()
        if descriptor < 0:
            raise PeerGone(f"this end was closed while waiting for {waiting_for}")
        poller = select.poll()
        poller.register(descriptor, events)
        if deadline is None:
            # This wait ends with the peer: it sends, it hangs up, or keep-alive finds it gone.
            poller.poll()
            return
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not poller.poll(remaining * 1000 + 1):
            raise WorkerTimeout(f"deadline passed while waiting for {waiting_for}")
