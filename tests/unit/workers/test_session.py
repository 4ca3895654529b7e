"""A worker's session against a host that misbehaves: every wrong message gets a typed answer, and
the session lives on.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dflash_moe import __version__, _core
from dflash_moe.errors import ConfigError, DflashError, UnsupportedError
from dflash_moe.model.checkpoint import Checkpoint, shard_fingerprint
from dflash_moe.protocol.failures import ERROR_CLASSES
from dflash_moe.protocol.framing import Connection, PeerGone
from dflash_moe.protocol.identity import local_identity
from dflash_moe.protocol.mailbox import Mailbox
from dflash_moe.protocol.messages import (
    Attach,
    Attached,
    Bye,
    Checksum,
    ChecksumRequest,
    Hello,
    HelloReply,
    Listening,
    LoadShard,
    Progress,
    Refusal,
    ShardLoaded,
    Stats,
    StatsRequest,
    compress_experts,
)
from dflash_moe.protocol.schema import Message
from dflash_moe.workers import session as sessions
from dflash_moe.workers.resident import ResidentWeights
from dflash_moe.workers.session import WorkerIdentity, WorkerSession, _DataPath
from tests.expert_cases import make_checkpoint, tiny_spec


class Host:
    """The host's end of a session that runs in a thread."""

    def __init__(
        self, directory: Path, *, memory_limit: int = 0, patience_s: float = 0.0, threads: int | None = None,
        isa: str = "", resident: ResidentWeights | None = None,
    ) -> None:  # fmt: skip
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours)
        self.spec = tiny_spec(directory)
        checkpoint = Checkpoint.open(directory)
        identity = WorkerIdentity("w0", checkpoint, self.spec.fingerprint, threads, memory_limit=memory_limit, isa=isa)
        self.session = WorkerSession(
            Connection(theirs), identity, Mailbox(bytes(16), bytes(32)), self._listen, patience_s=patience_s,
            resident=resident or ResidentWeights(),
        )  # fmt: skip
        self.listened_with: list[int] = []
        self.reason = ""
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _listen(self, buffer_bytes: int) -> int:
        self.listened_with.append(buffer_bytes)
        return 0

    def _run(self) -> None:
        self.reason = self.session.run()
        self.session.close()

    def ask(self, message: Message, descriptors: tuple[int, ...] = ()) -> Message:
        self.connection.send(message, deadline=time.monotonic() + 5, descriptors=descriptors)
        while isinstance(answer := self.connection.receive(deadline=time.monotonic() + 10, waiting_for="an answer"), Progress):
            continue
        return answer

    def hello(self, **changes: object) -> Message:
        ours = local_identity("w0", self.spec.fingerprint)
        fields = {
            "package_version": __version__, "worker": "w0", "numerics_class": "f32-canonical",
            "model_fingerprint": ours.model_fingerprint, "wire_limits": dict(ours.wire_limits), "dtypes": ours.dtypes,
            "threads": 1,
        }  # fmt: skip
        return self.ask(Hello(**{**fields, **changes}))

    def shard(self, experts: tuple[int, ...] = (0, 1, 5), **changes: object) -> LoadShard:
        layer = self.spec.layers[0]
        fields = {
            "layer": 0, "shard": 0, "name": layer.name, "ffn": layer.ffn.to_wire(), "weight_dtype": "f32",
            "expert_ranges": compress_experts(experts),
            "weights_fingerprint": shard_fingerprint(self.spec.fingerprint, layer.name, experts),
            "numerics": "f32-canonical",
        }  # fmt: skip
        return LoadShard(**{**fields, **changes})

    def end(self) -> None:
        self.connection.close()
        self.thread.join(15)
        assert not self.thread.is_alive()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(make_checkpoint(tmp_path / "tiny"))
    yield made
    made.end()


def refused(message: Message, text: str) -> None:
    assert isinstance(message, Refusal), message
    assert text in message.text


def test_a_whole_session_ends_with_goodbye(host: Host) -> None:
    reply = host.hello()
    assert isinstance(reply, HelloReply)
    assert reply.pid == os.getpid()
    assert reply.memory_available > 0
    loaded = host.ask(host.shard())
    assert isinstance(loaded, ShardLoaded)
    assert loaded.resident_bytes >= 3 * host.spec.layers[0].expert_bytes
    stats = host.ask(StatsRequest())
    assert isinstance(stats, Stats)
    assert stats.counters["calls"] == 0
    host.connection.send(Bye(), deadline=time.monotonic() + 5)
    host.thread.join(10)
    assert host.reason == "the host said goodbye"


@pytest.mark.parametrize("layout", ["packed", "auto", "stored"])
def test_weights_that_may_come_from_panels_are_checked_like_packed_ones(host: Host, layout: str) -> None:
    assert isinstance(host.hello(weights_layout=layout), HelloReply)
    loaded = host.ask(host.shard())
    assert isinstance(loaded, ShardLoaded)
    assert loaded.is_checked
    assert loaded.resident_bytes >= 3 * host.spec.layers[0].expert_bytes


def test_a_layout_that_no_version_has_is_refused(host: Host) -> None:
    refused(host.hello(weights_layout="zz"), "zz")


def test_a_hang_up_ends_the_session(host: Host) -> None:
    host.hello()
    host.connection.close()
    host.thread.join(10)
    assert host.reason == "the host is gone"


def test_messages_out_of_order_are_refused_and_the_session_lives_on(host: Host) -> None:
    refused(host.ask(host.shard()), "LoadShard: arrived before Hello")
    refused(host.ask(Attached(generation=3, num_descriptors=0)), "Attached is not one a host sends")
    assert isinstance(host.hello(), HelloReply)
    refused(host.hello(), "arrived twice")


@pytest.mark.parametrize(("field", "value"), [("worker", "w9"), ("model_fingerprint", "00"), ("dtypes", ("f32",))])
def test_a_hello_that_does_not_fit_names_field_and_both_values(host: Host, field: str, value: object) -> None:
    answer = host.hello(**{field: value})
    refused(answer, f"{field}: the host has {value}, the worker has")
    assert isinstance(host.hello(), HelloReply)


def test_a_class_that_the_kernel_set_does_not_compute_is_refused_with_those_it_does(host: Host) -> None:
    answer = host.hello(isa="scalar", numerics_class="bf16-dot")
    refused(answer, "worker w0: its kernel set scalar does not compute numerics class bf16-dot; it offers f32-canonical")
    assert ERROR_CLASSES[answer.code] is UnsupportedError
    reply = host.hello(isa="scalar")
    assert isinstance(reply, HelloReply)
    assert list(reply.numerics_offered) == _core.numerics_classes("scalar")


def test_a_core_that_the_worker_may_not_use_is_named(host: Host) -> None:
    refused(host.hello(cpus=(60_000,)), "CPU 60000 of its `cpus` is not one this process may use")
    assert isinstance(host.hello(), HelloReply)


def test_another_limit_is_named(host: Host) -> None:
    limits = dict(local_identity("w0", "").wire_limits)
    limits["max_rows"] = 1
    refused(host.hello(wire_limits=limits), "wire_limits.max_rows: the host has 1, the worker has 4096")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ffn": {"in_size": 1}}, "FfnSpec: field"),
        ({"ffn": 7}, "FfnSpec: field ffn"),
        ({"expert_ranges": ()}, "has no experts"),
        ({"expert_ranges": (5, 0)}, "expert_ranges"),
        ({"weights_fingerprint": 1}, "both must read the same checkpoint"),
        ({"weight_dtype": "f8"}, "f8"),
        ({"numerics": "f16-dot2"}, "field numerics: 'f16-dot2' is not among those of HelloReply, f32-canonical, int8-groups"),
    ],
)
def test_a_bad_shard_is_refused_by_name(host: Host, changes: dict[str, object], text: str) -> None:
    host.hello()
    refused(host.ask(host.shard(**changes)), text)
    assert isinstance(host.ask(host.shard()), ShardLoaded)


def test_a_worker_keeps_to_its_own_memory_whatever_the_host_asks(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "tiny")
    expert_bytes = tiny_spec(directory).layers[0].expert_bytes
    host = Host(directory, memory_limit=4 * expert_bytes)
    try:
        host.hello()
        loaded = host.ask(host.shard())
        assert isinstance(loaded, ShardLoaded)
        assert loaded.resident_bytes <= 4 * expert_bytes
        second = host.ask(host.shard((2, 3, 4), shard=1))
        refused(
            second,
            "layers.0.experts, shard 1: memory: its 3 experts need 216 KiB, and 216 KiB of the 288 KiB that this worker's",
        )
        assert ERROR_CLASSES[second.code] is ConfigError
        counters = host.ask(StatsRequest())
        assert isinstance(counters, Stats)
        assert counters.counters["resident_weight_bytes"] == loaded.resident_bytes
    finally:
        host.end()


def test_the_same_experts_asked_for_twice_are_loaded_once(tmp_path: Path) -> None:
    host = Host(make_checkpoint(tmp_path / "tiny"))
    try:
        host.hello()
        first, second = host.ask(host.shard()), host.ask(host.shard(shard=1))
        assert isinstance(first, ShardLoaded)
        assert isinstance(second, ShardLoaded)
        assert second.resident_bytes == first.resident_bytes
        assert second.content_checksum == first.content_checksum
        refused(host.ask(host.shard(shard=1)), "layer 0, shard 1 is already held")
    finally:
        host.end()


@contextmanager
def several_hosts(tmp_path: Path, **terms: Any) -> Iterator[Callable[[], Host]]:
    """Hosts of one worker that serves them at once."""
    directory, resident = make_checkpoint(tmp_path / "tiny"), ResidentWeights(600.0)
    made: list[Host] = []

    def come() -> Host:
        made.append(Host(directory, resident=resident, **{"threads": 1, **terms}))
        return made[-1]

    yield come
    for host in made:
        host.end()
    resident.drop()


def test_hosts_share_a_shard_and_one_that_comes_back_finds_it(tmp_path: Path) -> None:
    with several_hosts(tmp_path) as come:
        first, second = come(), come()
        for host in (first, second):
            host.hello()
        loaded, shared = first.ask(first.shard()), second.ask(second.shard())
        assert isinstance(loaded, ShardLoaded)
        assert isinstance(shared, ShardLoaded)
        assert (shared.resident_bytes, shared.content_checksum) == (loaded.resident_bytes, loaded.content_checksum)
        first.end()
        # What nobody uses is kept beside what others load.
        more = second.ask(second.shard((2, 3, 4), shard=1))
        assert isinstance(more, ShardLoaded)
        second.end()
        back = come()
        reply = back.hello()
        assert isinstance(reply, HelloReply)
        assert reply.kept_bytes == more.resident_bytes
        for message in (back.shard(), back.shard((2, 3, 4), shard=1)):
            again = back.ask(message)
            assert isinstance(again, ShardLoaded)
            assert again.resident_bytes == more.resident_bytes


def test_the_memory_of_a_worker_is_that_of_all_its_hosts_and_what_nobody_uses_goes_first(tmp_path: Path) -> None:
    expert_bytes = tiny_spec(make_checkpoint(tmp_path / "tiny")).layers[0].expert_bytes
    with several_hosts(tmp_path, memory_limit=4 * expert_bytes) as come:
        first, second = come(), come()
        for host in (first, second):
            host.hello()
        assert isinstance(first.ask(first.shard()), ShardLoaded)
        others = second.shard((2, 3, 4))
        refused(second.ask(others), "memory: its 3 experts need 216 KiB, and 216 KiB of the 288 KiB that this worker's")
        assert isinstance(second.ask(second.shard()), ShardLoaded)
        for host in (first, second):
            host.end()
        third = come()
        third.hello()
        assert isinstance(third.ask(others), ShardLoaded)


def test_a_shard_without_room_in_the_machines_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with several_hosts(tmp_path) as come:
        host = come()
        host.hello()
        monkeypatch.setattr(sessions, "memory_available", lambda: 1000)
        answer = host.ask(host.shard())
        refused(answer, "memory: its 3 experts need 216 KiB, and 0 KiB are free there now")
        assert ERROR_CLASSES[answer.code] is ConfigError


@pytest.mark.parametrize(
    ("own", "changes", "text"),
    [
        ({}, {"isa": "reference"}, "isa: this host asks for reference, the worker has scalar"),
        ({}, {"weights_layout": "mapped"}, "weights_layout: this host asks for mapped, the worker has packed"),
        ({"isa": "scalar"}, {"isa": "reference"}, "isa: this host asks for reference, the worker has scalar"),
        ({}, {"threads": 3}, "threads: this host asks for 3, the worker has 1"),
    ],
)
def test_a_host_that_needs_the_worker_to_compute_otherwise_is_refused_and_the_others_do_not_notice(
    tmp_path: Path, own: dict[str, Any], changes: dict[str, Any], text: str
) -> None:
    with several_hosts(tmp_path, **own) as come:
        first, second = come(), come()
        assert isinstance(first.hello(isa="" if own else "scalar"), HelloReply)
        answer = second.hello(**changes)
        refused(answer, f"worker w0: {text}")
        assert ERROR_CLASSES[answer.code] is ConfigError
        assert isinstance(first.ask(first.shard()), ShardLoaded)
        reply = second.hello()
        assert isinstance(reply, HelloReply)
        assert reply.isa == "scalar"


def test_counters_are_a_sessions_own_beside_the_totals(tmp_path: Path) -> None:
    with several_hosts(tmp_path) as come:
        first, second = come(), come()
        for host in (first, second):
            host.hello()
        stats = second.ask(StatsRequest())
        assert isinstance(stats, Stats)
        assert {"sessions": 2, "calls": 0, "total_calls": 0, "total_rows": 0}.items() <= stats.counters.items()


def test_a_checksum_is_told_of_a_held_shard_only(tmp_path: Path) -> None:
    host = Host(make_checkpoint(tmp_path / "tiny"))
    try:
        refused(host.ask(ChecksumRequest(layer=0, shard=0)), "ChecksumRequest: arrived before Hello")
        host.hello()
        refused(host.ask(ChecksumRequest(layer=0, shard=0)), "ChecksumRequest: layer 0, shard 0 is not held")
        loaded = host.ask(host.shard())
        told = host.ask(ChecksumRequest(layer=0, shard=0))
        assert isinstance(loaded, ShardLoaded)
        assert isinstance(told, Checksum)
        assert loaded.is_checked
        assert told.is_checked
        assert told.num_read == 3
        assert told.content_checksum == loaded.content_checksum
    finally:
        host.end()


def test_an_authenticated_host_that_says_nothing_loses_the_worker_long_before_one_that_has_greeted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert sessions.HELLO_S == 30.0 < sessions.PATIENCE_S
    monkeypatch.setattr(sessions, "HELLO_S", 0.2)
    host = Host(make_checkpoint(tmp_path / "tiny"), patience_s=600.0)
    try:
        with caplog.at_level(logging.WARNING):
            told = host.connection.receive(deadline=time.monotonic() + 30, waiting_for="the end of its patience")
            refused(told, "worker w0: the host did not greet within 0.2 s; the worker is free for another")
            host.thread.join(30)
        assert "session ends: the host did not greet within 0.2 s" in caplog.text
    finally:
        host.end()


def test_a_host_that_uses_nothing_of_the_worker_loses_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    host = Host(make_checkpoint(tmp_path / "tiny"), patience_s=600.0)
    host.session.patience_s = 0.2
    try:
        with caplog.at_level(logging.WARNING):
            host.hello(start_timeout_s=0.01)
            told = host.connection.receive(deadline=time.monotonic() + 30, waiting_for="the end of its patience")
            refused(told, "worker w0: the host neither loaded nor attached anything within 0.2 s")
            host.thread.join(30)
        assert "session ends: the host neither loaded nor attached anything within 0.2 s" in caplog.text
        assert "the worker is free for another" in host.reason
    finally:
        host.end()


def test_patience_grows_with_the_hosts_own_and_ends_with_its_first_load(tmp_path: Path) -> None:
    host = Host(make_checkpoint(tmp_path / "tiny"), patience_s=60.0)
    try:
        host.hello(start_timeout_s=1000.0)
        assert isinstance(host.ask(StatsRequest()), Stats)
        assert host.session._deadline is not None
        assert host.session._deadline > time.monotonic() + 3000
        assert isinstance(host.ask(host.shard()), ShardLoaded)
        assert host.session._deadline is None
    finally:
        host.end()


def attach(**changes: object) -> Attach:
    fields = {
        "generation": 3, "transport": "unix", "num_slots": 2, "request_bytes": 4096, "reply_bytes": 4096, "num_descriptors": 1,
        "has_pulse": False,
    }  # fmt: skip
    return Attach(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"transport": "pigeon"}, "field transport: found 'pigeon'"),
        ({"num_descriptors": 2}, "announced 2 descriptors, 1 arrived"),
        ({"transport": "shared"}, "transport shared: its offer brought 1 descriptors and 0 bytes; it has 2 and 0"),
        ({"num_slots": 0}, "slot"),
        ({"request_bytes": 63}, "63"),
    ],
)
def test_a_bad_attach_is_refused_and_leaves_no_descriptor(host: Host, changes: dict[str, object], text: str) -> None:
    host.hello()
    host.ask(host.shard())
    before = len(os.listdir("/proc/self/fd"))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        refused(host.ask(attach(**changes), (theirs.fileno(),)), text)
        # Fewer, where garbage of earlier tests went.
        assert len(os.listdir("/proc/self/fd")) <= before + 2
        answer = host.ask(attach(), (theirs.fileno(),))
        assert isinstance(answer, Attached)
    refused(host.ask(host.shard(shard=1)), "arrived after Attach")


def test_a_path_without_room_in_the_machines_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with several_hosts(tmp_path) as come:
        host = come()
        host.hello()
        monkeypatch.setattr(sessions, "memory_available", lambda: 16383)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            answer = host.ask(attach(), (theirs.fileno(),))
            refused(answer, "worker w0: memory: 2 slots of 4 and 4 KiB need 16 KiB, and 15 KiB are free there now")
            assert ERROR_CLASSES[answer.code] is ConfigError
            monkeypatch.setattr(sessions, "memory_available", lambda: 16384)
            assert isinstance(host.ask(attach(), (theirs.fileno(),)), Attached)


def test_a_session_has_so_many_shards_and_no_more(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SHARDS", 1)
    host.hello()
    assert isinstance(host.ask(host.shard()), ShardLoaded)
    answer = host.ask(host.shard(shard=1))
    refused(answer, "shard 1: this host has 1 shards here, and may have no more")
    assert ERROR_CLASSES[answer.code] is ConfigError


def hung_up(sock: socket.socket) -> bool:
    sock.settimeout(5)
    return sock.recv(1) == b""


@pytest.mark.parametrize("ending", [Bye(), attach(generation=4)], ids=["goodbye", "attach"])
def test_a_goodbye_and_the_next_attach_end_a_data_path_that_is_served(host: Host, ending: Message) -> None:
    host.hello()
    host.ask(host.shard())
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            assert isinstance(host.ask(attach(), (theirs.fileno(),)), Attached)
        their_end, next_end = socket.socketpair()
        with their_end, next_end:
            passed = (next_end.fileno(),) if isinstance(ending, Attach) else ()
            host.connection.send(ending, deadline=time.monotonic() + 5, descriptors=passed)
            assert hung_up(ours)


class Computing:
    """A worker whose data path computes until it is let go; `progress` grows while it gets on."""

    def __init__(self, *, gets_on: bool) -> None:
        self.let_go = threading.Event()
        self.thread = threading.Thread(target=self.let_go.wait, args=(60,), daemon=True)
        self.thread.start()
        self.count = 0
        self.gets_on = gets_on
        self.stopped: list[int] = []

    def stop(self, generation: int) -> None:
        self.stopped.append(generation)

    def progress(self) -> int:
        self.count += self.gets_on
        if self.count == 5:
            self.let_go.set()
        return self.count


@pytest.fixture
def session(tmp_path: Path) -> Iterator[WorkerSession]:
    directory = make_checkpoint(tmp_path / "tiny")
    ours, theirs = socket.socketpair()
    with ours:
        identity = WorkerIdentity("w0", Checkpoint.open(directory), "")
        made = WorkerSession(Connection(theirs), identity, Mailbox(bytes(16), bytes(32)), lambda _: 0)
        yield made
        made.connection.close()


def test_a_data_path_that_hangs_is_never_joined_by_a_second(session: WorkerSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_moe.workers.session.STOP_S", 0.05)
    computing = Computing(gets_on=False)
    session._worker, session._path = computing, _DataPath(computing.thread, 7)  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(DflashError, match="generation 7 did not stop"):
            session._stop_serving()
    computing.let_go.set()
    session._stop_serving()
    assert session._path is None
    assert computing.stopped == [7, 7, 7]


def test_a_computation_that_gets_on_is_waited_for(session: WorkerSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_moe.workers.session.STOP_S", 0.05)
    computing = Computing(gets_on=True)
    session._worker, session._path = computing, _DataPath(computing.thread, 7)  # type: ignore[assignment]
    session._stop_serving()
    assert not computing.thread.is_alive()


def test_a_tcp_attach_listens_with_the_buffers_it_asks_for(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_moe.workers.session.ATTACH_S", 0.01)
    host.hello()
    host.ask(host.shard())
    answer = host.ask(attach(transport="tcp", num_descriptors=0, socket_buffer_bytes=64 << 10))
    assert isinstance(answer, Listening)
    assert host.listened_with == [64 << 10]
    late = host.connection.receive(deadline=time.monotonic() + 5, waiting_for="an answer")
    refused(late, "no data connection of generation 3 arrived")


@pytest.mark.parametrize("next_word", ["question", "goodbye", "hang-up"])
def test_a_data_connection_that_the_host_has_given_up_is_awaited_no_longer(
    host: Host, monkeypatch: pytest.MonkeyPatch, next_word: str
) -> None:
    monkeypatch.setattr("dflash_moe.workers.session.ATTACH_S", 60.0)
    host.hello()
    assert isinstance(host.ask(attach(transport="tcp", num_descriptors=0)), Listening)
    if next_word == "hang-up":
        host.connection.hang_up()
    else:
        refused(host.ask(StatsRequest() if next_word == "question" else Bye()), "before the host asked for something else")
    if next_word == "question":
        assert isinstance(host.connection.receive(deadline=time.monotonic() + 10, waiting_for="an answer"), Stats)
        return
    host.thread.join(15)
    assert host.reason == ("the host said goodbye" if next_word == "goodbye" else "the host is gone")


def test_a_frame_that_is_no_message_ends_the_session_with_a_typed_answer(host: Host) -> None:
    host.connection.send_payload(b"\xc1garbage", deadline=time.monotonic() + 5)
    refused(host.connection.receive(deadline=time.monotonic() + 5, waiting_for="an answer"), "not a msgpack message")
    host.thread.join(10)
    with pytest.raises(PeerGone):
        host.connection.receive(deadline=time.monotonic() + 5, waiting_for="more")
