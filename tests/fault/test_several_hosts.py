"""Several hosts on one worker at once: equal bits, one copy of their weights, room for as many as
was said, and a host that dies, freezes or floods disturbs nobody's numbers.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_moe import _core
from dflash_moe.errors import ConfigError, DflashError, WorkerError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.topology import Topology
from tests.expert_cases import call, expected_of
from tests.fault.conftest import HandStarted, StartWorker, freeze, wait_until

SOON_S = 90.0
ROOT = Path(__file__).parents[2]
# Says when its first call is answered, and calls on and on in so many threads as sys.argv[4] says.
OTHER_HOST = """
import sys, threading
from pathlib import Path
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.topology import Topology
from tests.expert_cases import call, tiny_spec

topology, key_file = Topology.parse(sys.argv[2]), Path(sys.argv[3]) if sys.argv[3] else None
runtime = ExpertRuntime.start(topology, model=tiny_spec(Path(sys.argv[1])), key_file=key_file)
call(runtime)
print("called", flush=True)

def call_on():
    while True:
        call(runtime, 200)

for _ in range(int(sys.argv[4])):
    threading.Thread(target=call_on, daemon=True).start()
threading.Event().wait(600)
"""


def text_of(address: str, **fields: Any) -> str:
    stated = "".join(f", {key}: {value}" for key, value in fields.items())
    return f"version: 1\nworkers:\n  - {{name: far, address: '{address}'{stated}}}\n"


def start(spec: ModelSpec, worker: HandStarted, *, weights: str = "auto", **overrides: Any) -> ExpertRuntime:
    return ExpertRuntime.start(Topology.parse(text_of(worker.address, weights=weights)), model=spec, **overrides)


def stats_of(runtime: ExpertRuntime) -> dict[str, int]:
    session = runtime._fleet.members["far"].session
    assert session is not None
    return session.ask_stats(timeout_s=SOON_S)


def check_bits(runtime: ExpertRuntime, times: int = 1) -> None:
    for number in range(times):
        tokens, layer = 30 + number % 7, number % 2
        assert np.array_equal(call(runtime, tokens, layer), expected_of(runtime, tokens, layer))


@pytest.fixture(params=["tcp", "unix", "shared"])
def reached(
    request: pytest.FixtureRequest, spec: ModelSpec, key_file: Path, tmp_path: Path, start_worker: StartWorker
) -> tuple[HandStarted, dict[str, Any]]:
    """A worker, and what a host that reaches it in this way is started with."""
    if request.param == "tcp":
        worker = start_worker(Path(spec.path), "tcp://127.0.0.1:0", "--key-file", str(key_file))
        return worker, {"key_file": key_file}
    worker = start_worker(Path(spec.path), f"unix://{tmp_path}/far.sock")
    return worker, {"transport": "stream"} if request.param == "unix" else {}


@contextmanager
def other_host(spec: ModelSpec, worker: HandStarted, reach: dict[str, Any], *, threads: int) -> Iterator[subprocess.Popen[str]]:
    """A host in a process of its own that calls on and on."""
    topology = text_of(worker.address) + f"ipc: {{transport: {reach.get('transport', 'auto')}}}\n"
    command = [sys.executable, "-c", OTHER_HOST, spec.path, topology, str(reach.get("key_file", "")), str(threads)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "called"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=SOON_S)


def test_hosts_call_at_once_with_equal_bits_and_one_copy_of_the_weights(
    spec: ModelSpec, reached: tuple[HandStarted, dict[str, Any]]
) -> None:
    worker, reach = reached
    with start(spec, worker, **reach) as first:
        check_bits(first, 2)
        alone = stats_of(first)
        with ExitStack() as stack:
            hosts = [first, *(stack.enter_context(start(spec, worker, **reach)) for _ in range(2))]
            with ThreadPoolExecutor(max_workers=len(hosts)) as pool:
                for done in [pool.submit(check_bits, host, 20) for host in hosts]:
                    done.result(SOON_S)
            found = stats_of(hosts[1])
        assert found["resident_weight_bytes"] == alone["resident_weight_bytes"] > 0
        assert (found["sessions"], alone["sessions"]) == (3, 1)
        assert found["calls"] < found["total_calls"]
        assert found["total_rows"] >= 3 * found["rows"]
        assert wait_until(lambda: stats_of(first)["sessions"] == 1, SOON_S)
        check_bits(first)


@pytest.mark.parametrize("what", ["killed", "frozen", "flooding"])
def test_another_host_that_dies_freezes_or_floods_changes_nothing(
    spec: ModelSpec, reached: tuple[HandStarted, dict[str, Any]], what: str
) -> None:
    worker, reach = reached
    with (
        start(spec, worker, **reach) as runtime,
        other_host(spec, worker, reach, threads=8 if what == "flooding" else 1) as other,
    ):
        check_bits(runtime, 10)
        if what == "killed":
            other.send_signal(signal.SIGKILL)
        elif what == "frozen":
            freeze(other.pid)
        check_bits(runtime, 30)
        if what == "killed":
            assert wait_until(lambda: stats_of(runtime)["sessions"] == 1, SOON_S)
        else:
            assert stats_of(runtime)["sessions"] == 2
        # Neither has this host been lost meanwhile, nor has the other one changed what it sees.
        assert stats_of(runtime)["errors"] == 0
        assert [(one.state, one.deaths) for one in runtime.workers() if one.name == "far"] == [("ready", 0)]


def test_hosts_beyond_max_sessions_are_refused_until_one_leaves(
    spec: ModelSpec, tmp_path: Path, start_worker: StartWorker
) -> None:
    worker = start_worker(Path(spec.path), f"unix://{tmp_path}/far.sock", max_sessions=2)
    with start(spec, worker) as first:
        with start(spec, worker):
            with pytest.raises(WorkerError, match="worker far is busy: it already serves 2 hosts, and max_sessions is 2; wait"):
                start(spec, worker)
            check_bits(first)
        with start(spec, worker) as third:
            check_bits(third)


def test_the_option_counts_before_the_topology_and_once_serves_one(
    spec: ModelSpec, tmp_path: Path, start_worker: StartWorker
) -> None:
    worker = start_worker(Path(spec.path), f"unix://{tmp_path}/far.sock", "--max-sessions", "1", max_sessions=2)
    with start(spec, worker), pytest.raises(WorkerError, match="it already serves another host, and max_sessions is 1"):
        start(spec, worker)
    once = start_worker(Path(spec.path), f"unix://{tmp_path}/once.sock", "--once")
    with start(spec, once), pytest.raises(WorkerError, match="worker far is busy"):
        start(spec, once)
    assert once.process.wait(SOON_S) == 0


def test_a_host_that_needs_another_kernel_set_is_refused_with_both(
    spec: ModelSpec, tmp_path: Path, start_worker: StartWorker
) -> None:
    worker = start_worker(Path(spec.path), f"unix://{tmp_path}/far.sock")
    with start(spec, worker, cpu_isa="scalar") as first:
        with pytest.raises(ConfigError, match="worker far: isa: this host asks for reference, the worker has scalar"):
            start(spec, worker, cpu_isa="reference")
        check_bits(first)
        with start(spec, worker) as second:
            check_bits(second)


def test_a_host_that_died_finds_its_weights_beside_those_of_another(
    spec: ModelSpec, reached: tuple[HandStarted, dict[str, Any]]
) -> None:
    worker, reach = reached
    with start(spec, worker, weights="int8", **reach) as int8:
        alone = stats_of(int8)["resident_weight_bytes"]
        with other_host(spec, worker, reach, threads=0) as other:
            both = stats_of(int8)["resident_weight_bytes"]
            other.kill()
            assert wait_until(lambda: stats_of(int8)["sessions"] == 1, SOON_S)
        with start(spec, worker, **reach) as back:
            assert stats_of(back)["resident_weight_bytes"] == both > alone
            check_bits(back)


def test_ctrl_c_ends_a_worker_and_all_its_sessions(spec: ModelSpec, tmp_path: Path, start_worker: StartWorker) -> None:
    worker = start_worker(Path(spec.path), f"unix://{tmp_path}/far.sock")
    with start(spec, worker) as first, start(spec, worker) as second:
        check_bits(first)
        worker.process.send_signal(signal.SIGINT)
        _, stderr = worker.process.communicate(timeout=SOON_S)
        assert worker.process.returncode == 130
        assert "Traceback" not in stderr
        for runtime in (first, second):
            with pytest.raises(DflashError, match="far"):
                call(runtime)


def test_a_host_in_c_and_one_in_python_have_one_worker_and_common_batches(
    tmp_path: Path, start_worker: StartWorker
) -> None:  # fmt: skip
    pytest.importorskip("gguf")
    from bench.models.tiny_gguf import tiny_gguf
    from dflash_moe.model.gguf_architectures.gguf_experts import gguf_experts

    model, program = tmp_path / "tiny.gguf", tmp_path / "calling_host"
    tiny_gguf(model, "q8_0", hidden_size=256, moe_intermediate_size=256, num_experts=8, top_k=2, num_layers=1)
    package = Path(_core.__file__).parent
    compile_it = ["cc", "-std=c11", Path(__file__).with_name("calling_host.c"), f"-I{package / 'include'}"]
    compile_it += [package / "libdflash_moe.so", f"-Wl,-rpath,{package}", "-o", program]
    subprocess.run(compile_it, check=True, timeout=120)
    worker = start_worker(model, f"unix://{tmp_path}/far.sock")
    plan = tmp_path / "plan.yaml"
    plan.write_text(text_of(worker.address) + "ipc: {dtype: f32}\n")
    launcher = [sys.executable, "-m", "dflash_moe", "llama", "--model", model, "--topology", plan]
    launcher += ["--plugin", "none", "--"]
    with ExpertRuntime.start(Topology.load(plan), model=gguf_experts(model).spec) as runtime:
        rows = ((np.arange(4 * 256) % 17) / 16 - 0.5).astype(np.float32).reshape(4, 256)
        ids = ((np.arange(8) // 2 + np.arange(8) % 2) % 8).astype(np.int32).reshape(4, 2)
        weights = np.full((4, 2), 0.5, np.float32)

        def call_once() -> np.ndarray:
            return np.array(runtime.experts(0, rows, ids, weights))

        expected = call_once()
        process = subprocess.Popen(
            [*map(str, launcher), str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        try:

            def is_in_common() -> bool:
                for _ in range(50):
                    assert np.array_equal(call_once(), expected)
                assert process.poll() is None, process.communicate()
                counted = stats_of(runtime)
                return counted["batch_sessions"] > counted["batches"] and counted["batch_rows"] > counted["rows"]

            assert wait_until(is_in_common, SOON_S)
            counted = stats_of(runtime)
            assert counted["total_batches"] < counted["total_calls"]
            assert counted["total_batch_sessions"] > counted["total_batches"]
            printed, complaints = process.communicate(timeout=SOON_S)
        finally:
            process.kill()
            process.communicate()
    assert process.returncode == 0, complaints
    total = float(printed.rpartition(" ")[2])
    of_ours = np.sum(expected.ravel().astype(np.float64) * (np.arange(1024) % 13 + 1))
    assert total == pytest.approx(float(of_ours), rel=1e-8)
