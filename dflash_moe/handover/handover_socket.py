"""The Unix socket on which a supervisor hands its workers over, and who may take them: the one
program that it started, once.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import tempfile
import time
from pathlib import Path

from dflash_moe import _core
from dflash_moe.errors import DflashError, ProtocolError
from dflash_moe.protocol.failures import system_failure
from dflash_moe.protocol.framing import Connection, PeerGone
from dflash_moe.protocol.handover import (
    HANDOVER_CODEC,
    HANDOVER_TOKEN_BYTES,
    HANDOVER_VERSION,
    OpenHandover,
    RefuseHandover,
    message_name,
)

PATH_VARIABLE = "DFLASH_MOE_HANDOVER"
TOKEN_VARIABLE = "DFLASH_MOE_HANDOVER_TOKEN_FD"
# A program that dials has its greeting ready.
GREETING_S = 5.0
# A refusal is a few hundred bytes, which a fresh socket always has room for. Its reader may still
# be sending the greeting and gets so long to read the answer before the connection is closed.
REFUSAL_S = 1.0
# More programs than this never wait: one dials, and strangers are turned away at once.
BACKLOG = 8
# The address of a Unix socket holds 107 bytes; mkdtemp appends 8 letters to the prefix.
_PREFIX, _NAME = "dflash-moe-", "handover"
_LONGEST_PLACE = 107 - len(f"/{_PREFIX}12345678/{_NAME}")
_UCRED = struct.Struct("3i")


class HandoverSocket:
    """Owns the socket, its folder and the token's pipe. `close` removes all of them; the connection
    that `accept` returned is the caller's. One thread calls `accept`.
    """

    def __init__(self) -> None:
        """Makes a folder of mode 0700 with a socket in it. Raises DflashError naming what the
        system refused.
        """
        self._token = secrets.token_bytes(HANDOVER_TOKEN_BYTES)
        self._pid = 0
        self._is_taken = False
        with contextlib.ExitStack() as undo:
            try:
                self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_place()))
                undo.callback(os.rmdir, self._folder)
                self.path = self._folder / _NAME
                self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                undo.callback(self._listener.close)
                self._listener.bind(str(self.path))
                undo.callback(os.unlink, self.path)
                self._listener.listen(BACKLOG)
                self._listener.setblocking(False)
                self.token_fd, write_fd = os.pipe()
                with contextlib.closing(os.fdopen(write_fd, "wb", buffering=0)) as pipe:
                    pipe.write(self._token)
            except OSError as error:
                raise system_failure("the socket of the hand-over could not be made", error) from None
            undo.pop_all()

    def environment(self) -> dict[str, str]:
        """Returns the variables in which the program finds the socket and the token's pipe. The
        program inherits `token_fd` under the same number.
        """
        # With its inode, because a program may have started others, which inherit the variable and
        # maybe another pipe of this number.
        token = f"{self.token_fd}:{os.fstat(self.token_fd).st_ino}"
        return {PATH_VARIABLE: str(self.path), TOKEN_VARIABLE: token}

    def expect(self, pid: int) -> None:
        """Says which process may take the workers, a child of this one. It has its own copy of the
        token's pipe by now.
        """
        self._pid = pid
        self._close_token()

    def accept(self, *, timeout_s: float) -> Connection | None:
        """Waits for the program at most `timeout_s`. Returns its connection once, when it has
        proved itself; None where nobody came, or somebody who was turned away.
        """
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        if not poller.poll(timeout_s * 1000):
            return None
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it hung up meanwhile, or this process is out of descriptors
            time.sleep(min(timeout_s, 0.05))
            return None
        try:
            connection = Connection(sock, HANDOVER_CODEC)
        except PeerGone:
            return None
        try:
            refusal = self._examine(sock) or self._greet(connection)
        except DflashError as error:
            refusal = f"the greeting failed: {error}"
        if not refusal:
            self._is_taken = True
            return connection
        _turn_away(connection, refusal)
        return None

    def _examine(self, sock: socket.socket) -> str:
        """Returns why the process at the other end gets nothing; empty where it may greet."""
        pid, uid, _ = peer_credentials(sock)
        if uid != os.geteuid():
            return f"the workers are for user {os.geteuid()}; process {pid} of user {uid} asked"
        if pid != self._pid:
            return (
                f"the workers are for process {self._pid}, which dflash-moe llama started; process {pid} asked; give the "
                "program itself instead of one that starts it, or have a script replace itself by it (exec)"
            )
        if self._is_taken:
            return f"process {pid} has taken the workers already; one client takes them, once"
        return ""

    def _greet(self, connection: Connection) -> str:
        greeting = connection.receive(deadline=time.monotonic() + GREETING_S, waiting_for="the greeting")
        connection.take_descriptors(0)
        if not isinstance(greeting, OpenHandover):
            raise ProtocolError(f"expected OpenHandover, found {message_name(greeting)}")
        if greeting.version != HANDOVER_VERSION:
            return (
                f"the program's library speaks version {greeting.version} of the hand-over, this supervisor "
                f"{HANDOVER_VERSION}; build both from one version of dflash_moe"
            )
        if greeting.layout != _core.layout_fingerprint():
            return (
                "the program's library was compiled from other sources of dflash_moe than this supervisor; build it again: "
                "make ggml LLAMA_CPP=DIR for the plug-in, make for libdflash_moe.so"
            )
        if not hmac.compare_digest(greeting.token, self._token):
            return "the token is not the one that the program inherited"
        return ""

    def close(self) -> None:
        """Removes socket and folder. It may be called again."""
        self._close_token()
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        with contextlib.suppress(OSError):
            os.rmdir(self._folder)

    def _close_token(self) -> None:
        if self.token_fd >= 0:
            os.close(self.token_fd)
            self.token_fd = -1


def _place() -> str:
    """Returns the folder for temporary files, or /tmp where its path leaves too little room."""
    place = tempfile.gettempdir()
    return place if len(os.fsencode(place)) <= _LONGEST_PLACE else "/tmp"  # noqa: S108 - mode 0700 below


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Returns process, user and group of who connected a Unix socket."""
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid, gid


def _turn_away(connection: Connection, text: str) -> None:
    """Says why and closes, after the other end has read it or had the time to."""
    deadline = time.monotonic() + REFUSAL_S
    with contextlib.closing(connection), contextlib.suppress(DflashError):
        connection.send(RefuseHandover(text=text), deadline=deadline)
        while True:
            connection.receive_payload(deadline=deadline, waiting_for="the end")
