"""What the tests of clusters share: a tiny checkpoint, a key, a host that calls without a pause,
and processes that are no children of the test run, as a cluster's are.

A test whose cluster this machine lacks is skipped with its name (tests/markers.py).
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.topology import Topology
from tests.expert_cases import call, expected_of
from tests.fault.conftest import READY_S, is_gone, key_file, lost_workers_are_missed, pids, spec, state_of, wait_until

__all__ = ["key_file", "lost_workers_are_missed", "spec"]

ROOT = Path(__file__).parents[2]
# What is started by a cluster's daemons imports this checkout.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0"}
# A busy machine needs so long to start a process of a cluster's, a worker in it, and its session.
CLUSTER_S = 3 * READY_S


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def topology_text(listen: str, *names: str, more: str = "") -> str:
    """Workers that register at `listen`, every shard with two holders."""
    workers = "".join(f"  - {{name: {name}, threads: 1, address: registered}}\n" for name in names)
    return f"version: 1\nregistration: {{listen: '{listen}'{more}}}\nplacement: {{replicas: 2}}\nworkers:\n{workers}"


@contextmanager
def host(text: str, spec: ModelSpec, key_file: Path, **settings: Any) -> Iterator[ExpertRuntime]:
    """A host in this process, which waits for the workers and never gives one up."""
    settings = {"start_timeout_s": CLUSTER_S, "restart_deaths": 1000, **settings}
    with ExpertRuntime.start(Topology.parse(text), model=spec, key_file=key_file, **settings) as runtime:
        check_bits(runtime)
        yield runtime


def check_bits(runtime: ExpertRuntime) -> None:
    for layer in (0, 1):
        assert np.array_equal(call(runtime, 40, layer), expected_of(runtime, 40, layer))


def comes_back(runtime: ExpertRuntime, worker: str, former_pid: int) -> int:
    """Calls without a pause until a worker serves from another process, and returns its number."""

    def is_back() -> bool:
        check_bits(runtime)
        return state_of(runtime, worker).deaths > 0 and state_of(runtime, worker).state == "ready"

    assert wait_until(is_back, CLUSTER_S)
    pid = pids(runtime)[worker]
    assert pid != former_pid
    assert wait_until(lambda: is_gone(former_pid), READY_S)
    return pid


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def dflash_moe(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Starts a command of ours, whose output is kept."""
    command = [sys.executable, "-m", "dflash_moe", *arguments]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
