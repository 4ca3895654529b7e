"""Workers started by hand: reached over TCP and Unix sockets, guarded by key or uid, host after
host. Several hosts at once are in test_several_hosts.py.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_moe import _core
from dflash_moe.errors import ConfigError, ProtocolError, WorkerError, WorkerLost, WorkerTimeout
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.holders.session import HostSession
from dflash_moe.model.spec import ModelSpec
from dflash_moe.protocol.identity import local_identity
from dflash_moe.protocol.keys import read_key_file, write_key_file
from dflash_moe.topology.addresses import parse_address
from tests.expert_cases import call, expected_of, make_checkpoint
from tests.fault.conftest import READY_S, HandStarted, StartWorker, far_topology, wait_until

TCP = "tcp://127.0.0.1:0"
SESSION_ID = bytes(range(16))


def reach(spec: ModelSpec, address: str, name: str = "far", **overrides: Any) -> ExpertRuntime:
    return ExpertRuntime.start(far_topology(address, name=name), model=spec, **overrides)


@pytest.fixture
def worker(spec: ModelSpec, key_file: Path, start_worker: StartWorker) -> HandStarted:
    """One that waits for hosts that have the key, over TCP."""
    return start_worker(Path(spec.path), TCP, "--key-file", str(key_file))


def check_bits(runtime: ExpertRuntime) -> None:
    for layer in (0, 1):
        assert np.array_equal(call(runtime, 40, layer), expected_of(runtime, 40, layer))


@pytest.mark.parametrize("encryption", ["auto", "on"])
def test_tcp_serves_host_after_host_with_the_oracles_bits(
    spec: ModelSpec, key_file: Path, start_worker: StartWorker, encryption: str
) -> None:
    worker = start_worker(Path(spec.path), TCP, "--key-file", str(key_file), "--encryption", encryption)
    for _ in range(2):
        with reach(spec, worker.address, key_file=key_file, encryption=encryption) as runtime:
            check_bits(runtime)
            runtime.set_mode("stream")
            check_bits(runtime)
            assert runtime.stats()["transports"]["far"] == "tcp"
            far = next(process for process in runtime.worker_processes() if process.name == "far")
            assert far.pid == worker.process.pid
            assert far.anonymous_bytes > far.weight_bytes > 0
    assert worker.process.poll() is None


@pytest.mark.parametrize(("overrides", "kind"), [({}, "shared"), ({"transport": "stream"}, "unix")])
def test_a_unix_listener_serves_over_shared_memory_or_the_socket(
    spec: ModelSpec, tmp_path: Path, start_worker: StartWorker, overrides: dict[str, Any], kind: str
) -> None:
    address = f"unix://{tmp_path}/far.sock"
    worker = start_worker(Path(spec.path), address, "--once")
    assert (tmp_path / "far.sock").stat().st_mode & 0o777 == 0o600
    with reach(spec, worker.address, **overrides) as runtime:
        check_bits(runtime)
        assert runtime.stats()["transports"]["far"] == kind
    assert worker.process.wait(READY_S) == 0
    assert not (tmp_path / "far.sock").exists()


@contextmanager
def greeted(
    spec: ModelSpec, worker: HandStarted, key_file: Path, kind: type[HostSession], latter_id: bytes
) -> Iterator[tuple[HostSession, HostSession]]:
    """A session of a host that the worker has greeted, and one that is not connected."""
    address, key = parse_address(worker.address), read_key_file(key_file)
    former = kind("far", address, started=None, key=key, session_id=SESSION_ID)
    latter = HostSession("far", address, started=None, key=key, session_id=latter_id)
    try:
        former.connect(timeout_s=READY_S)
        greet(former, spec)
        yield former, latter
    finally:
        former.close(seconds=0.0)
        latter.close(seconds=0.0)


@pytest.mark.parametrize("is_same_host", [True, False])
def test_only_the_host_that_is_served_ends_its_own_session_by_coming_back(
    spec: ModelSpec, key_file: Path, worker: HandStarted, is_same_host: bool
) -> None:
    """A host whose farewell a cut network has swallowed need not wait for it to be sent again."""
    latter_id = SESSION_ID if is_same_host else bytes(16)
    with greeted(spec, worker, key_file, HostSession, latter_id) as (former, latter):
        latter.connect(timeout_s=READY_S)
        if is_same_host:
            greet(latter, spec)
            with pytest.raises(WorkerLost):
                former.ask_stats(timeout_s=READY_S)
            assert latter.ask_stats(timeout_s=READY_S)["calls"] == 0
        else:
            greet(latter, spec)
            for host in (former, latter):
                assert host.ask_stats(timeout_s=READY_S)["sessions"] == 2


class CutOff(HostSession):
    """A host whose network is cut once the worker listens for its data connection."""

    def _dial_back(self, *_: Any) -> None:
        raise WorkerTimeout("the network is cut")


def test_a_worker_that_awaits_a_data_connection_is_free_for_its_host_that_comes_back(
    spec: ModelSpec, key_file: Path, worker: HandStarted
) -> None:
    """The wish for a path may arrive once a network heals, after its host gave the session up."""
    with greeted(spec, worker, key_file, CutOff, SESSION_ID) as (former, latter):
        with pytest.raises(WorkerTimeout, match="the network is cut"):
            former.attach(_core.SlotPlan(2, 1, 4096, 4096), "tcp", 1, timeout_s=READY_S)
        latter.connect(timeout_s=READY_S)
        greet(latter, spec)
        assert latter.ask_stats(timeout_s=READY_S)["calls"] == 0


def greet(session: HostSession, spec: ModelSpec) -> None:
    session.greet(
        local_identity("far", spec.fingerprint), numerics="f32-canonical", threads=1, spin_ns=0, slowdown=1.0, isa="",
        timeout_s=READY_S,
    )  # fmt: skip


def test_a_wrong_key_name_or_setting_is_refused_before_tls_carries_anything(
    spec: ModelSpec, key_file: Path, tmp_path: Path, start_worker: StartWorker
) -> None:
    worker = start_worker(Path(spec.path), TCP, "--key-file", str(key_file), "--encryption", "on")
    other = tmp_path / "other.key"
    write_key_file(other)
    on: dict[str, Any] = {"key_file": key_file, "encryption": "on"}
    with pytest.raises(ProtocolError, match="worker far: .*the peer has another key: check the key file"):
        reach(spec, worker.address, key_file=other, encryption="on")
    with pytest.raises(ProtocolError, match="worker near2: .*the peer does not take this role and worker name"):
        reach(spec, worker.address, name="near2", **on)
    with pytest.raises(ProtocolError, match=r"worker far wants encrypted connections here \(ipc.encryption: on\)"):
        reach(spec, worker.address, key_file=key_file, encryption="auto")
    with reach(spec, worker.address, **on) as runtime:
        check_bits(runtime)
    plain = start_worker(Path(spec.path), TCP, "--key-file", str(key_file), "--encryption", "off")
    with pytest.raises(ProtocolError, match="the peer answered without TLS; set ipc.encryption alike at both ends"):
        reach(spec, plain.address, **on)
    with reach(spec, plain.address, key_file=key_file) as runtime:
        check_bits(runtime)


def test_a_wrong_key_is_refused_and_the_worker_stays(
    spec: ModelSpec, key_file: Path, tmp_path: Path, worker: HandStarted
) -> None:
    other = tmp_path / "other.key"
    write_key_file(other)
    with pytest.raises(ProtocolError, match="worker far: key: the host's proof does not match"):
        reach(spec, worker.address, key_file=other)
    with pytest.raises(ConfigError, match="worker far at tcp://.*: TCP needs the shared key"):
        reach(spec, worker.address)
    with reach(spec, worker.address, key_file=key_file) as runtime:
        check_bits(runtime)


@pytest.mark.parametrize(
    ("listen", "text"),
    [("tcp://0.0.0.0:0", "anyone on the network"), (TCP, "any local user"), ("tcp://[::1]:0", "any local user")],
)
def test_a_tcp_listener_without_a_key_refuses_to_start(
    spec: ModelSpec, start_worker: StartWorker, listen: str, text: str
) -> None:
    worker = start_worker(Path(spec.path), listen)
    _, stderr = worker.process.communicate(timeout=READY_S)
    assert worker.process.returncode == 2
    assert text in stderr.splitlines()[-1]
    assert "dflash-moe key make" in stderr


def test_the_wrong_checkpoint_or_name_at_the_worker_is_refused(
    spec: ModelSpec, key_file: Path, tmp_path: Path, start_worker: StartWorker
) -> None:
    other = make_checkpoint(tmp_path / "other", seed=9)
    worker = start_worker(other, TCP, "--key-file", str(key_file))
    with pytest.raises(ProtocolError, match=f"worker far: model_fingerprint: the host has {spec.fingerprint}"):
        reach(spec, worker.address, key_file=key_file)
    with pytest.raises(ProtocolError, match="worker: the host has near2, the worker has far"):
        reach(spec, worker.address, name="near2", key_file=key_file)


def test_nobody_there_is_a_lost_worker_with_its_address(spec: ModelSpec, key_file: Path, tmp_path: Path) -> None:
    with socket.socket() as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        port = placeholder.getsockname()[1]
        with pytest.raises(WorkerLost, match=f"worker far at tcp://127.0.0.1:{port} cannot be reached: Connection refused"):
            reach(spec, f"tcp://127.0.0.1:{port}", key_file=key_file)
    with pytest.raises(WorkerLost, match="worker far at unix:///.* cannot be reached: No such file"):
        reach(spec, f"unix://{tmp_path}/none.sock")


def test_a_killed_worker_is_lost_in_a_call_and_its_stale_socket_does_not_block_the_next(
    spec: ModelSpec, tmp_path: Path, start_worker: StartWorker
) -> None:
    address = f"unix://{tmp_path}/far.sock"
    worker = start_worker(Path(spec.path), address)
    with reach(spec, address) as runtime:
        check_bits(runtime)
        worker.process.kill()
        worker.process.wait(READY_S)
        with pytest.raises(WorkerLost, match="far"):
            call(runtime)
    assert (tmp_path / "far.sock").exists()
    again = start_worker(Path(spec.path), address)
    with reach(spec, again.address) as runtime:
        check_bits(runtime)


def test_a_live_workers_socket_is_never_stolen(spec: ModelSpec, tmp_path: Path, start_worker: StartWorker) -> None:
    address = f"unix://{tmp_path}/far.sock"
    first = start_worker(Path(spec.path), address)
    second = start_worker(Path(spec.path), address)
    _, stderr = second.process.communicate(timeout=READY_S)
    assert second.process.returncode == 2
    assert "another worker is listening there" in stderr.splitlines()[-1]
    with reach(spec, first.address) as runtime:
        check_bits(runtime)


def test_a_worker_forgets_a_host_that_was_killed_and_serves_the_next(
    spec: ModelSpec, key_file: Path, worker: HandStarted
) -> None:
    child = os.fork()
    if child == 0:
        runtime = reach(spec, worker.address, key_file=key_file)
        call(runtime)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)

    def serves_again() -> bool:
        try:
            with reach(spec, worker.address, key_file=key_file) as runtime:
                check_bits(runtime)
            return True
        except WorkerError:
            return False

    assert wait_until(serves_again, READY_S)


def test_strangers_cannot_keep_hosts_out(spec: ModelSpec, key_file: Path, worker: HandStarted) -> None:
    """Silent connections that come back whenever they are dropped: every start of a host is served,
    at its first try.
    """
    host, _, port = worker.address.removeprefix("tcp://").rpartition(":")
    over = threading.Event()

    def pester() -> None:
        strangers: list[socket.socket] = []
        while not over.wait(0.02):
            strangers.append(socket.create_connection((host, int(port)), timeout=5))
            for stranger in strangers[:-40]:
                stranger.close()
            strangers = strangers[-40:]
        for stranger in strangers:
            stranger.close()

    thread = threading.Thread(target=pester)
    thread.start()
    try:
        for _ in range(3):
            with reach(spec, worker.address, key_file=key_file) as runtime:
                check_bits(runtime)
                runtime.set_mode("stream")
                check_bits(runtime)
    finally:
        over.set()
        thread.join(10)
    assert not thread.is_alive()


def test_ctrl_c_ends_a_waiting_worker_with_130_and_removes_its_socket(
    spec: ModelSpec, tmp_path: Path, start_worker: StartWorker
) -> None:
    worker = start_worker(Path(spec.path), f"unix://{tmp_path}/far.sock")
    worker.process.send_signal(signal.SIGINT)
    _, stderr = worker.process.communicate(timeout=200)
    assert worker.process.returncode == 130
    assert "Traceback" not in stderr
    assert not (tmp_path / "far.sock").exists()
