"""Orders from the command line to a running host, and strangers at its socket.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dflash_moe.errors import ConfigError, DflashError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.protocol import control
from dflash_moe.topology import Topology
from tests.expert_cases import call, local_topology, make_batch
from tests.fault.conftest import freeze, kill, pids, states, wait_until

SOON_S = 120.0
ME = str(os.getpid())


@pytest.fixture
def runtime(spec: ModelSpec) -> Iterator[ExpertRuntime]:
    with ExpertRuntime.start(local_topology(replicas=2), model=spec, restart_deaths=1) as runtime:
        yield runtime


def order(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dflash_moe", "workers", "--pid", ME, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=SOON_S)


def test_workers_are_listed_added_drained_restarted_and_released(runtime: ExpertRuntime, tmp_path: Path) -> None:
    right = call(runtime)
    shown = order("list", "--json", str(tmp_path / "workers.json"))
    assert shown.returncode == 0, shown.stderr
    assert "w0" in shown.stdout
    found = json.loads((tmp_path / "workers.json").read_text())
    assert found["pid"] == os.getpid()
    assert [(row["name"], row["state"], row["shards"]) for row in found["workers"]] == [("w0", "ready", 4), ("w1", "ready", 4)]
    assert [row["pid"] for row in found["workers"]] == [one.pid for one in runtime.worker_processes()]
    assert order().stdout.splitlines()[0] == shown.stdout.splitlines()[0]

    assert order("add", "{name: w2, threads: 1}").returncode == 0
    assert states(runtime) == dict.fromkeys(("w0", "w1", "w2"), "ready")
    assert order("drain", "w0", "--drain-s", "5").returncode == 0
    assert states(runtime) == dict.fromkeys(("w1", "w2"), "ready")
    before = pids(runtime)
    assert order("restart", "w1").returncode == 0
    assert pids(runtime)["w1"] != before["w1"]
    kill(runtime, "w2")
    assert wait_until(lambda: states(runtime)["w2"] == "quarantined", SOON_S)
    assert "w2: " in order("list").stdout
    assert order("release", "w2").returncode == 0
    assert wait_until(lambda: states(runtime)["w2"] == "ready", SOON_S)
    assert np.array_equal(call(runtime), right)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("drain", "w9"), "no worker is named 'w9'; there are w0, w1"),
        (("add", "{name: w0}"), "a worker of this name is there"),
        (("add", "{name: w2, nmae: w3}"), "add_worker:1: "),
        (("add", "{name: w2, memory: 1KiB}"), "of memory, and 1.0 KiB are left there"),
        (("release", "w0"), "worker w0 is ready and not quarantined"),
        (("restart", "w9"), "no worker is named 'w9'"),
    ],
)
def test_what_a_host_refuses_is_said_in_one_sentence(runtime: ExpertRuntime, arguments: tuple[str, ...], text: str) -> None:
    refused = order(*arguments)
    assert refused.returncode == 2, refused.stderr
    assert text in refused.stderr.splitlines()[-1]
    assert states(runtime) == {"w0": "ready", "w1": "ready"}


def test_a_host_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="--pid 1: no running host of this user has this process id"):
        control.ask(1, {"order": "list"}, timeout_s=1.0)


def address_of(runtime: ExpertRuntime) -> str:
    assert runtime.workers()
    return control.running_hosts()[os.getpid()][0]


@pytest.mark.parametrize(
    "line", [b"\n", b"{]\n", b"[1]\n", b"\xff\xfe\n", b'{"order": 3}\n', b'{"order": "drain"}\n', b"{" * 100]
)
def test_whatever_comes_the_host_goes_on(runtime: ExpertRuntime, line: bytes) -> None:
    address = address_of(runtime)
    for _ in range(3):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(SOON_S)
            sock.connect("\0" + address)
            sock.sendall(line)
            sock.shutdown(socket.SHUT_WR)
            answer = sock.recv(1 << 16)
        assert not answer or "error" in json.loads(answer)
    assert control.ask(os.getpid(), {"order": "list"}, timeout_s=SOON_S)["workers"]
    assert states(runtime) == {"w0": "ready", "w1": "ready"}


def test_more_callers_than_are_served_are_turned_away_and_leave_nothing(runtime: ExpertRuntime) -> None:
    address = address_of(runtime)
    before = len(os.listdir("/proc/self/fd"))
    silent = [control.dial(address) for _ in range(40)]
    for sock in silent:
        sock.close()
    assert wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, SOON_S)
    assert wait_until(lambda: not [one for one in threading.enumerate() if one.name == "dflash-order"], SOON_S)
    assert control.ask(os.getpid(), {"order": "list"}, timeout_s=SOON_S)["workers"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process as somebody else")
def test_another_users_process_gets_nothing(runtime: ExpertRuntime) -> None:
    address = address_of(runtime)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(SOON_S)
                sock.connect("\0" + address)
                sock.sendall(b'{"order": "list"}\n')
                code = 2 if sock.recv(16) else 0
        except (ConnectionResetError, BrokenPipeError):
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert states(runtime) == {"w0": "ready", "w1": "ready"}


def test_nothing_is_left_of_the_socket_after_the_runtime(spec: ModelSpec) -> None:
    before = len(os.listdir("/proc/self/fd"))
    runtime = ExpertRuntime.start(Topology.local(num_workers=1), model=spec)
    address = address_of(runtime)
    runtime.close()
    assert os.getpid() not in control.running_hosts()
    assert ("@" + address) not in control.UNIX_SOCKETS.read_text()
    assert not [one.name for one in threading.enumerate() if one.name.startswith("dflash-")]
    assert len(os.listdir("/proc/self/fd")) <= before  # fewer, where garbage of earlier tests went


def test_close_ends_an_order_that_is_under_way(spec: ModelSpec) -> None:
    runtime = ExpertRuntime.start(Topology.local(num_workers=2), model=spec)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            control.ask(os.getpid(), {"order": "drain", "name": "w0", "drain_s": 3600, "force": True}, timeout_s=SOON_S)
        except DflashError as error:
            errors.append(error)

    freeze(pids(runtime)["w0"])
    runtime.submit(0, *make_batch(200))
    asking = threading.Thread(target=ask)
    asking.start()
    assert wait_until(lambda: states(runtime)["w0"] == "draining", SOON_S)
    began = time.monotonic()
    runtime.close()
    asking.join(SOON_S)
    assert not asking.is_alive()
    assert time.monotonic() - began < SOON_S / 2
    assert len(errors) == 1
