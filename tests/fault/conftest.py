"""What the fault tests share: a tiny checkpoint, workers that are started by hand, signals to
workers, and a look at their states and at which processes are still alive.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dflash_moe.errors import DflashError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.holders.holder import WorkerState
from dflash_moe.model.spec import ModelSpec
from dflash_moe.protocol.keys import write_key_file
from dflash_moe.topology import Topology
from tests.expert_cases import make_checkpoint, tiny_spec

if TYPE_CHECKING:
    from tests.fault.two_machines import TwoMachines

# A worker that is started by hand announces its address within this time.
READY_S = 60.0
# Limits that nothing waits for: what goes on before them went on for another reason.
FAR: dict[str, Any] = {"stall_timeout_s": 90.0, "call_timeout_s": 90.0}


@pytest.fixture(autouse=True)
def lost_workers_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most faults are about what becomes of calls that nobody else can answer; with the host's own
    processor behind every worker there are none. Tests of the fallback ask for it by name.
    """
    monkeypatch.setenv("DFLASH_MOE_HOST_FALLBACK", "none")


@pytest.fixture(scope="session")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return tiny_spec(make_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "shared.key"
    write_key_file(path)
    return path


class HandStarted:
    """A `dflash-moe worker` process and the address it announced."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        self.address = address


StartWorker = Callable[..., HandStarted]


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[StartWorker]:
    """Starts workers by hand, and ends them after the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(model: Path, listen: str, *options: str, name: str = "far", **fields: Any) -> HandStarted:
        topology = tmp_path / "worker.yaml"
        stated = "".join(f", {key}: {value}" for key, value in fields.items())
        topology.write_text(f"version: 1\nworkers:\n  - {{name: {name}, threads: 1{stated}}}\n")
        command = [sys.executable, "-m", "dflash_moe", "worker", "--topology", str(topology), "--name", name]
        command += ["--model", str(model), "--listen", listen, *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        return HandStarted(process, first_line(process).rpartition(" ")[2])

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.communicate(timeout=200)


@pytest.fixture
def machines() -> Iterator[TwoMachines]:
    from tests.fault.two_machines import TwoMachines

    made = TwoMachines()
    reason = made.make()
    if reason:
        made.close()
        pytest.skip(f"two network namespaces cannot be made: {reason}")
    yield made
    made.close()


def first_line(process: subprocess.Popen[str]) -> str:
    """Returns the first line that a process prints, empty where none comes in time."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], READY_S)
    return process.stdout.readline().strip() if readable else ""


def far_topology(address: str, *, name: str = "far", has_near: bool = True) -> Topology:
    """A worker that somebody started at `address`, beside one that the host starts."""
    near = "  - {name: near, threads: 1}\n" if has_near else ""
    return Topology.parse(f"version: 1\nworkers:\n{near}  - {{name: {name}, threads: 1, address: '{address}'}}\n")


def flip_a_bit(checkpoint: Path, place: int = -5001, mask: int = 1) -> None:
    """Changes a bit of a checkpoint's file, by default one that no sample of the fingerprint
    reads.
    """
    with (checkpoint / "model.safetensors").open("r+b") as file:
        place = file.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ mask]))


def is_gone(pid: int) -> bool:
    """Says whether no such process runs any more. One that only waits to be reaped counts as
    gone.
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in ("Z", "X")


def freeze(pid: int) -> None:
    """Stops a process and returns only when every thread stands still, because SIGSTOP alone lets a
    thread that runs finish its work first.
    """
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    assert wait_until(lambda: all(_state(task) == "T" for task in tasks.iterdir()), 30.0), f"process {pid} does not stop"


def _state(task: Path) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    return "T"  # a thread that has ended meanwhile stands still too


def wait_until(claim: Callable[[], bool], seconds: float) -> bool:
    """Polls `claim` for at most `seconds`, and returns whether it came to hold."""
    until = time.monotonic() + seconds
    while not claim():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def pids(runtime: ExpertRuntime) -> dict[str, int]:
    """Returns the processes of the workers by name."""
    return {process.name: process.pid for process in runtime.worker_processes()}


def kill(runtime: ExpertRuntime, *workers: str) -> None:
    """Kills the processes of workers. A killed one may still answer what it has."""
    found = pids(runtime)
    for worker in workers:
        os.kill(found[worker], signal.SIGKILL)


def state_of(runtime: ExpertRuntime, worker: str) -> WorkerState:
    """Returns what is known of a worker."""
    return next(found for found in runtime.workers() if found.name == worker)


def states(runtime: ExpertRuntime) -> dict[str, str]:
    """Returns the states of all workers by name."""
    return {one.name: one.state for one in runtime.workers()}


@contextlib.contextmanager
def calls_of_two(call: Callable[[], Any]) -> Iterator[list[Any]]:
    """Two threads that call without a pause; collects what comes of it."""
    found: list[Any] = []
    is_over = threading.Event()

    def drive() -> None:
        while not is_over.is_set():
            try:
                found.append(call())
            except DflashError as error:
                found.append(error)
                is_over.wait(0.005)

    threads = [threading.Thread(target=drive) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        is_over.set()
        for thread in threads:
            thread.join(60)


def children_of(pid: int) -> list[int]:
    """Returns the direct children of a process."""
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        # A thread that has ended meanwhile has none, whether or not its file was still opened.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += [int(child) for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return found
