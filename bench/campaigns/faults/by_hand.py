"""Workers that somebody started by hand: real `dflash-moe worker` processes, which a host reaches
at an address and cannot start again.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.campaigns.faults.load import ALONE
from dflash_moe.config.settings import MAX_DEATHS
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.protocol.keys import write_key_file
from dflash_moe.topology import Topology

# The workers run this tree's package.
ROOT = Path(__file__).resolve().parents[3]
# A worker says its address within this time on a busy machine.
READY_S = 60.0
# The settings of the host with which it reaches a worker by hand over each transport.
WAYS: dict[str, dict[str, Any]] = {"shared": {}, "unix": {"transport": "stream"}, "tcp": {}}


@dataclass(frozen=True, slots=True)
class HandStarted:
    """One worker process and the address that it listens at."""

    process: subprocess.Popen[str]
    address: str

    @property
    def pid(self) -> int:
        """The process."""
        return self.process.pid

    @property
    def place(self) -> tuple[str, int]:
        """Host and port of a TCP address."""
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        return host, int(port)


@contextlib.contextmanager
def worker_by_hand(
    spec: ModelSpec, folder: Path, listen: str, *options: str, prefix: Sequence[str] = (), name: str = "far"
) -> Iterator[HandStarted]:
    """Starts a worker that listens at `listen`, and kills it at the end of the block. `prefix` are
    words before the command, such as those that enter a network namespace.
    """
    folder.mkdir(parents=True, exist_ok=True)
    topology = folder / f"{name}.yaml"
    topology.write_text(f"version: 1\nworkers:\n  - {{name: {name}, threads: 1}}\n", encoding="utf-8")
    command = [*prefix, sys.executable, "-m", "dflash_moe", "worker", "--topology", str(topology), "--name", name]
    command += ["--model", str(spec.path), "--listen", listen, *options]
    with _started(command, folder / f"{name}.log") as (process, line):
        yield HandStarted(process, line.rpartition(" ")[2])


@contextlib.contextmanager
def registered_worker(spec: ModelSpec, folder: Path, head: str, key: Path) -> Iterator[subprocess.Popen[str]]:
    """Starts the worker `far`, which registers at `head`, and kills it at the end of the block."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "dflash_moe", "worker", "--register", head, "--name", "far", "--model", str(spec.path)]
    with _started([*command, "--key-file", str(key), "--threads", "1"], folder / "far.log") as (process, _):
        yield process


@contextlib.contextmanager
def _started(command: Sequence[str], log_file: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Runs a worker and waits for the first line that it prints."""
    with log_file.open("a") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)
    try:
        if process.stdout is None:
            raise RuntimeError("a pipe was asked for")
        readable, _, _ = select.select([process.stdout], [], [], READY_S)
        line = process.stdout.readline() if readable else ""
        if not line:
            raise RuntimeError(f"a worker by hand did not begin: {log_file.read_text()[-2000:]}")
        yield process, line.strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
            process.kill()
        process.communicate(timeout=READY_S)


@contextlib.contextmanager
def reached(spec: ModelSpec, folder: Path, way: str, **overrides: Any) -> Iterator[tuple[ExpertRuntime, HandStarted]]:
    """Starts one worker by hand that holds everything, and a host that reaches it over `way`."""
    folder.mkdir(parents=True, exist_ok=True)
    key = folder / "shared.key"
    if not key.exists():
        write_key_file(key)
    listen = "tcp://127.0.0.1:0" if way == "tcp" else f"unix://{folder}/far.sock"
    options = ("--key-file", str(key)) if way == "tcp" else ()
    with worker_by_hand(spec, folder, listen, *options) as worker:
        given = {**ALONE, "restart_deaths": MAX_DEATHS, **WAYS[way], **({"key_file": key} if way == "tcp" else {}), **overrides}
        with ExpertRuntime.start(reaching(worker.address), model=spec, **given) as runtime:
            yield runtime, worker


def reaching(address: str) -> Topology:
    """Returns a topology of one worker at this address."""
    return Topology.parse(f"version: 1\nworkers:\n  - {{name: far, threads: 1, address: '{address}'}}\n")
