"""The host's session with workers that answer late, lie, or count for ever: every wait ends, in the
error that says why.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from dflash_moe import _core
from dflash_moe.errors import DflashError, ProtocolError, WorkerLost, WorkerTimeout
from dflash_moe.holders.session import HostSession
from dflash_moe.protocol import auth
from dflash_moe.protocol.auth import authenticate_host
from dflash_moe.protocol.failures import to_refusal
from dflash_moe.protocol.framing import Connection, PeerGone
from dflash_moe.protocol.identity import CAPABILITIES, local_identity
from dflash_moe.protocol.messages import (
    PANELS_SINCE,
    Attach,
    Attached,
    Checksum,
    ChecksumRequest,
    ComputeRow,
    Hello,
    HelloReply,
    Listening,
    LoadShard,
    Progress,
    RowComputed,
    ShardLoaded,
    Stats,
    StatsRequest,
    compress_experts,
)
from dflash_moe.protocol.schema import Message
from dflash_moe.topology.addresses import Address

KEY = b"k" * 32
SLOTS = _core.SlotPlan(num_slots=2, rows=16, request_bytes=4096, reply_bytes=4096)
WAIT_S = 30.0
OURS = local_identity("w0", "model")
HELLO_REPLY = HelloReply(
    package_version="1", worker="w0", numerics_class="f32-canonical", model_fingerprint=OURS.model_fingerprint,
    wire_limits=dict(OURS.wire_limits), dtypes=OURS.dtypes, capabilities=CAPABILITIES, isa="scalar", threads=1, pid=1,
    memory_available=0,
)  # fmt: skip


class Puppet:
    """The worker's end of a session, moved by the test."""

    def __init__(self, sock: socket.socket) -> None:
        self.connection = Connection(sock)
        self._thread: threading.Thread | None = None

    def authenticate(self) -> None:
        authenticate_host(self.connection, key_for=lambda _: KEY, deadline=time.monotonic() + WAIT_S)

    def welcome(self) -> None:
        self.authenticate()
        self.answer_hello()

    def answer_hello(self) -> None:
        assert isinstance(self.takes(), Hello)
        self.says(HELLO_REPLY)

    def does(self, act: Callable[[], None]) -> None:
        """Acts in a thread of its own until the host hangs up."""

        def run() -> None:
            with contextlib.suppress(PeerGone):
                act()

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def takes(self) -> Message:
        return self.connection.receive(deadline=time.monotonic() + WAIT_S, waiting_for="a question")

    def says(self, message: Message) -> None:
        self.connection.send(message, deadline=time.monotonic() + WAIT_S)

    def end(self) -> None:
        self.connection.hang_up()
        if self._thread is not None:
            self._thread.join(WAIT_S)
            assert not self._thread.is_alive()
        self.connection.close()


def greet(session: HostSession) -> None:
    session.greet(
        OURS, numerics="f32-canonical", threads=1, spin_ns=0, slowdown=1.0, isa="scalar", timeout_s=WAIT_S
    )  # fmt: skip


@pytest.fixture
def starting() -> Iterator[tuple[HostSession, Puppet]]:
    ours, theirs = socket.socketpair()
    started = SimpleNamespace(
        control=ours, key=KEY, process=SimpleNamespace(pid=0), log=SimpleNamespace(tail=lambda: ""),
        describe_exit=lambda **_: "a puppet", close=lambda **_: ours.close(), kill=lambda: None,
    )  # fmt: skip
    session = HostSession("w0", Address("shared"), started=started, key=None)
    puppet = Puppet(theirs)
    yield session, puppet
    session.close(seconds=0.0)
    puppet.end()


@pytest.fixture
def worker(starting: tuple[HostSession, Puppet]) -> tuple[HostSession, Puppet]:
    session, puppet = starting
    puppet.does(puppet.welcome)
    session.connect(timeout_s=WAIT_S)
    greet(session)
    assert puppet._thread is not None
    puppet._thread.join(WAIT_S)
    return session, puppet


@pytest.mark.parametrize("minor", [PANELS_SINCE - 1, PANELS_SINCE])
@pytest.mark.parametrize("layout", ["auto", "stored", "packed", "mapped"])
def test_a_worker_of_a_version_without_panels_is_asked_for_packed_weights(
    starting: tuple[HostSession, Puppet], monkeypatch: pytest.MonkeyPatch, layout: str, minor: int
) -> None:
    session, puppet = starting
    monkeypatch.setattr(auth, "PROTOCOL_MINOR", minor)
    asked: list[str] = []

    def welcome() -> None:
        puppet.authenticate()
        hello = puppet.takes()
        assert isinstance(hello, Hello)
        asked.append(hello.weights_layout)
        puppet.says(HELLO_REPLY)

    puppet.does(welcome)
    session.connect(timeout_s=WAIT_S)
    session.greet(
        OURS, numerics="f32-canonical", threads=1, spin_ns=0, slowdown=1.0, isa="scalar", timeout_s=WAIT_S,
        weights_layout=layout,
    )  # fmt: skip
    is_known = minor >= PANELS_SINCE or layout == "mapped"
    assert asked == [layout if is_known else "packed"]


def shard(num_experts: int) -> LoadShard:
    return LoadShard(
        layer=0, shard=0, name="layers.0", ffn={}, weight_dtype="f32", weights_fingerprint=1, numerics="f32-canonical",
        expert_ranges=compress_experts(tuple(range(num_experts))),
    )  # fmt: skip


def row(num: int) -> ComputeRow:
    return ComputeRow(
        layer=0, shard=num, row=b"", row_dtype="f32", local_expert_ids=(0,), weights=b"", reply_dtype="f32"
    )  # fmt: skip


def refuse_questions(session: HostSession) -> None:
    """What other threads ask is refused at once, as a loss, and nothing of it is sent."""
    began = time.monotonic()
    for ask in (
        lambda: session.ask_stats(timeout_s=WAIT_S),
        lambda: session.ask_checksum(0, 0, timeout_s=WAIT_S),
        lambda: session.compute_row(row(0), timeout_s=WAIT_S),
        lambda: session.load(shard(1), timeout_s=WAIT_S),
    ):
        with pytest.raises(WorkerLost, match="worker w0 is still starting, and answers nothing yet"):
            ask()
    assert time.monotonic() - began < WAIT_S


def test_questions_while_a_worker_starts_are_refused_as_a_loss_and_do_not_disturb_it(
    starting: tuple[HostSession, Puppet],
) -> None:
    session, puppet = starting
    refuse_questions(session)  # it is not dialled yet
    failures: list[DflashError] = []

    def connect() -> None:
        try:
            session.connect(timeout_s=WAIT_S)
        except DflashError as error:
            failures.append(error)

    connecting = threading.Thread(target=connect)
    connecting.start()
    puppet.connection.await_byte(deadline=time.monotonic() + WAIT_S, waiting_for="the opening")
    refuse_questions(session)
    puppet.authenticate()
    connecting.join(WAIT_S)
    assert not failures
    refuse_questions(session)  # it has not said hello
    puppet.says(HELLO_REPLY)
    session.take_notices()  # that answer belongs to whoever greets
    greet(session)
    assert isinstance(puppet.takes(), Hello)
    puppet.does(lambda: (puppet.takes(), puppet.says(Stats(counters={"calls": 1})))[1])
    assert session.ask_stats(timeout_s=WAIT_S) == {"calls": 1}


def test_a_start_ends_when_somebody_hangs_up_in_its_handshake(starting: tuple[HostSession, Puppet]) -> None:
    session, puppet = starting
    connecting = threading.Thread(target=lambda: pytest.raises(WorkerLost, session.connect, timeout_s=WAIT_S))
    connecting.start()
    puppet.connection.await_byte(deadline=time.monotonic() + WAIT_S, waiting_for="the opening")
    session.hang_up()
    connecting.join(WAIT_S)
    assert not connecting.is_alive()


def test_a_worker_is_asked_about_a_shard_once_it_has_loaded_it(worker: tuple[HostSession, Puppet]) -> None:
    session, puppet = worker
    for ask in (
        lambda: session.ask_checksum(0, 0, timeout_s=WAIT_S),
        lambda: session.compute_row(row(0), timeout_s=WAIT_S),
    ):
        with pytest.raises(WorkerLost, match="worker w0 is still starting, and has not loaded layer 0, shard 0"):
            ask()

    def serve() -> None:
        assert isinstance(puppet.takes(), LoadShard)
        puppet.says(ShardLoaded(layer=0, shard=0, resident_bytes=1))
        assert isinstance(puppet.takes(), ChecksumRequest)
        puppet.says(Checksum(layer=0, shard=0, num_read=1, is_checked=True, content_checksum=7))
        assert isinstance(puppet.takes(), ComputeRow)
        puppet.says(RowComputed(layer=0, shard=0, row=b"1234"))

    puppet.does(serve)
    session.load(shard(1), timeout_s=WAIT_S)
    assert session.ask_checksum(0, 0, timeout_s=WAIT_S) == (7, 1)
    assert session.compute_row(row(0), timeout_s=WAIT_S) == b"1234"


def test_progress_beyond_what_was_asked_for_does_not_renew_the_deadline(worker: tuple[HostSession, Puppet]) -> None:
    session, puppet = worker

    def count_for_ever() -> None:
        puppet.takes()
        counter = 0
        while True:
            counter += 1
            puppet.says(Progress(counter=counter, resident_bytes=0))
            time.sleep(0.02)

    puppet.does(count_for_ever)
    reports: list[int] = []
    with pytest.raises(WorkerTimeout, match=r"worker w0 did not load layers.0 shard 0 within 0\.3 s without progress"):
        session.load(shard(4), timeout_s=0.3, report=reports.append)
    assert reports == sorted(set(reports))
    assert all(count <= 4 for count in reports)


def test_progress_that_does_not_rise_does_not_renew_the_deadline(worker: tuple[HostSession, Puppet]) -> None:
    session, puppet = worker

    def waver() -> None:
        puppet.takes()
        while True:
            for counter in (2, 1):
                puppet.says(Progress(counter=counter, resident_bytes=0))
                time.sleep(0.02)

    puppet.does(waver)
    reports: list[int] = []
    with pytest.raises(WorkerTimeout):
        session.load(shard(4), timeout_s=0.3, report=reports.append)
    assert reports in ([2], [])  # nothing where the worker did not get to speak in time


def test_progress_counts_over_all_shards_of_the_session(worker: tuple[HostSession, Puppet]) -> None:
    session, puppet = worker

    def load_two() -> None:
        for loaded in (3, 6):
            puppet.takes()
            for counter in (loaded - 1, loaded):
                puppet.says(Progress(counter=counter, resident_bytes=0))
            puppet.says(ShardLoaded(layer=0, shard=0, resident_bytes=loaded))

    puppet.does(load_two)
    reports: list[int] = []
    for _ in range(2):
        session.load(shard(3), timeout_s=WAIT_S, report=reports.append)
    assert reports == [2, 3, 5, 6]
    assert session.resident_bytes == 6


def test_a_question_behind_one_that_waits_ends_in_time_and_says_what_it_waited_for(worker: tuple[HostSession, Puppet]) -> None:
    session, puppet = worker
    loading = threading.Thread(target=lambda: pytest.raises(DflashError, session.load, shard(2), timeout_s=WAIT_S))
    loading.start()
    assert isinstance(puppet.takes(), LoadShard)
    with pytest.raises(
        WorkerTimeout, match=r"could not be asked to send its counters within 0\.1 s .*to load layers.0 shard 0"
    ):
        session.ask_stats(timeout_s=0.1)
    session.hang_up()
    loading.join(WAIT_S)
    assert not loading.is_alive()


def test_an_answer_that_came_too_late_is_not_taken_for_the_next_one(worker: tuple[HostSession, Puppet]) -> None:
    session, puppet = worker
    with pytest.raises(WorkerTimeout, match="did not send its counters"):
        session.ask_stats(timeout_s=0.05)

    def answer_both() -> None:
        for calls in (1, 2):
            assert isinstance(puppet.takes(), StatsRequest)
            puppet.says(Stats(counters={"calls": calls}))

    puppet.does(answer_both)
    assert session.ask_stats(timeout_s=WAIT_S) == {"calls": 2}


def test_a_question_is_asked_also_while_the_former_one_has_no_answer(worker: tuple[HostSession, Puppet]) -> None:
    """A worker waits for the connections of a path until the next question comes."""
    session, puppet = worker

    def act() -> None:
        assert isinstance(puppet.takes(), Attach)
        puppet.says(Listening(port=1))
        assert isinstance(puppet.takes(), StatsRequest)
        puppet.says(to_refusal(WorkerTimeout("nobody dialled")))
        puppet.says(Stats(counters={"calls": 7}))

    puppet.does(act)

    def attach() -> None:
        with session._turn("attach", WAIT_S, "a limit") as turn:
            turn.on(Listening, refuse_to_dial)
            turn.ask(session.wish(SLOTS, "tcp", 1), Attached)

    pytest.raises(DflashError, attach).match("no descriptor left")
    assert session.ask_stats(timeout_s=WAIT_S) == {"calls": 7}


def refuse_to_dial(_listening: Listening) -> None:
    raise DflashError("no descriptor left", code="system")


def test_another_shard_than_the_one_asked_for_is_named(worker: tuple[HostSession, Puppet]) -> None:
    session, puppet = worker

    def load_another() -> None:
        puppet.takes()
        puppet.says(ShardLoaded(layer=5, shard=1, resident_bytes=0))

    puppet.does(load_another)
    with pytest.raises(ProtocolError, match="ShardLoaded names layer 5 shard 1, asked was layer 0 shard 0"):
        session.load(shard(2), timeout_s=WAIT_S)


def test_the_words_of_a_child_process_are_its_own(worker: tuple[HostSession, Puppet]) -> None:
    session, puppet = worker
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            session.say_bye()
            session.hang_up()
            session.close(seconds=0.0)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    puppet.does(lambda: (puppet.takes(), puppet.says(Stats(counters={"calls": 1})))[1])
    assert session.ask_stats(timeout_s=WAIT_S) == {"calls": 1}
