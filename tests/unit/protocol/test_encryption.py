"""Which connections are encrypted, with whose keys, and what everybody else gets.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_moe import _core
from dflash_moe.config import resolve_settings
from dflash_moe.errors import ConfigError, DflashError, ProtocolError, UnsupportedError
from dflash_moe.protocol import auth, encryption
from dflash_moe.protocol.encryption import LABELS, REGISTERED_LABELS, Encryption, identity_of, psk_of, require_library
from dflash_moe.protocol.failures import to_refusal
from dflash_moe.protocol.framing import Connection, PeerGone
from dflash_moe.protocol.messages import Role
from dflash_moe.topology import Topology
from dflash_moe.topology.addresses import is_loopback, parse_address

KEY = bytes(range(32))
OTHER = bytes(range(1, 33))
SESSION = b"s" * 16
PATIENCE_S = 10.0


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection over the loopback interface: the dialled one, the accepted one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname(), timeout=PATIENCE_S)
        return dialled, listener.accept()[0]


class WorkerEnd:
    """The worker's half of a connection in a thread: encryption, then authentication. `outcome` is
    what the latter returned, or the error.
    """

    def __init__(self, sock: socket.socket, setting: str = "on", key: bytes = KEY, worker: str = "w0") -> None:
        self.connection = Connection(sock)
        self.outcome: Any = None
        self._encryption = Encryption(setting, key)
        self._worker = worker
        self._key = key
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        try:
            self.connection.await_byte(deadline=deadline, waiting_for="the host")
            self._encryption.answer(self.connection, worker=self._worker, takes_control=True, deadline=deadline)
            self.outcome = auth.authenticate_host(self.connection, key_for=lambda _: self._key, deadline=deadline)
        except DflashError as error:
            self.outcome = error
            with contextlib.suppress(DflashError):
                self.connection.send(to_refusal(error), deadline=deadline)
            self.connection.close()

    def join(self) -> Any:
        self._thread.join(2 * PATIENCE_S)
        assert not self._thread.is_alive()
        return self.outcome


class HostEnd:
    """The host's half: `connect` returns the Peer."""

    def __init__(self, sock: socket.socket, setting: str = "on", key: bytes = KEY) -> None:
        self.connection = Connection(sock)
        self._encryption = Encryption(setting, key)
        self._key = key

    def connect(self, worker: str = "w0", role: Role = Role.CONTROL, opened_as: Role | None = None) -> auth.Peer:
        deadline = time.monotonic() + PATIENCE_S
        self._encryption.dial(self.connection, worker=worker, role=role, deadline=deadline)
        return auth.authenticate_to_worker(
            self.connection, worker=worker, role=opened_as or role, key=self._key, session_id=SESSION, generation=0,
            deadline=deadline,
        )  # fmt: skip


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = tcp_pair()
    yield pair
    for end in pair:
        end.close()


Ends = tuple[socket.socket, socket.socket]


@pytest.mark.parametrize("role", list(Role))
def test_both_ends_of_an_encrypted_connection_agree_and_speak(ends: Ends, role: Role) -> None:
    worker, host = WorkerEnd(ends[1]), HostEnd(ends[0])
    peer = host.connect(role=role)
    assert worker.join() == peer
    assert host.connection.identity == worker.connection.identity == f"dflash_moe-1 {LABELS[role]} w0"
    assert host.connection.binding == worker.connection.binding
    sent = bytes(range(256)) * 250
    deadline = time.monotonic() + PATIENCE_S
    for _ in range(3):
        host.connection.send_payload(sent, deadline=deadline)
    for _ in range(3):
        assert worker.connection.receive_payload(deadline=deadline, waiting_for="a message") == sent
    worker.connection.close()
    with pytest.raises(PeerGone, match="hung up"):
        host.connection.receive_payload(deadline=deadline, waiting_for="nothing")
    host.connection.close()


def test_an_end_that_was_closed_has_lost_its_peer_for_whoever_still_asks(ends: Ends) -> None:
    """Another thread closes a session that it has found lost."""
    worker, host = WorkerEnd(ends[1]), HostEnd(ends[0])
    host.connect()
    worker.join()
    deadline = time.monotonic() + PATIENCE_S
    host.connection.close()
    with pytest.raises(PeerGone, match="this end was closed while a control message was sent"):
        host.connection.send_payload(b"x", deadline=deadline)
    with pytest.raises(PeerGone, match="this end was closed while waiting for an answer"):
        host.connection.receive_payload(deadline=deadline, waiting_for="an answer")
    worker.connection.close()


def test_news_under_encryption_are_messages_and_hang_ups_and_nothing_of_them_is_lost(ends: Ends) -> None:
    worker, host = WorkerEnd(ends[1]), HostEnd(ends[0])
    host.connect()
    worker.join()
    deadline = time.monotonic() + PATIENCE_S
    for sent in (b"x", bytes(range(256))):
        assert not worker.connection.has_news()
        assert not host.connection.has_news()
        host.connection.send_payload(sent, deadline=deadline)
        worker.connection.await_byte(deadline=deadline, waiting_for="a message")
        assert worker.connection.has_news()
        assert worker.connection.has_news()
        assert worker.connection.receive_payload(deadline=deadline, waiting_for="a message") == sent
    host.connection.close()
    worker.connection.await_byte(deadline=deadline, waiting_for="the end")
    assert worker.connection.has_news()
    with pytest.raises(PeerGone):
        worker.connection.receive_payload(deadline=deadline, waiting_for="the end")
    worker.connection.close()


@pytest.mark.parametrize(
    ("at_host", "at_worker", "is_encrypted"),
    [("on", "on", True), ("on", "auto", True), ("auto", "auto", False), ("auto", "off", False), ("off", "auto", False)],
)
def test_over_loopback_auto_leaves_it_to_the_host(ends: Ends, at_host: str, at_worker: str, is_encrypted: bool) -> None:
    worker, host = WorkerEnd(ends[1], at_worker), HostEnd(ends[0], at_host)
    assert host.connect() == worker.join()
    assert host.connection.is_encrypted == worker.connection.is_encrypted == is_encrypted


def test_auto_encrypts_beyond_loopback_and_refuses_who_does_not(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "is_local", False)
    worker, host = WorkerEnd(ends[1], "auto"), HostEnd(ends[0], "auto")
    assert host.connect() == worker.join()
    assert host.connection.is_encrypted
    again = tcp_pair()
    worker, host = WorkerEnd(again[1], "auto"), HostEnd(again[0], "off")
    with pytest.raises(ProtocolError, match=r"worker w0 wants encrypted connections here \(ipc.encryption: auto\)"):
        host.connect()
    worker.join()
    host.connection.close()


def test_ends_with_other_settings_are_told_the_setting_before_anything_moves(ends: Ends) -> None:
    worker, host = WorkerEnd(ends[1], "on"), HostEnd(ends[0], "off")
    with pytest.raises(ProtocolError, match=r"ipc.encryption: worker w0 wants .* and the host does not encrypt; set"):
        host.connect()
    assert "ipc.encryption" in str(worker.join())
    other = tcp_pair()
    worker, host = WorkerEnd(other[1], "off"), HostEnd(other[0], "on")
    with pytest.raises(
        ProtocolError, match="worker w0: .*the peer answered without TLS; set ipc.encryption alike at both ends"
    ):
        host.connect()
    assert "takes no encrypted connections (ipc.encryption: off), and the host encrypts" in str(worker.join())
    host.connection.close()


def test_another_key_is_refused_and_named_at_both_ends(ends: Ends) -> None:
    worker, host = WorkerEnd(ends[1], key=KEY), HostEnd(ends[0], key=OTHER)
    with pytest.raises(ProtocolError, match="worker w0: .*the peer has another key: check the key file on both ends"):
        host.connect()
    assert "has another key" in str(worker.join())


def test_another_name_is_refused_and_named_at_both_ends(ends: Ends) -> None:
    worker, host = WorkerEnd(ends[1], worker="w1"), HostEnd(ends[0])
    with pytest.raises(ProtocolError, match="worker w0: .*does not take this role and worker name"):
        host.connect()
    assert 'the peer asked for "dflash_moe-1 control w0", which is not this worker\'s' in str(worker.join())


def test_a_connection_of_one_role_cannot_be_opened_as_another(ends: Ends) -> None:
    worker, host = WorkerEnd(ends[1]), HostEnd(ends[0])
    with pytest.raises(ProtocolError, match="role: the connection was encrypted as .*data w0.*, its opening says control"):
        host.connect(role=Role.DATA, opened_as=Role.CONTROL)
    assert isinstance(worker.join(), ProtocolError)


def test_a_listener_that_takes_no_control_connections_has_no_key_for_them(ends: Ends) -> None:
    host = Connection(ends[0])
    outcome: list[DflashError] = []

    def accept() -> None:
        worker = Connection(ends[1])
        deadline = time.monotonic() + PATIENCE_S
        worker.await_byte(deadline=deadline, waiting_for="the host")
        try:
            Encryption("on", KEY).answer(worker, worker="w0", takes_control=False, deadline=deadline)
        except DflashError as error:
            outcome.append(error)

    thread = threading.Thread(target=accept)
    thread.start()
    with pytest.raises(ProtocolError, match="role and worker name"):
        Encryption("on", KEY).dial(host, worker="w0", role=Role.CONTROL, deadline=time.monotonic() + PATIENCE_S)
    thread.join(PATIENCE_S)
    assert "control w0" in str(outcome[0])


class Between:
    """Somebody on the path who knows the key file too, as another worker of the same key does: it
    ends TLS on both sides and passes on what is said inside.
    """

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self._near, self._far = Connection(near), Connection(far)
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        mine = Encryption("on", KEY)
        self._near.await_byte(deadline=deadline, waiting_for="the host")
        mine.answer(self._near, worker="w0", takes_control=True, deadline=deadline)
        mine.dial(self._far, worker="w0", role=Role.CONTROL, deadline=deadline)
        back = threading.Thread(target=self._pass, args=(self._far, self._near, deadline))
        back.start()
        self._pass(self._near, self._far, deadline)
        back.join(PATIENCE_S)

    def _pass(self, source: Connection, to: Connection, deadline: float) -> None:
        try:
            while True:
                to.send_payload(source.receive_payload(deadline=deadline, waiting_for="words"), deadline=deadline)
        except DflashError:
            to.hang_up()

    def join(self) -> None:
        self._threads[0].join(2 * PATIENCE_S)
        assert not self._threads[0].is_alive()
        self._near.close()
        self._far.close()


def test_proofs_cannot_be_relayed_between_two_connections(ends: Ends) -> None:
    right = tcp_pair()
    between = Between(ends[1], right[0])
    worker, host = WorkerEnd(right[1]), HostEnd(ends[0])
    with pytest.raises(ProtocolError, match="the host's proof does not match"):
        host.connect()
    assert isinstance(worker.join(), ProtocolError)
    host.connection.close()
    between.join()


class Recorder:
    """Passes bytes on between two sockets and keeps those of the host."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.said = b""
        self._ends = (near, far)
        self._threads = [
            threading.Thread(target=self._pass, args=(near, far, True)),
            threading.Thread(target=self._pass, args=(far, near, False)),
        ]
        for thread in self._threads:
            thread.start()

    def _pass(self, source: socket.socket, to: socket.socket, is_kept: bool) -> None:
        with contextlib.suppress(OSError):
            while received := source.recv(65536):
                if is_kept:
                    self.said += received
                to.sendall(received)
        with contextlib.suppress(OSError):
            to.shutdown(socket.SHUT_RDWR)

    def join(self) -> bytes:
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for end in self._ends:
            end.close()
        return self.said


def test_a_recorded_conversation_cannot_be_played_again(ends: Ends) -> None:
    right = tcp_pair()
    recorder = Recorder(ends[1], right[0])
    worker, host = WorkerEnd(right[1]), HostEnd(ends[0])
    assert host.connect() == worker.join()
    host.connection.close()
    worker.connection.close()
    said = recorder.join()
    assert len(said) > 300
    assert KEY not in said
    assert SESSION not in said  # the inner handshake does not travel in clear
    dialled, accepted = tcp_pair()
    again = WorkerEnd(accepted)
    dialled.sendall(said)
    dialled.shutdown(socket.SHUT_WR)
    assert isinstance(again.join(), DflashError)
    dialled.close()


def test_a_handshake_cannot_be_reflected() -> None:
    """Selfie (RFC 9257, section 4.1): the dialled end is this host itself."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = Connection(socket.create_connection(listener.getsockname(), timeout=PATIENCE_S))
        second = Connection(listener.accept()[0])
    deadline = time.monotonic() + PATIENCE_S
    outcome: list[DflashError] = []

    def dial() -> None:
        try:
            Encryption("on", KEY).dial(second, worker="w0", role=Role.CONTROL, deadline=deadline)
        except DflashError as error:
            outcome.append(error)

    thread = threading.Thread(target=dial)
    thread.start()
    with pytest.raises(DflashError):
        Encryption("on", KEY).dial(first, worker="w0", role=Role.CONTROL, deadline=deadline)
    first.close()
    thread.join(PATIENCE_S)
    assert len(outcome) == 1
    second.close()


def test_every_role_and_worker_has_a_key_of_its_own_and_none_is_the_shared_one() -> None:
    labels = [*LABELS.values(), *REGISTERED_LABELS.values()]
    keys = {psk_of(key, label, worker) for key in (KEY, OTHER) for label in labels for worker in ("w0", "w1", "w", "control")}
    assert len(labels) == 6
    assert len(keys) == 2 * 6 * 4
    assert all(len(key) == 32 for key in keys)
    assert not {KEY, OTHER} & keys
    assert identity_of("control", "w0") != identity_of("control w0", "")
    # HKDF-SHA256 as `openssl kdf` computes it: both ends of every version need it.
    assert psk_of(KEY, "data", "w0").hex() == "6493a7cb99655ecf8a20a352ff0b18fdbb1f8727bccdfa15b0dace1021da3f05"


def test_the_setting_is_read_from_yaml_flags_and_environment() -> None:
    for text, value in (("on", "on"), ("off", "off"), ("auto", "auto")):
        topology = Topology.parse(f"version: 1\nipc: {{encryption: {text}}}\nworkers: [{{name: w0}}]\n")
        assert resolve_settings(topology.stated_settings).encryption == value
    assert resolve_settings({}, environ={"DFLASH_MOE_EXPERT_COMPUTE_IPC_ENCRYPTION": "Off"}).encryption == "off"
    assert resolve_settings({}).encryption == "auto"


def test_without_libssl_a_machine_refuses_to_start_beyond_loopback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    version = _core.libssl_version
    with pytest.raises(UnsupportedError, match=r"libssl\.so\.none.* was not found.*package libssl3.*ipc\.encryption: off"):
        version("libssl.so.none")
    monkeypatch.setattr(encryption._core, "libssl_version", lambda: version("libssl.so.none"))
    for setting, address in (("auto", "tcp://192.0.2.1:7171"), ("on", "tcp://127.0.0.1:7171"), ("auto", "tcp://0.0.0.0:0")):
        with pytest.raises(ConfigError, match="worker w0 at tcp://.*package libssl3"):
            require_library(setting, parse_address(address), who="worker w0")
    for setting, address in (
        ("off", "tcp://192.0.2.1:7171"), ("auto", "tcp://127.0.0.1:7171"), ("on", f"unix://{tmp_path}/w"), ("on", "unix"),
    ):  # fmt: skip
        require_library(setting, parse_address(address), who="worker w0")


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.9", True), ("::1", True), ("::ffff:127.0.0.1", True), ("10.0.0.1", False), ("fe80::1%eth0", False)],
)
def test_loopback_is_told_from_the_rest(host: str, is_local: bool) -> None:
    assert is_loopback(host) == is_local
