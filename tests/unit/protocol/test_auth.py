"""Authentication: each way in which a stranger could get in, tried.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dflash_moe.errors import ProtocolError, WorkerTimeout
from dflash_moe.protocol import auth
from dflash_moe.protocol.failures import to_refusal
from dflash_moe.protocol.framing import Connection, PeerGone
from dflash_moe.protocol.messages import CODEC, PROTOCOL_VERSION, Accepted, Challenge, Open, Proof, Role

KEY = bytes(range(32))
OTHER = bytes(32)
SESSION = b"s" * 16


class Pair:
    """Two connected ends; `worker` runs authenticate_host in a thread and reports refusals like a
    listener.
    """

    def __init__(self) -> None:
        host, worker = socket.socketpair()
        self.host, self.worker = Connection(host), Connection(worker)
        self.outcome: Any = None
        self.thread: threading.Thread | None = None

    def serve(self, key: bytes = KEY, seconds: float = 5.0, **arguments: Any) -> None:
        def body() -> None:
            try:
                self.outcome = auth.authenticate_host(
                    self.worker, key_for=lambda opening: key, deadline=time.monotonic() + seconds, **arguments
                )
            except (ProtocolError, PeerGone, WorkerTimeout) as error:
                self.outcome = error
                if isinstance(error, ProtocolError):
                    self.worker.send(to_refusal(error), deadline=time.monotonic() + 1)

        self.thread = threading.Thread(target=body)
        self.thread.start()

    def connect(self, key: bytes = KEY, role: Role = Role.CONTROL, generation: int = 0, **arguments: Any) -> auth.Peer:
        return auth.authenticate_to_worker(
            self.host, worker="w0", role=role, key=key, session_id=SESSION, generation=generation,
            deadline=time.monotonic() + 5, **arguments,
        )  # fmt: skip

    def join(self) -> Any:
        assert self.thread is not None
        self.thread.join(10)
        assert not self.thread.is_alive()
        return self.outcome


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.host.close()
    made.worker.close()
    if made.thread:
        made.thread.join(10)


def test_both_ends_derive_the_same_session_key_that_no_one_else_has(pair: Pair) -> None:
    pair.serve()
    host_side = pair.connect(role=Role.DATA, generation=9)
    worker_side = pair.join()
    assert host_side == worker_side
    assert (worker_side.role, worker_side.generation, worker_side.session_id) == (Role.DATA, 9, SESSION)
    assert host_side.session_key not in (KEY, OTHER)


def test_a_wrong_key_is_refused_by_the_worker_and_named_at_the_host(pair: Pair) -> None:
    pair.serve()
    with pytest.raises(ProtocolError, match="worker w0: key: the host's proof does not match"):
        pair.connect(key=OTHER)
    assert isinstance(pair.join(), ProtocolError)


def relay(change_proof: Callable[[Proof], Proof], change_open: Callable[[Open], Open]) -> Any:
    """A man in the middle between a genuine host and a genuine worker; returns the worker's
    outcome.
    """
    left, right = Pair(), Pair()
    right.serve()
    host = threading.Thread(target=lambda: _ignore(left.connect))
    host.start()
    until = time.monotonic() + 30
    opening = left.worker.receive(deadline=until, waiting_for="open")
    right.host.send(change_open(opening), deadline=until)
    challenge = right.host.receive(deadline=until, waiting_for="challenge")
    left.worker.send(challenge, deadline=until)
    proof = left.worker.receive(deadline=until, waiting_for="proof")
    right.host.send(change_proof(proof), deadline=until)
    outcome = right.join()
    for connection in (left.host, left.worker, right.host, right.worker):
        connection.close()
    host.join(10)
    return outcome


def _ignore(call: Callable[[], Any]) -> None:
    try:
        call()
    except (ProtocolError, PeerGone, WorkerTimeout):
        return


def _changed(message: Any, **fields: Any) -> Any:
    values = {item.name: getattr(message, item.name) for item in CODEC.schemas[message.TYPE].fields}
    return type(message)(**{**values, **fields})


def test_the_relay_itself_works_unchanged() -> None:
    assert isinstance(relay(lambda proof: proof, lambda opening: opening), auth.Peer)


@pytest.mark.parametrize(
    "fields",
    [{"role": int(Role.DATA)}, {"generation": 5}, {"session_id": b"t" * 16}, {"nonce": bytes(32)}, {"protocol_max": 7}],
    ids=["role", "generation", "session", "nonce", "version"],
)
def test_a_proof_is_bound_to_every_field_of_the_opening(fields: dict[str, Any]) -> None:
    outcome = relay(lambda proof: proof, lambda opening: _changed(opening, **fields))
    assert isinstance(outcome, ProtocolError)
    assert "key" in str(outcome)


def test_a_recorded_proof_cannot_be_replayed() -> None:
    recorded: list[Any] = []

    def record(message: Any) -> Any:
        recorded.append(message)
        return message

    assert isinstance(relay(record, record), auth.Peer)
    opening, proof = recorded
    again = Pair()
    again.serve()
    until = time.monotonic() + 30
    again.host.send(opening, deadline=until)
    again.host.receive(deadline=until, waiting_for="challenge")
    again.host.send(proof, deadline=until)
    assert isinstance(again.join(), ProtocolError)
    again.host.close()
    again.worker.close()


def test_a_worker_that_does_not_know_the_key_is_refused_by_the_host(pair: Pair) -> None:
    def rogue() -> None:
        until = time.monotonic() + 30
        pair.worker.receive(deadline=until, waiting_for="open")
        pair.worker.send(Challenge(protocol=PROTOCOL_VERSION, protocol_minor=0, nonce=bytes(32)), deadline=until)
        proof = pair.worker.receive(deadline=until, waiting_for="proof")
        pair.worker.send(Accepted(mac=proof.mac), deadline=until)  # reflects the host's own proof

    pair.thread = threading.Thread(target=rogue)
    pair.thread.start()
    with pytest.raises(ProtocolError, match="the peer does not know the shared key"):
        pair.connect()


def test_a_version_mismatch_names_both_ranges_before_any_key_is_used(pair: Pair) -> None:
    pair.serve(protocol_range=(3, 4))
    with pytest.raises(ProtocolError, match=r"protocol version: the host speaks 1\.\.2, this worker speaks 3\.\.4"):
        pair.connect(protocol_range=(1, 2))


def test_the_highest_common_version_is_chosen(pair: Pair) -> None:
    pair.serve(protocol_range=(1, 4))
    assert pair.connect(protocol_range=(2, 3)).protocol == 3


@pytest.mark.parametrize("sent", [b"", b"\x05", b"\x05\x00\x00\x00\x81"])
def test_a_truncated_opening_ends_at_the_deadline(pair: Pair, sent: bytes) -> None:
    raw = socket.socket(fileno=pair.host.detach())
    started = time.monotonic()
    pair.serve(seconds=0.2)
    raw.sendall(sent)
    assert isinstance(pair.join(), WorkerTimeout)
    assert time.monotonic() - started < 30
    raw.close()


def test_a_drip_feeding_stranger_is_dropped_at_the_deadline(pair: Pair) -> None:
    raw = socket.socket(fileno=pair.host.detach())
    pair.serve(seconds=0.3)
    stop = threading.Event()
    started = time.monotonic()
    raw.sendall(b"\xff\x00\x00\x00")
    while pair.thread is not None and pair.thread.is_alive() and not stop.wait(0.02):
        raw.send(b"\x81")
    assert time.monotonic() - started < 30
    assert isinstance(pair.join(), WorkerTimeout)
    raw.close()


def test_a_hang_up_in_the_middle_is_peer_gone(pair: Pair) -> None:
    pair.serve()
    raw = socket.socket(fileno=pair.host.detach())
    raw.sendall(b"\x05\x00\x00\x00\x81")
    raw.close()
    assert isinstance(pair.join(), PeerGone)
