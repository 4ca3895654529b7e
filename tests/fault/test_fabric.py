"""Workers over libfabric: lost, frozen and come back, across two machines, and refused where calls
must not travel in clear. The providers are those over ordinary networks.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_moe import _core
from dflash_moe.errors import ConfigError, UnsupportedError, WorkerLost
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.holders import fleet
from dflash_moe.model.spec import ModelSpec
from dflash_moe.topology import Topology
from tests.expert_cases import call, expected_of, make_batch
from tests.fabrics import require_fabric
from tests.fault.conftest import FAR, StartWorker, freeze, is_gone, kill, pids, state_of, wait_until
from tests.fault.two_machines import TwoMachines, host_there, worker_there

SOON_S = 20.0
BACK_S = 90.0
# What a started worker has of libfabric; the host, which has all, offers all.
PROVIDERS = ("net", "tcp")


@pytest.fixture(autouse=True)
def has_fabric() -> None:
    require_fabric()


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FI_PROVIDER", request.param)
    return str(request.param)


def start(spec: ModelSpec, **overrides: Any) -> ExpertRuntime:
    return ExpertRuntime.start(Topology.local(2, address="tcp"), model=spec, transport="fabric", **overrides)


def far(address: str, more: str = "") -> Topology:
    return Topology.parse(f"version: 1\nworkers: [{{name: far, threads: 1, address: '{address}'{more}}}]\n")


@pytest.mark.usefixtures("provider")
def test_a_killed_worker_ends_its_call_at_once_and_is_back_over_the_fabric(spec: ModelSpec) -> None:
    with start(spec, park_s=0, restart_backoff_ms=(10, 50), restart_deaths=1000, **FAR) as runtime:
        expected = expected_of(runtime, 200)
        for deaths in range(1, 4):
            assert set(runtime.stats()["transports"].values()) == {"fabric"}
            assert runtime.stats()["fabric_strangers"] == 0
            assert {counters["fabric_strangers"] for counters in runtime.worker_stats().values()} == {0}
            waiting = runtime.submit(0, *make_batch(200))
            kill(runtime, "w1")
            began = time.monotonic()
            with suppress(WorkerLost):  # the call may have been done before
                waiting.result(timeout=SOON_S)
            assert time.monotonic() - began < SOON_S
            assert wait_until(lambda deaths=deaths: state_of(runtime, "w1").deaths == deaths, BACK_S)  # type: ignore[misc]
            assert wait_until(lambda: state_of(runtime, "w1").state == "ready", BACK_S)
            assert np.array_equal(call(runtime, 200), expected)


@pytest.mark.usefixtures("provider")
def test_a_frozen_worker_is_lost_after_the_stall_timeout(spec: ModelSpec) -> None:
    with start(spec, stall_timeout_s=1.0, call_timeout_s=90.0, restart=False) as runtime:
        call(runtime)
        victims = pids(runtime)
        freeze(victims["w1"])
        began = time.monotonic()
        with pytest.raises(WorkerLost, match="w1"):
            call(runtime)
        assert 0.8 < time.monotonic() - began < SOON_S
    assert all(is_gone(pid) for pid in victims.values())


def test_a_host_that_is_killed_leaves_its_worker_free_for_the_next(
    spec: ModelSpec, key_file: Path, start_worker: StartWorker
) -> None:
    import subprocess
    import sys

    worker = start_worker(Path(spec.path), "tcp://127.0.0.1:0", "--key-file", str(key_file))
    program = (
        "import sys; from pathlib import Path; from dflash_moe.experts.expert_runtime import ExpertRuntime\n"
        "from dflash_moe.topology import Topology; from tests.expert_cases import call, tiny_spec\n"
        "topology = Topology.parse(f\"version: 1\\nworkers: [{{name: far, threads: 1, address: '{sys.argv[2]}'}}]\\n\")\n"
        "spec, key_file = tiny_spec(Path(sys.argv[1])), sys.argv[3]\n"
        "runtime = ExpertRuntime.start(topology, model=spec, key_file=key_file, transport='fabric')\n"
        "call(runtime); print('called', flush=True)\n"
        "while True: call(runtime)\n"
    )
    command = [sys.executable, "-c", program, spec.path, worker.address, str(key_file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == "called\n"
        host.send_signal(signal.SIGKILL)
    until = time.monotonic() + BACK_S
    while True:
        try:
            runtime = ExpertRuntime.start(far(worker.address), model=spec, key_file=key_file, transport="fabric")
            break
        except WorkerLost:  # it is serving the former host still
            assert time.monotonic() < until
    with runtime:
        assert np.array_equal(call(runtime), expected_of(runtime))
    assert worker.process.poll() is None


# -- what is refused -------------------------------------------------------------------------------


def test_a_fabric_beyond_this_machine_needs_the_word_that_it_may_be_in_clear(spec: ModelSpec, key_file: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"worker far is reached by tcp://192\.0\.2\.9:7171, and a fabric carries calls in clear: .*fabric_clear",
    ):
        ExpertRuntime.start(far("tcp://192.0.2.9:7171"), model=spec, key_file=key_file, transport="fabric")


def test_a_worker_that_wants_encryption_refuses_a_fabric(spec: ModelSpec, key_file: Path, start_worker: StartWorker) -> None:
    worker = start_worker(Path(spec.path), "tcp://127.0.0.1:0", "--key-file", str(key_file), "--encryption", "on")
    with pytest.raises(UnsupportedError, match="worker far was started with --encryption on"):
        ExpertRuntime.start(far(worker.address), model=spec, key_file=key_file, transport="fabric", encryption="on")
    assert worker.process.poll() is None


def test_a_worker_without_a_provider_says_so(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_PROVIDER", "shm")
    with pytest.raises(UnsupportedError, match="libfabric has no provider here"):
        start(spec)


def test_auto_without_hardware_takes_tcp(
    spec: ModelSpec, key_file: Path, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start_worker(Path(spec.path), "tcp://127.0.0.1:0", "--key-file", str(key_file))
    if not any(one.is_fast for one in _core.fabric_providers()):
        with ExpertRuntime.start(far(worker.address, ", fabric_clear: true"), model=spec, key_file=key_file) as runtime:
            assert runtime.stats()["transports"] == {"far": "tcp"}
    # A host that believed to have hardware would find that it has none to offer, once.
    monkeypatch.setattr(fleet, "may_take_fabric", lambda _worker, setting: setting == "auto")
    with ExpertRuntime.start(far(worker.address, ", fabric_clear: true"), model=spec, key_file=key_file) as runtime:
        assert runtime.stats()["transports"]["far"] in ("tcp", "fabric")
        assert np.array_equal(call(runtime), expected_of(runtime))


# -- two machines ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("provider")
def test_between_two_machines_bits_are_equal_and_calls_in_clear(
    machines: TwoMachines, spec: ModelSpec, key_file: Path, tmp_path: Path
) -> None:
    with worker_there(machines, spec, key_file, tmp_path) as address:
        found = host_there(machines, spec, key_file, address, worker=", fabric_clear: true", transport="fabric")
        assert found["transport"] == "fabric"
        assert found["is_equal"]
        assert found["num_rows_seen"] > 0
        over_tcp = host_there(machines, spec, key_file, address)
        assert (over_tcp["transport"], over_tcp["is_equal"], over_tcp["num_rows_seen"]) == ("tcp", True, 0)


def test_loading_a_fabric_leaves_every_signal_with_whom_it_was() -> None:
    code = """
import signal, time
from pathlib import Path
from dflash_moe import _core

def caught():
    lines = Path("/proc/self/status").read_text().splitlines()
    return [line for line in lines if line.startswith(("SigCgt", "SigIgn"))]

signal.signal(signal.SIGINT, signal.default_int_handler)
before = caught()
_core.fabric_providers()
assert caught() == before, (before, caught())
try:
    signal.raise_signal(signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
