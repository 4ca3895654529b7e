"""Workers that dial the host: their bits, their losses and returns, and what bad ones are told.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_moe import _core
from dflash_moe.errors import ConfigError, DflashError, ProtocolError, WorkerLost, WorkerTimeout
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.protocol.encryption import identity_of
from dflash_moe.protocol.keys import write_key_file, write_worker_key_file
from dflash_moe.topology import Topology
from tests.expert_cases import call, expected_of, make_checkpoint
from tests.fabrics import require_fabric
from tests.fault.conftest import READY_S, StartWorker, far_topology, first_line, freeze, state_of, wait_until
from tests.fault.host_on_a_network import HEAD
from tests.fault.two_machines import TwoMachines, host_there, within

NUM_STRANGERS = 1000
Register = Callable[..., "subprocess.Popen[str]"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def register(spec: ModelSpec, key_file: Path, port: int) -> Iterator[Register]:
    """Starts workers that register at `port`, and ends them after the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(
        name: str, *options: str, key: Path = key_file, model: str = spec.path, host: str = "127.0.0.1"
    ) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "dflash_moe", "worker", "--register", f"tcp://{host}:{port}", "--name", name]
        command += ["--model", model, "--key-file", str(key), "--threads", "1", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        assert first_line(process) == f"worker {name} registers at tcp://{host}:{port}"
        return process

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.communicate(timeout=60)


def topology_of(
    port: int, *names: str, more: str = "", near: bool = False, host: str = "127.0.0.1", worker: str = ""
) -> Topology:
    workers = "".join(f"  - {{name: {name}, threads: 1, address: registered{worker}}}\n" for name in names)
    workers += "  - {name: near, threads: 1}\n" if near else ""
    listen = f"registration: {{listen: 'tcp://{host}:{port}'{more}}}\n"
    return Topology.parse(f"version: 1\n{listen}workers:\n{workers}")


def start(spec: ModelSpec, key_file: Path, topology: Topology, **overrides: Any) -> ExpertRuntime:
    return ExpertRuntime.start(topology, model=spec, key_file=key_file, **overrides)


def check_bits(runtime: ExpertRuntime) -> None:
    for layer in (0, 1):
        assert np.array_equal(call(runtime, 40, layer), expected_of(runtime, 40, layer))


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Waits for a process that ends by itself; returns its exit code and the last line it wrote."""
    _, stderr = process.communicate(timeout=READY_S)
    return process.returncode, stderr.splitlines()[-1]


def await_words(process: subprocess.Popen[str], words: str) -> None:
    """Waits until a running process has written these words to stderr, which nobody else reads."""
    assert process.stderr is not None
    found, until = b"", time.monotonic() + READY_S
    while words.encode() not in found:
        readable, _, _ = select.select([process.stderr], [], [], max(0.0, until - time.monotonic()))
        part = os.read(process.stderr.fileno(), 4096) if readable else b""
        assert part, f"{words!r} did not come: {found.decode()[-2000:]}"
        found += part


def test_two_registered_workers_have_the_bits_of_dialled_ones(
    spec: ModelSpec, key_file: Path, register: Register, port: int, start_worker: StartWorker
) -> None:
    processes = [register(name) for name in ("w0", "w1")]
    for _ in range(2):  # they come again once a host has left
        with start(spec, key_file, topology_of(port, "w0", "w1")) as runtime:
            check_bits(runtime)
            runtime.set_mode("stream")
            check_bits(runtime)
            found = call(runtime, 40)
            assert runtime.stats()["transports"] == {"w0": "tcp", "w1": "tcp"}
            assert {one.pid for one in runtime.worker_processes()} >= {process.pid for process in processes}
    far = start_worker(Path(spec.path), "tcp://127.0.0.1:0", "--key-file", str(key_file))
    with ExpertRuntime.start(far_topology(far.address), model=spec, key_file=key_file) as runtime:
        assert np.array_equal(call(runtime, 40), found)


def test_a_start_says_who_is_missing(
    spec: ModelSpec, key_file: Path, register: Register, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    register("w0")
    said = r"worker w[12] has not registered: .* of 3 are missing .*\(ipc.start_timeout_s\): (w0, )?w1, w2; start each with"
    with caplog.at_level("INFO"), pytest.raises(WorkerTimeout, match=said):
        start(spec, key_file, topology_of(port, "w0", "w1", "w2"), start_timeout_s=3.0)
    assert any("workers to register: " in record.message for record in caplog.records)


def test_a_killed_worker_is_waited_for_and_comes_back_under_its_name(
    spec: ModelSpec, key_file: Path, register: Register, port: int
) -> None:
    first = register("w0")
    with start(spec, key_file, topology_of(port, "w0", near=True), park_s=60.0, call_timeout_s=90.0) as runtime:
        check_bits(runtime)
        first.kill()
        assert wait_until(lambda: state_of(runtime, "w0").state == "starting", READY_S)
        assert "hung up" in state_of(runtime, "w0").reason
        parked: list[Any] = []
        thread = threading.Thread(target=lambda: parked.append(call(runtime, 40)))
        thread.start()
        register("w0")
        thread.join(READY_S)
        assert np.array_equal(parked[0], expected_of(runtime, 40))
        assert state_of(runtime, "w0").deaths == 1


def test_calls_do_not_wait_for_one_that_said_goodbye(spec: ModelSpec, key_file: Path, register: Register, port: int) -> None:
    first = register("w0")
    with start(spec, key_file, topology_of(port, "w0", near=True), park_s=300.0, call_timeout_s=300.0) as runtime:
        first.terminate()
        assert ended(first)[0] == 130
        assert wait_until(lambda: state_of(runtime, "w0").state == "starting", READY_S)
        with pytest.raises(WorkerLost, match="w0"):
            call(runtime, 40)
        register("w0")
        assert wait_until(lambda: state_of(runtime, "w0").state == "ready", READY_S)
        check_bits(runtime)


def test_a_name_that_is_served_is_taken_and_one_that_stands_still_is_not(
    spec: ModelSpec, key_file: Path, register: Register, port: int
) -> None:
    first = register("w0")
    topology = topology_of(port, "w0", near=True)
    with start(spec, key_file, topology, park_s=60.0, stall_timeout_s=90.0, call_timeout_s=90.0) as runtime:
        second = register("w0")
        await_words(second, "another worker serves under it, and answers")
        check_bits(runtime)
        assert runtime.worker_stats()["w0"]["calls"] > 0
        freeze(first.pid)
        assert wait_until(lambda: state_of(runtime, "w0").deaths == 1, READY_S)
        assert wait_until(lambda: state_of(runtime, "w0").state == "ready", READY_S)
        assert {one.name: one.pid for one in runtime.worker_processes()}["w0"] == second.pid
        check_bits(runtime)


def test_a_quarantined_worker_is_told_why_and_comes_back_once_released(
    spec: ModelSpec, key_file: Path, register: Register, port: int
) -> None:
    first = register("w0")
    with start(spec, key_file, topology_of(port, "w0", near=True), restart_deaths=1) as runtime:
        first.kill()
        assert wait_until(lambda: state_of(runtime, "w0").state == "quarantined", READY_S)
        second = register("w0")
        await_words(second, "worker w0 is quarantined: 1 deaths")
        runtime.release("w0")
        assert wait_until(lambda: state_of(runtime, "w0").state == "ready", READY_S)
        check_bits(runtime)


def test_bad_workers_are_refused_for_good_and_say_what_to_do(
    spec: ModelSpec, key_file: Path, register: Register, port: int, tmp_path: Path
) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    write_worker_key_file(own, worker="w0", group=key_file)
    write_key_file(other)
    register("w0", key=own)
    with start(spec, key_file, topology_of(port, "w0", more=", require_key_per_worker: true", near=True)) as runtime:
        refused = {
            "name: it is not among those that may register": register("w9", key=_own(key_file, tmp_path)),
            "came with the group's key; make one of its own": register("w0"),
        }
        stranger = register("w0", key=other)
        for said, process in refused.items():
            code, line = ended(process)
            assert (code, said in line) == (2, True), line
        # Anybody on the path could make a handshake fail, so that this one says so and comes again.
        await_words(stranger, "is that the host, with the same key file?")
        assert stranger.poll() is None
        check_bits(runtime)
    command = [sys.executable, "-m", "dflash_moe", "worker", "--register", f"tcp://127.0.0.1:{port}", "--name", "w1"]
    command += ["--model", spec.path, "--key-file", str(own)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=READY_S)
    assert done.returncode == 2
    assert f"key file {own} is worker w0's own, and this is worker w1" in done.stderr


def _own(group: Path, folder: Path) -> Path:
    write_worker_key_file(folder / "w9", worker="w9", group=group)
    return folder / "w9"


def test_another_model_is_named(key_file: Path, spec: ModelSpec, register: Register, port: int, tmp_path: Path) -> None:
    register("w0", model=str(make_checkpoint(tmp_path / "other", seed=8)))
    with pytest.raises(ProtocolError, match="worker w0: model_fingerprint: .*both ends must read the same checkpoint"):
        start(spec, key_file, topology_of(port, "w0", near=True))


def test_a_host_without_key_or_encryption_takes_no_registration(spec: ModelSpec, key_file: Path, port: int) -> None:
    with pytest.raises(ConfigError, match="workers prove the group's key; give --key-file FILE"):
        ExpertRuntime.start(topology_of(port, "w0"), model=spec)
    with pytest.raises(ConfigError, match="ipc.encryption is off, .* always encrypted"):
        start(spec, key_file, topology_of(port, "w0"), encryption="off")


def wrong_key(port: int) -> bool:
    """Registers with a key that nobody has; returns whether that was accepted."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        keys = [(identity_of("registered-control", "w0"), secrets.token_bytes(32))]
        secure = _core.SecureSocket(sock.detach(), is_dialling=True, keys=keys)
    try:
        return bool(wait_until(secure.handshake, 10.0))
    except DflashError:
        return False
    finally:
        secure.close()


def test_strangers_get_nothing_while_calls_go_on(spec: ModelSpec, key_file: Path, register: Register, port: int) -> None:
    register("w0")
    with start(spec, key_file, topology_of(port, "w0", near=True)) as runtime, contextlib.ExitStack() as half_open:
        expected = expected_of(runtime)
        over, accepted = threading.Event(), []

        def pester() -> None:
            for _ in range(NUM_STRANGERS):
                half_open.enter_context(contextlib.closing(socket.create_connection(("127.0.0.1", port), timeout=30)))
                accepted.append(wrong_key(port))
            over.set()

        thread = threading.Thread(target=pester)
        thread.start()
        num_calls = 0
        while thread.is_alive():
            assert np.array_equal(call(runtime), expected)
            num_calls += 1
        thread.join(60)
        assert over.is_set()
        assert accepted == [False] * NUM_STRANGERS
        assert num_calls > 10
        assert state_of(runtime, "w0").deaths == 0


@pytest.mark.parametrize("names", ["any", "[w0, w1, w2]"])
def test_newcomers_are_added_one_by_one_and_awaited(
    spec: ModelSpec, key_file: Path, register: Register, port: int, names: str
) -> None:
    for name in ("w0", "w1", "w2"):
        register(name)
    topology = topology_of(port, "w0", more=f", names: {names}, expect: 3", near=True)
    with start(spec, key_file, topology) as runtime:
        assert {one.name: one.state for one in runtime.workers()} == dict.fromkeys(("w0", "near", "w1", "w2"), "ready")
        check_bits(runtime)
        runtime.remove_worker("w1")
        check_bits(runtime)
        # It comes again and is told that it was removed, until somebody adds it by name.
        runtime.add_worker({"name": "w1", "threads": 1, "address": "registered"})
        assert state_of(runtime, "w1").state == "ready"
        check_bits(runtime)


def test_a_newcomer_that_will_not_do_is_told_why(
    spec: ModelSpec, key_file: Path, register: Register, port: int, tmp_path: Path
) -> None:
    with start(spec, key_file, topology_of(port, more=", names: any", near=True)) as runtime:
        code, line = ended(register("w5", model=str(make_checkpoint(tmp_path / "other", seed=8))))
        assert code == 2
        assert "model_fingerprint" in line
        check_bits(runtime)


def test_a_start_says_how_many_newcomers_are_missing(spec: ModelSpec, key_file: Path, port: int) -> None:
    topology = topology_of(port, more=", names: [w5], expect: 1", near=True)
    with pytest.raises(WorkerTimeout, match="registration.expect: 1 workers are expected, and 0 .*: none; missing are w5"):
        start(spec, key_file, topology, start_timeout_s=2.0)


def test_one_that_serves_once_leaves_with_its_host(spec: ModelSpec, key_file: Path, register: Register, port: int) -> None:
    worker = register("w0", "--once")
    with start(spec, key_file, topology_of(port, "w0", near=True)) as runtime:
        check_bits(runtime)
    assert ended(worker)[0] == 0


def test_a_bound_of_its_weights_is_kept(spec: ModelSpec, key_file: Path, register: Register, port: int) -> None:
    worker = register("w0", "--memory", "4KiB")
    with pytest.raises(DflashError, match="worker w0 need .* 0 of the 8 experts fit"):
        start(spec, key_file, topology_of(port, "w0", near=True))
    assert worker.poll() is None


def test_one_registers_over_ipv6(spec: ModelSpec, key_file: Path, register: Register, port: int) -> None:
    register("w0", host="[::1]")
    with start(spec, key_file, topology_of(port, "w0", near=True, host="[::1]")) as runtime:
        check_bits(runtime)


def test_one_may_compute_over_a_fabric(spec: ModelSpec, key_file: Path, register: Register, port: int) -> None:
    require_fabric()
    register("w0")
    with pytest.raises(ConfigError, match="worker w0 is reached by registered, and a fabric carries calls in clear"):
        start(spec, key_file, topology_of(port, "w0"), transport="fabric")
    may = topology_of(port, "w0", worker=", fabric_clear: true")
    with start(spec, key_file, may, transport="fabric") as runtime:
        assert runtime.stats()["transports"] == {"w0": "fabric"}
        check_bits(runtime)


@pytest.mark.parametrize("transport", ["tcp", "fabric"])
def test_one_registers_from_another_machine(spec: ModelSpec, key_file: Path, transport: str) -> None:
    """Nobody can dial the worker there: its machine lets no connection in."""
    if transport == "fabric":
        require_fabric()
    machines = TwoMachines()
    with contextlib.ExitStack() as ends:
        ends.callback(machines.close)
        if lacking := machines.make():
            pytest.skip(f"this machine makes no network namespaces: {lacking}")
        worker = within(
            machines.worker, "-m", "dflash_moe", "worker", "--register", HEAD, "--name", "far", "--model", str(spec.path),
            "--key-file", str(key_file), "--threads", "1",
        )  # fmt: skip
        ends.callback(worker.communicate, timeout=60)
        ends.callback(worker.kill)
        assert first_line(worker) == f"worker far registers at {HEAD}"
        setting = {"tcp": "auto", "fabric": "fabric"}[transport]
        may = ", fabric_clear: true" if transport == "fabric" else ""
        found = host_there(machines, spec, key_file, "registered", worker=may, transport=setting)
    assert found.get("error", "") == ""
    assert (found["is_equal"], found["transport"]) == (True, transport)
    # What is encrypted shows none of the rows that travelled.
    assert (found["num_rows_seen"] > 0) == (transport == "fabric")


def test_a_worker_registers_at_several_hosts_and_is_each_ones_member(
    spec: ModelSpec, key_file: Path, register: Register, port: int
) -> None:
    other = free_port()
    process = register("w0", "--register", f"tcp://127.0.0.1:{other}")
    with start(spec, key_file, topology_of(port, "w0")) as one:
        with start(spec, key_file, topology_of(other, "w0")) as two:
            check_bits(one)
            check_bits(two)
            session = two._fleet.members["w0"].session
            assert session is not None
            counted = session.ask_stats(timeout_s=READY_S)
            # One copy of the weights, and a session with each.
            assert counted["sessions"] == 2
            weights = sum(layer.expert_bytes * layer.num_experts for layer in spec.layers)
            assert counted["resident_weight_bytes"] == weights
        check_bits(one)
        with start(spec, key_file, topology_of(other, "w0")) as again:
            check_bits(again)
    process.send_signal(signal.SIGTERM)
    assert process.wait(READY_S) == 130


def test_a_worker_that_one_of_its_hosts_refuses_for_good_serves_the_others(
    spec: ModelSpec, key_file: Path, register: Register, port: int
) -> None:
    other = free_port()
    process = register("w0", "--register", f"tcp://127.0.0.1:{other}")
    with start(spec, key_file, topology_of(port, "w0")) as runtime:
        # The other one knows no worker of this name.
        with contextlib.suppress(WorkerTimeout):
            start(spec, key_file, topology_of(other, "w1"), start_timeout_s=5.0).close()
        await_words(process, f"worker w0 is refused for good at tcp://127.0.0.1:{other}, and serves any others")
        check_bits(runtime)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--register", "tcp://h:1"], "--register tcp://h:1 is there twice"),
        (["--register", "tcp://h:2", "--max-sessions", "1"], "--register is there 2 times, and --max-sessions is 1"),
        (
            ["--register", "tcp://h:2", "--key-file", "k", "--key-file", "k"],
            "--key-file is there 3 times and --register 2 times",
        ),
    ],
)
def test_what_does_not_fit_several_hosts_is_refused(
    spec: ModelSpec, key_file: Path, options: list[str], said: str
) -> None:  # fmt: skip
    command = [sys.executable, "-m", "dflash_moe", "worker", "--register", "tcp://h:1", "--name", "w0"]
    command += ["--model", spec.path, "--key-file", str(key_file), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=READY_S, check=False)
    assert done.returncode == 2
    assert said in done.stderr
