"""What a worker that registers proves to its host, and what nobody can make of its connections.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dflash_moe import _core
from dflash_moe.errors import DflashError, ProtocolError
from dflash_moe.protocol.auth import authenticate_host, authenticate_to_worker
from dflash_moe.protocol.client_hello import MAX_HELLO_BYTES, RECORD_HEADER_BYTES, first_identity, record_bytes
from dflash_moe.protocol.encryption import Encryption
from dflash_moe.protocol.framing import Connection
from dflash_moe.protocol.keys import FileKey, worker_key
from dflash_moe.protocol.messages import Role
from dflash_moe.protocol.registering import Claim, answer_registered, dial_registered, key_of

GROUP = bytes(range(32))
OTHER = bytes(range(1, 33))
SESSION = b"s" * 16
PATIENCE_S = 10.0
Ends = tuple[Connection, Connection]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The worker's end, which dialled, and the host's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = Connection(socket.create_connection(listener.getsockname(), timeout=PATIENCE_S))
        accepted = Connection(listener.accept()[0])
    yield dialled, accepted
    dialled.close()
    accepted.close()


def soon() -> float:
    return time.monotonic() + PATIENCE_S


class Beside:
    """Does one end's part in a thread; `join` returns what came of it, or the error."""

    def __init__(self, run: Any) -> None:
        self._outcome: Any = None
        self._thread = threading.Thread(target=self._run, args=(run,))
        self._thread.start()

    def _run(self, run: Any) -> None:
        try:
            self._outcome = run()
        except DflashError as error:
            self._outcome = error

    def join(self) -> Any:
        self._thread.join(2 * PATIENCE_S)
        assert not self._thread.is_alive()
        return self._outcome


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("has_own", [False, True])
def test_the_dialler_says_who_it_is_and_inside_the_host_speaks_first(ends: Ends, role: Role, has_own: bool) -> None:
    worker, host = ends
    key = FileKey(worker_key(GROUP, "w0"), "w0") if has_own else FileKey(GROUP, "")

    def be_worker() -> Any:
        dial_registered(worker, key, worker="w0", role=role, deadline=soon())
        return authenticate_host(worker, key_for=lambda _: key.key, deadline=None, worker="w0")

    beside = Beside(be_worker)
    claim = answer_registered(host, GROUP, deadline=soon())
    assert claim == Claim("w0", role, has_own)
    assert key_of(claim, GROUP) == key.key
    peer = authenticate_to_worker(
        host, worker="w0", role=role, key=key.key, session_id=SESSION, generation=0, deadline=soon()
    )  # fmt: skip
    assert beside.join() == peer
    assert host.binding == worker.binding
    assert host.is_encrypted


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (FileKey(OTHER, ""), "w0"),
        (FileKey(worker_key(OTHER, "w0"), "w0"), "w0"),
        (FileKey(worker_key(GROUP, "w1"), "w1"), "w0"),
        (FileKey(worker_key(GROUP, "w0"), ""), "w0"),
        (FileKey(GROUP, "w0"), "w0"),
    ],
    ids=["another group", "own of another group", "own of another name", "own as the group's", "the group's as own"],
)
def test_a_key_is_good_for_what_it_is_and_for_its_name_alone(ends: Ends, key: FileKey, name: str) -> None:
    worker, host = ends
    beside = Beside(lambda: dial_registered(worker, key, worker=name, role=Role.CONTROL, deadline=soon()))
    with pytest.raises(ProtocolError, match="another key|encryption"):
        answer_registered(host, GROUP, deadline=soon())
    host.close()
    assert isinstance(beside.join(), DflashError)


def test_a_worker_that_listens_takes_no_connection_of_one_that_registers(ends: Ends) -> None:
    worker, listener = ends
    key = FileKey(GROUP, "")
    beside = Beside(lambda: dial_registered(worker, key, worker="w0", role=Role.CONTROL, deadline=soon()))
    listener.await_byte(deadline=soon(), waiting_for="the first byte")
    with pytest.raises(ProtocolError, match="registered-control w0"):
        Encryption("on", GROUP).answer(listener, worker="w0", takes_control=True, deadline=soon())
    listener.close()
    assert isinstance(beside.join(), DflashError)


def test_a_host_at_which_workers_register_takes_no_connection_of_a_host(ends: Ends) -> None:
    dialler, host = ends
    beside = Beside(lambda: Encryption("on", GROUP).dial(dialler, worker="w0", role=Role.CONTROL, deadline=soon()))
    with pytest.raises(ProtocolError, match="names no worker that registers"):
        answer_registered(host, GROUP, deadline=soon())
    host.close()
    assert isinstance(beside.join(), DflashError)


def test_a_role_is_bound_to_its_connection(ends: Ends) -> None:
    worker, host = ends

    def be_worker() -> Any:
        dial_registered(worker, FileKey(GROUP, ""), worker="w0", role=Role.DATA, deadline=soon())
        return authenticate_host(worker, key_for=lambda _: GROUP, deadline=None, worker="w0")

    beside = Beside(be_worker)
    answer_registered(host, GROUP, deadline=soon())
    with contextlib.suppress(DflashError):
        authenticate_to_worker(
            host, worker="w0", role=Role.CONTROL, key=GROUP, session_id=SESSION, generation=0, deadline=time.monotonic() + 0.2
        )
    assert "role: the connection was encrypted as" in str(beside.join())


def recorded_hello(ends: Ends) -> bytes:
    worker, host = ends
    beside = Beside(lambda: dial_registered(worker, FileKey(GROUP, ""), worker="w0", role=Role.CONTROL, deadline=soon()))
    header = host.peek_bytes(RECORD_HEADER_BYTES, deadline=soon(), waiting_for="a hello")
    record = host.peek_bytes(record_bytes(header), deadline=soon(), waiting_for="a hello")
    host.close()
    beside.join()
    return record


def test_an_opening_is_read_or_refused_whatever_it_holds(ends: Ends) -> None:
    record = recorded_hello(ends)
    assert first_identity(record) == "dflash_moe-1 registered-control w0"
    chance = random.Random(5)
    for _ in range(3000):
        changed = bytearray(record)
        for _ in range(chance.randrange(1, 4)):
            changed[chance.randrange(RECORD_HEADER_BYTES, len(changed))] = chance.randrange(256)
        with contextlib.suppress(ProtocolError):
            first_identity(bytes(changed[: chance.randrange(len(changed)) if chance.random() < 0.3 else None]))
    for size in range(len(record)):
        with contextlib.suppress(ProtocolError):
            first_identity(record[:size])
            raise AssertionError(f"an opening cut to {size} bytes was read")


@pytest.mark.parametrize("header", [b"", b"\x16\x03\x01\x00", b"\x17\x03\x01\x00\x10", b"GET /"])
def test_what_is_no_tls_is_refused_in_words(header: bytes) -> None:
    with pytest.raises(ProtocolError, match="does not begin with TLS"):
        record_bytes(header)


def test_a_large_opening_is_refused_unread() -> None:
    with pytest.raises(ProtocolError, match=f"allowed are {MAX_HELLO_BYTES}"):
        record_bytes(b"\x16\x03\x01\xff\xff")


def test_libssl_is_asked_for_one_key_alone(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, host = ends
    seen: list[Any] = []
    encrypt = Connection.encrypt

    def note(self: Connection, keys: Any, **given: Any) -> None:
        seen.append(keys)
        encrypt(self, keys, **given)

    monkeypatch.setattr(Connection, "encrypt", note)
    beside = Beside(lambda: dial_registered(worker, FileKey(GROUP, ""), worker="w0", role=Role.PULSE, deadline=soon()))
    answer_registered(host, GROUP, deadline=soon())
    beside.join()
    assert [len(keys) for keys in seen] == [1, 1]
    assert seen[0] == seen[1]
    assert _core.libssl_version()
