"""Encrypted connections under attack: changed bytes, strangers by the hundred, and a network
between two namespaces on which somebody listens.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.campaigns.faults.hostile_path import HostilePath
from dflash_moe import _core
from dflash_moe.errors import DflashError, ProtocolError, WorkerError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.protocol.encryption import identity_of
from tests.expert_cases import call, expected_of, make_batch
from tests.fault.conftest import READY_S, HandStarted, StartWorker, far_topology, first_line

# Calls whose reply will not come, because a changed length has the reader wait, end after this.
# A worker that came back by itself would hide that its connection had ended.
SHORT = {"call_timeout_s": 4.0, "stall_timeout_s": 2.0, "start_timeout_s": 10.0, "restart": False}
# In a session of these tests about so many bytes pass before and in its first call.
START_BYTES = 6000
NUM_FLIPS, NUM_EARLY_FLIPS, NUM_STRANGERS = 50, 40, 1000


@pytest.fixture
def worker(spec: ModelSpec, key_file: Path, start_worker: StartWorker) -> HandStarted:
    return start_worker(Path(spec.path), "tcp://127.0.0.1:0", "--key-file", str(key_file), "--encryption", "on")


def place(worker: HandStarted) -> tuple[str, int]:
    host, _, port = worker.address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def reach(spec: ModelSpec, address: str, key_file: Path, *, encryption: str = "on", **overrides: Any) -> ExpertRuntime:
    topology = far_topology(address, has_near=False)
    return ExpertRuntime.start(topology, model=spec, key_file=key_file, encryption=encryption, **overrides)


def reach_when_free(spec: ModelSpec, address: str, key_file: Path, **overrides: Any) -> ExpertRuntime:
    """Reaches a worker that may still be ending its former session."""
    until = time.monotonic() + READY_S
    while True:
        try:
            return reach(spec, address, key_file, **overrides)
        except WorkerError as error:
            if "is busy" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.02)


def call_until_broken(runtime: ExpertRuntime, expected: np.ndarray) -> None:
    """Calls until an error, and compares every result that comes."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        assert np.array_equal(call(runtime), expected)


# A worker for each seed, because nobody reads what a worker logs here while it lives.
@pytest.mark.parametrize("seed", range(4))
def test_any_flipped_bit_ends_the_connection_with_an_error_and_never_with_a_wrong_number(
    spec: ModelSpec, key_file: Path, worker: HandStarted, seed: int
) -> None:
    chance = random.Random(seed)
    with HostilePath(*place(worker)) as path:
        for _ in range(NUM_FLIPS):
            with reach_when_free(spec, path.address, key_file, **SHORT) as runtime:
                expected = expected_of(runtime)
                assert np.array_equal(call(runtime), expected)
                path.flip(chance.randrange(20_000), chance.randrange(8))
                with pytest.raises((WorkerError, ProtocolError)):
                    call_until_broken(runtime, expected)
                assert path.has_flipped
        with reach_when_free(spec, path.address, key_file) as runtime:
            assert np.array_equal(call(runtime), expected_of(runtime))


def test_a_bit_flipped_in_a_start_never_makes_a_wrong_number(spec: ModelSpec, key_file: Path, worker: HandStarted) -> None:
    """A few bits are nobody's: TLS ignores the version in the header of its first records, and a
    start that the worker was too busy for may have taken the flip with it.
    """
    chance = random.Random(17)
    num_errors = 0
    with HostilePath(*place(worker)) as path:
        for _ in range(NUM_EARLY_FLIPS):
            path.flip(chance.randrange(START_BYTES), chance.randrange(8))
            try:
                with reach_when_free(spec, path.address, key_file, **SHORT) as runtime:
                    expected = expected_of(runtime)
                    for _ in range(5):
                        assert np.array_equal(call(runtime), expected)
            except (WorkerError, ProtocolError):
                num_errors += 1
    assert num_errors > NUM_EARLY_FLIPS // 2


@pytest.mark.parametrize("encryption", ["on", "off"])
def test_what_passes_holds_no_row_that_went_through(
    spec: ModelSpec, key_file: Path, start_worker: StartWorker, encryption: str
) -> None:
    worker = start_worker(Path(spec.path), "tcp://127.0.0.1:0", "--key-file", str(key_file), "--encryption", encryption)
    with HostilePath(*place(worker)) as path:
        with reach(spec, path.address, key_file, dtype="f32", encryption=encryption) as runtime:
            path.record()
            call(runtime)
        rows = [row.tobytes() for row in make_batch(20).hidden_states]
        assert len(path.recorded) > len(rows) * len(rows[0])
        num_seen = sum(row in path.recorded for row in rows)
    # In clear they are all there, so that the search would have found them.
    assert num_seen == (0 if encryption == "on" else len(rows))


def wrong_key(sock: socket.socket) -> str:
    secure = _core.SecureSocket(
        sock.detach(), is_dialling=True, keys=[(identity_of("control", "far"), secrets.token_bytes(32))]
    )
    with contextlib.suppress(DflashError):
        until = time.monotonic() + 10
        while time.monotonic() < until:
            if secure.handshake():
                return "accepted"
            time.sleep(0.001)
    secure.close()
    return "refused"


def certificates(sock: socket.socket) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        context.wrap_socket(sock).close()
    except OSError:
        return "refused"
    return "accepted"


def garbage(sock: socket.socket) -> str:
    """A TLS record of random content, or random bytes, and no answer but a hang-up or an alert."""
    beginning = b"\x16\x03\x01\x00\xf0" if secrets.randbelow(2) else b""
    with contextlib.suppress(OSError):
        sock.sendall(beginning + secrets.token_bytes(240))
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
    return "refused"


def test_a_thousand_bad_handshakes_get_nothing_while_a_session_is_served(
    spec: ModelSpec, key_file: Path, worker: HandStarted
) -> None:
    outcomes: list[str] = []
    with reach(spec, worker.address, key_file) as runtime:
        expected = expected_of(runtime)
        over = threading.Event()

        def pester() -> None:
            for number in range(NUM_STRANGERS):
                with socket.create_connection(place(worker), timeout=30) as stranger:
                    outcomes.append((wrong_key, garbage, garbage, certificates)[number % 4](stranger))
            over.set()

        thread = threading.Thread(target=pester)
        thread.start()
        num_calls = 0
        while not over.is_set() and thread.is_alive():
            assert np.array_equal(call(runtime), expected)
            num_calls += 1
        thread.join(60)
        assert np.array_equal(call(runtime), expected)
    assert outcomes.count("refused") == NUM_STRANGERS
    assert num_calls > 10
    assert worker.process.poll() is None


class TwoMachines:
    """Two network namespaces with one link between them, as two machines with one cable."""

    def __init__(self) -> None:
        self.host, self.worker = (f"dflash{os.getpid()}{end}" for end in "hw")

    def make(self) -> str:
        """Returns why they cannot be made, empty where they were."""
        if shutil.which("ip") is None:
            return "there is no `ip` (package iproute2)"
        for command in (
            f"netns add {self.host}", f"netns add {self.worker}",
            f"-n {self.host} link add dm0 type veth peer name dm1 netns {self.worker}",
            f"-n {self.host} addr add 192.0.2.1/30 dev dm0", f"-n {self.worker} addr add 192.0.2.2/30 dev dm1",
            f"-n {self.host} link set dm0 up", f"-n {self.worker} link set dm1 up",
            f"-n {self.host} link set lo up", f"-n {self.worker} link set lo up",
        ):  # fmt: skip
            done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, timeout=30, check=False)
            if done.returncode != 0:
                return f"`ip {command}`: {done.stderr.strip()}"
        return ""

    def close(self) -> None:
        if shutil.which("ip") is None:
            return
        for name in (self.host, self.worker):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30, check=False)


@pytest.fixture
def machines() -> Iterator[TwoMachines]:
    made = TwoMachines()
    reason = made.make()
    if reason:
        made.close()
        pytest.skip(f"two network namespaces cannot be made: {reason}")
    yield made
    made.close()


def within(namespace: str, *arguments: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", namespace, sys.executable, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextlib.contextmanager
def worker_there(machines: TwoMachines, spec: ModelSpec, key_file: Path, folder: Path, *options: str) -> Iterator[str]:
    topology = folder / "worker.yaml"
    topology.write_text("version: 1\nworkers:\n  - {name: far, threads: 1}\n")
    process = within(
        machines.worker, "-m", "dflash_moe", "worker", "--topology", str(topology), "--name", "far", "--model", str(spec.path),
        "--listen", "tcp://192.0.2.2:0", "--key-file", str(key_file), *options,
    )  # fmt: skip
    try:
        yield first_line(process).rpartition(" ")[2]
    finally:
        process.kill()
        process.communicate(timeout=60)


def host_there(machines: TwoMachines, spec: ModelSpec, key_file: Path, address: str, setting: str) -> dict[str, Any]:
    """Runs a host on the other machine and returns what it found (host_on_a_network.py)."""
    program = Path(__file__).with_name("host_on_a_network.py")
    process = within(machines.host, str(program), str(spec.path), str(key_file), address, setting)
    stdout, stderr = process.communicate(timeout=2 * READY_S)
    assert process.returncode == 0, stderr
    return dict(json.loads(stdout))


def test_between_two_machines_auto_encrypts_and_off_at_one_end_is_refused(
    machines: TwoMachines, spec: ModelSpec, key_file: Path, tmp_path: Path
) -> None:
    with worker_there(machines, spec, key_file, tmp_path) as address:
        found = host_there(machines, spec, key_file, address, "auto")
        assert found["is_equal"]
        assert found["num_captured_bytes"] > 5000
        assert found["num_rows_seen"] == 0
        refused = host_there(machines, spec, key_file, address, "off")
        assert "worker far wants encrypted connections here (ipc.encryption: auto)" in refused["error"]
    with worker_there(machines, spec, key_file, tmp_path, "--encryption", "off") as address:
        plain = host_there(machines, spec, key_file, address, "off")
        assert plain["is_equal"]
        assert plain["num_rows_seen"] > 0  # the capture would have shown them
        refused = host_there(machines, spec, key_file, address, "auto")
        assert "the peer answered without TLS; set ipc.encryption alike at both ends" in refused["error"]
