"""Who gets the workers: the right user, process and token, once; everybody else a sentence.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Iterator

import pytest

from dflash_moe import _core
from dflash_moe.handover import handover_socket
from dflash_moe.handover.handover_socket import HandoverSocket
from dflash_moe.protocol.framing import Connection, PeerGone
from dflash_moe.protocol.handover import (
    HANDOVER_CODEC,
    HANDOVER_TOKEN_BYTES,
    HANDOVER_VERSION,
    OpenHandover,
    Ready,
    RefuseHandover,
)

WAIT_S = 30.0


@pytest.fixture
def server() -> Iterator[HandoverSocket]:
    made = HandoverSocket()
    yield made
    made.close()
    assert not made.path.parent.exists()
    made.close()


def token_of(server: HandoverSocket) -> bytes:
    return os.read(server.token_fd, 2 * HANDOVER_TOKEN_BYTES)


class Caller:
    """A client that sends `payload` and keeps what it is answered."""

    def __init__(self, server: HandoverSocket, payload: bytes, descriptors: tuple[int, ...] = ()) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(str(server.path))
        self.connection = Connection(sock, HANDOVER_CODEC)
        if payload:
            self.connection.send_payload(payload, deadline=time.monotonic() + WAIT_S, descriptors=descriptors)
        self.text = ""
        self.thread = threading.Thread(target=self._hear)
        self.thread.start()

    def _hear(self) -> None:
        try:
            answer = self.connection.receive(deadline=time.monotonic() + WAIT_S, waiting_for="an answer")
        except PeerGone:
            answer = None
        self.text = answer.text if isinstance(answer, RefuseHandover) else ""
        self.connection.close()


def greeting(token: bytes, version: int = HANDOVER_VERSION, layout: int | None = None) -> bytes:
    layout = _core.layout_fingerprint() if layout is None else layout
    return HANDOVER_CODEC.encode(OpenHandover(version=version, token=token, layout=layout))


def refused(server: HandoverSocket, payload: bytes, descriptors: tuple[int, ...] = ()) -> str:
    caller = Caller(server, payload, descriptors)
    assert server.accept(timeout_s=WAIT_S) is None
    caller.thread.join(WAIT_S)
    return caller.text


def test_folder_and_token_are_the_users_alone(server):
    assert stat.S_IMODE(server.path.parent.stat().st_mode) == 0o700
    inode = os.fstat(server.token_fd).st_ino
    assert server.environment() == {
        "DFLASH_MOE_HANDOVER": str(server.path), "DFLASH_MOE_HANDOVER_TOKEN_FD": f"{server.token_fd}:{inode}"
    }  # fmt: skip
    assert len(token_of(server)) == HANDOVER_TOKEN_BYTES
    assert os.read(server.token_fd, 1) == b""
    assert not os.get_inheritable(server.token_fd)


def test_right_program_is_served_once(server):
    token = token_of(server)
    server.expect(os.getpid())
    assert server.token_fd < 0
    caller = Caller(server, greeting(token))
    connection = server.accept(timeout_s=WAIT_S)
    assert connection is not None
    assert "has taken the workers already" in refused(server, greeting(token))
    connection.close()
    caller.thread.join(WAIT_S)
    assert "has taken the workers already" in refused(server, greeting(token))


def test_wrong_greetings_get_a_sentence_and_the_right_one_still_counts(server):
    token = token_of(server)
    server.expect(os.getpid())
    assert "the token is not the one" in refused(server, greeting(bytes(HANDOVER_TOKEN_BYTES)))
    assert "speaks version 3 of the hand-over" in refused(server, greeting(token, version=3))
    assert "compiled from other sources" in refused(server, greeting(token, layout=_core.layout_fingerprint() ^ 1))
    assert "expected OpenHandover, found Ready" in refused(server, HANDOVER_CODEC.encode(Ready()))
    assert "message type" in refused(server, b"\x81\x00\x7f")
    assert "not a msgpack message" in refused(server, b"\xc1")
    with open(os.devnull, "rb") as null:
        assert "announced 0 descriptors, 1 arrived" in refused(server, greeting(token), (null.fileno(),))
    caller = Caller(server, greeting(token))
    connection = server.accept(timeout_s=WAIT_S)
    assert connection is not None
    connection.close()
    caller.thread.join(WAIT_S)


def test_silent_program_is_given_up(server, monkeypatch):
    server.expect(os.getpid())
    monkeypatch.setattr(handover_socket, "GREETING_S", 0.05)
    assert "waiting for the greeting" in refused(server, b"")


def test_other_users_and_processes_are_refused_before_they_speak(server, monkeypatch):
    token = token_of(server)
    server.expect(os.getpid())
    real = handover_socket.peer_credentials
    monkeypatch.setattr(handover_socket, "peer_credentials", lambda sock: (real(sock)[0], os.geteuid() + 1, 0))
    assert f"of user {os.geteuid() + 1} asked" in refused(server, greeting(token))
    monkeypatch.setattr(handover_socket, "peer_credentials", real)
    server.expect(os.getpid() + 1)
    assert f"process {os.getpid()} asked" in refused(server, b"")


def test_nobody_comes(server):
    assert server.accept(timeout_s=0.01) is None


def test_long_folder_of_temporary_files_is_passed_over(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(handover_socket.tempfile, "tempdir", str(deep))
    made = HandoverSocket()
    assert not str(made.path).startswith(str(deep))
    made.close()
