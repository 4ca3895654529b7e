"""Who has to go when too many connections have not proved the key, and what that does to a host.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from dflash_moe.errors import WorkerLost
from dflash_moe.holders import dialing
from dflash_moe.holders.dialing import CallOff, Credentials, connect_authenticated
from dflash_moe.protocol.auth import authenticate_host
from dflash_moe.protocol.doorway import FIRST_BYTE_S, Complaints
from dflash_moe.protocol.failures import CROWDED
from dflash_moe.protocol.framing import Connection
from dflash_moe.protocol.messages import Refusal, Role
from dflash_moe.protocol.strangers import MAX_STRANGERS, PART_PER_ORIGIN, Stranger, Strangers, origin_of
from dflash_moe.protocol.tcp_sockets import open_tcp_listener
from dflash_moe.topology.addresses import Address
from dflash_moe.workers.listener import Listener

KEY = b"k" * 32
MAX_PER_ORIGIN = MAX_STRANGERS // PART_PER_ORIGIN
CREDENTIALS = Credentials(Role.CONTROL, KEY, b"s" * 16)


class Crowd:
    """Strangers of several origins; their connections are pairs nobody uses."""

    def __init__(self) -> None:
        self.strangers = Strangers()
        self.sockets: list[socket.socket] = []

    def come(self, origin: str) -> tuple[Stranger, Stranger | None]:
        ours, theirs = socket.socketpair()
        self.sockets += [ours, theirs]
        stranger = Stranger(Connection(ours), origin)
        return stranger, self.strangers.admit(stranger)


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    made = Crowd()
    yield made
    for sock in made.sockets:
        sock.close()


def test_the_oldest_goes_when_there_are_too_many(crowd: Crowd) -> None:
    there = [crowd.come(f"10.0.0.{number}") for number in range(MAX_STRANGERS)]
    assert all(displaced is None for _, displaced in there)
    _, displaced = crowd.come("10.0.1.1")
    assert displaced is there[0][0]
    assert displaced.was_displaced
    assert not crowd.strangers.leave(displaced)


def test_one_address_displaces_its_own(crowd: Crowd) -> None:
    other, _ = crowd.come("10.0.0.1")
    first, _ = crowd.come("10.0.0.2")
    for _ in range(MAX_PER_ORIGIN - 1):
        crowd.come("10.0.0.2")
    assert crowd.come("10.0.0.2")[1] is first
    assert crowd.strangers.leave(other)


def test_the_fullest_address_gives_way_to_a_new_one(crowd: Crowd) -> None:
    for number in range(MAX_STRANGERS - MAX_PER_ORIGIN):
        crowd.come(f"10.0.0.{number}")
    first_of_many, _ = crowd.come("10.0.9.9")
    for _ in range(MAX_PER_ORIGIN - 1):
        crowd.come("10.0.9.9")
    assert crowd.come("10.0.5.5")[1] is first_of_many


def test_who_said_nothing_goes_before_who_spoke(crowd: Crowd) -> None:
    there = [crowd.come("10.0.0.1")[0] for _ in range(MAX_PER_ORIGIN)]
    there[0].has_spoken = there[1].has_spoken = True
    assert crowd.come("10.0.0.1")[1] is there[2]


def test_addresses_of_one_site_are_one_origin() -> None:
    assert origin_of(("2001:db8::1", 1, 0, 0)) == origin_of(("2001:db8::ffff:1", 2, 0, 0)) == "2001:db8::/64"
    assert origin_of(("2001:db8:0:1::1", 1, 0, 0)) != origin_of(("2001:db8::1", 1, 0, 0))
    assert origin_of(("::ffff:10.0.0.1", 1, 0, 0)) == origin_of(("10.0.0.1", 2)) == "10.0.0.1"
    assert origin_of(("fe80::1%eth0", 1, 0, 2)) == "fe80::/64"
    assert origin_of("") == ""


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener(open_tcp_listener("127.0.0.1", 0), worker="far", key=KEY)
    yield made
    made.close()


def address_of(listener: Listener) -> Address:
    return Address("tcp", host="127.0.0.1", port=listener.port)


def calls(listener: Listener, num_silent: int) -> Iterator[socket.socket]:
    for _ in range(num_silent):
        yield socket.create_connection(("127.0.0.1", listener.port), timeout=5)


def test_a_silent_connection_is_dropped_after_a_second(listener: Listener) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        stranger.settimeout(FIRST_BYTE_S + 30)
        assert stranger.recv(1) == b""


def test_silent_connections_that_come_back_never_keep_a_host_out(listener: Listener) -> None:
    over = threading.Event()

    def pester() -> None:
        with contextlib.ExitStack() as held:
            for stranger in calls(listener, MAX_STRANGERS):
                held.enter_context(stranger)
            while not over.is_set():
                with contextlib.ExitStack() as again:
                    for stranger in calls(listener, MAX_STRANGERS):
                        again.enter_context(stranger)

    thread = threading.Thread(target=pester)
    thread.start()
    try:
        for _ in range(6):
            connection, _ = connect_authenticated(
                "far", address_of(listener), CREDENTIALS, deadline=time.monotonic() + 30, call_off=CallOff()
            )
            caller = listener.next_caller()
            assert caller is not None
            connection.close()
            caller.connection.close()
            listener.end_session(caller)
    finally:
        over.set()
        thread.join(20)
    assert not thread.is_alive()


def test_a_displaced_connection_is_told_why(listener: Listener) -> None:
    with socket.create_connection(("127.0.0.1", listener.port), timeout=5) as first, contextlib.ExitStack() as others:
        for stranger in calls(listener, MAX_PER_ORIGIN):
            others.enter_context(stranger)
        connection = Connection(first)
        answer = connection.receive(deadline=time.monotonic() + 5, waiting_for="the refusal")
        assert isinstance(answer, Refusal)
        assert answer.code == CROWDED
        assert "worker far dropped this connection before it had proved the key" in answer.text


class Dropping:
    """A listener that drops its first connections unread, and authenticates the one after those."""

    def __init__(self, num_dropped: int | None) -> None:
        """None: it drops all of them."""
        self._sock = open_tcp_listener("127.0.0.1", 0)
        self.address = Address("tcp", host="127.0.0.1", port=self._sock.getsockname()[1])
        self._num_dropped = num_dropped
        self._is_over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        num_accepted = 0
        while not self._is_over:
            accepted, _ = self._sock.accept()
            num_accepted += 1
            if self._num_dropped is not None and num_accepted > self._num_dropped:
                connection = Connection(accepted)
                authenticate_host(connection, key_for=lambda _: KEY, deadline=time.monotonic() + 30)
                connection.close()
                return
            accepted.close()

    def close(self) -> None:
        self._is_over = True
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.address.port), timeout=5).close()
        self._thread.join(30)
        self._sock.close()
        assert not self._thread.is_alive()


def test_a_handshake_that_was_cut_short_is_tried_again() -> None:
    dropping = Dropping(num_dropped=3)
    try:
        deadline = time.monotonic() + 60
        connection, _ = connect_authenticated("far", dropping.address, CREDENTIALS, deadline=deadline, call_off=CallOff())
        connection.close()
    finally:
        dropping.close()


class Unhurried(CallOff):
    """The pauses of its tries grow as they do, and take no time."""

    def pause(self, seconds: float) -> bool:
        return True


def test_a_host_that_never_gets_through_says_how_often_it_tried_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    # The try whose pause would not end in time is the last, and has itself all the time it needs.
    monkeypatch.setattr(dialing, "LONGEST_PAUSE_S", 600.0)
    dropping = Dropping(num_dropped=None)
    said = (
        r"worker far at tcp://.* dropped each of \d+ connections before their handshake was over, .* strangers without its key"
    )
    try:
        with pytest.raises(WorkerLost, match=said):
            connect_authenticated("far", dropping.address, CREDENTIALS, deadline=time.monotonic() + 60, call_off=Unhurried())
    finally:
        dropping.close()


def test_a_dialling_that_was_given_up_ends_at_once() -> None:
    dropping = Dropping(num_dropped=None)
    call_off = CallOff()
    threading.Timer(0.1, call_off.give_up).start()
    try:
        with pytest.raises(WorkerLost, match="the start was given up"):
            connect_authenticated("far", dropping.address, CREDENTIALS, deadline=time.monotonic() + 60, call_off=call_off)
    finally:
        dropping.close()


def test_strangers_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints()
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            complaints.log("refused")
        complaints._quiet_until = 0.0
        complaints.log("refused")
    assert [record.message for record in caplog.records] == ["refused", "refused (and 99 more such lines, withheld)"]
