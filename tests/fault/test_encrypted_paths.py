"""Encrypted connections under attack: changed bytes, strangers by the hundred, and a network
between two namespaces on which somebody listens.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import ssl
import threading
import time
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
from tests.fault.conftest import READY_S, HandStarted, StartWorker, far_topology
from tests.fault.two_machines import TwoMachines, host_there, worker_there

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


def test_between_two_machines_auto_encrypts_and_off_at_one_end_is_refused(
    machines: TwoMachines, spec: ModelSpec, key_file: Path, tmp_path: Path
) -> None:
    with worker_there(machines, spec, key_file, tmp_path) as address:
        found = host_there(machines, spec, key_file, address, encryption="auto")
        assert found["is_equal"]
        assert found["num_captured_bytes"] > 5000
        assert found["num_rows_seen"] == 0
        refused = host_there(machines, spec, key_file, address, encryption="off")
        assert "worker far wants encrypted connections here (ipc.encryption: auto)" in refused["error"]
    with worker_there(machines, spec, key_file, tmp_path, "--encryption", "off") as address:
        plain = host_there(machines, spec, key_file, address, encryption="off")
        assert plain["is_equal"]
        assert plain["num_rows_seen"] > 0  # the capture would have shown them
        refused = host_there(machines, spec, key_file, address, encryption="auto")
        assert "the peer answered without TLS; set ipc.encryption alike at both ends" in refused["error"]
