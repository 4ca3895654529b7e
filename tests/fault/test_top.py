"""`dflash-moe top` beside hosts that compute, lose workers, end, stand still and lie.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dflash_moe.cli.top.host_rates import read_snapshot
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.protocol import control
from tests.expert_cases import call, local_topology
from tests.fault.conftest import freeze, kill, pids, states, wait_until

SOON_S = 120.0
ME = str(os.getpid())


@pytest.fixture
def runtime(spec: ModelSpec) -> Iterator[ExpertRuntime]:
    with ExpertRuntime.start(local_topology(replicas=2), model=spec, restart_deaths=1) as runtime:
        yield runtime


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dflash_moe", "top", *arguments]


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False, timeout=SOON_S)


def stats() -> dict:
    return control.ask(os.getpid(), {"order": "stats"}, timeout_s=SOON_S)


@contextmanager
def calls_go_on(runtime: ExpertRuntime) -> Iterator[None]:
    is_over = threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            call(runtime)

    computing = threading.Thread(target=compute)
    computing.start()
    try:
        yield
    finally:
        is_over.set()
        computing.join(SOON_S)


def test_a_snapshot_has_what_the_runtime_counted(runtime: ExpertRuntime) -> None:
    call(runtime)
    found, counted = stats(), runtime.stats()["workers"]
    assert (found["pid"], found["engine"], found["model"]) == (os.getpid(), None, runtime.spec.path)
    assert {row["name"] for row in found["workers"]} == {"w0", "w1"}
    for row in found["workers"]:
        assert row["memory_bytes"] > 0
        for key in ("rows", "request_bytes", "reply_bytes", "wait_ns", "worker_compute_ns"):
            assert row[key] == counted[row["name"]][key]
    assert sum(row["rows"] for row in found["workers"]) > 0


def test_rates_are_shown_once_as_table_and_as_json(runtime: ExpertRuntime) -> None:
    with calls_go_on(runtime):
        shown = top("--pid", ME, "--once")
        found = top("--pid", ME, "--once", "--json", "--interval", "0.5")
    assert shown.returncode == found.returncode == 0, shown.stderr + found.stderr
    assert f"host {ME}: " in shown.stdout
    assert "w1 " in shown.stdout
    rates = json.loads(found.stdout)
    assert [(one["name"], one["state"], one["transport"]) for one in rates["workers"]] == [
        ("w0", "ready", "shared"), ("w1", "ready", "shared"),
    ]  # fmt: skip
    assert sum(one["rows_per_s"] for one in rates["workers"]) > 0
    assert sum(one["request_bytes_per_s"] for one in rates["workers"]) > 0
    assert sum(one["busy_share"] for one in rates["workers"]) > 0


def test_a_frozen_and_a_dead_worker_are_told_without_asking_them(runtime: ExpertRuntime) -> None:
    call(runtime)
    freeze(pids(runtime)["w0"])
    kill(runtime, "w1")
    assert wait_until(lambda: states(runtime)["w1"] == "quarantined", SOON_S)
    rows = {row["name"]: row for row in stats()["workers"]}
    assert rows["w1"]["state"] == "quarantined"
    assert rows["w1"]["reason"]
    assert rows["w0"]["memory_bytes"] > 0


def test_a_host_that_is_not_there_and_wrong_options_are_one_sentence() -> None:
    nobody = top("--pid", "1", "--once")
    assert nobody.returncode == 2
    assert nobody.stderr.splitlines()[-1].startswith("--pid 1: no running host of this user has this process id")
    endless = top("--json", "-")
    assert endless.returncode == 2
    assert "--once" in endless.stderr.splitlines()[-1]


# Another host's end of the socket: what it computes nobody asks for here.
HOST = """
import sys
from dflash_moe.holders.control import ControlSocket
from tests.unit.cli.top.test_host_rates import HOST
host = ControlSocket(lambda request: HOST)
host.start()
print("ready", flush=True)
sys.stdin.readline()
"""


@contextmanager
def other_host() -> Iterator[subprocess.Popen[str]]:
    host = subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout is not None
        assert host.stdout.readline() == "ready\n"
        yield host
    finally:
        host.kill()
        host.communicate()


def test_of_several_hosts_one_is_named(runtime: ExpertRuntime) -> None:
    with other_host() as host:
        several = top("--once")
        assert several.returncode == 2
        sentence = several.stderr.splitlines()[-1]
        assert str(host.pid) in sentence
        assert ME in sentence
        assert "--pid" in sentence
        assert json.loads(top("--once", "--pid", str(host.pid), "--json").stdout)["pid"] == 4711


def test_a_host_that_ends_while_it_is_watched_is_one_sentence() -> None:
    with other_host() as host:
        watching = subprocess.Popen(
            command("--pid", str(host.pid), "--interval", "0.05"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert watching.stdout is not None
        assert watching.stdout.readline().startswith("host 4711: ")
        host.send_signal(signal.SIGKILL)
        _, said = watching.communicate(timeout=SOON_S)
    assert watching.returncode == 1
    assert said.splitlines()[-1].startswith(f"host {host.pid}: the host hung up")


@pytest.mark.parametrize("answer", [b"[]\n", b'{"result": 3}\n', b"[" * 200_000 + b"\n", b'{"result": {"workers": {}}}\n', b""])
def test_a_liar_in_the_place_of_a_host_is_one_sentence(answer: bytes) -> None:
    with control.listen() as listener:
        listener.settimeout(SOON_S)
        is_over = threading.Event()

        def lie() -> None:
            while not is_over.is_set():
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                with sock:
                    sock.settimeout(SOON_S)
                    if sock.recv(1 << 16):
                        sock.sendall(answer)

        lying = threading.Thread(target=lie)
        lying.start()
        told = top("--pid", ME, "--once")
        is_over.set()
        control.dial(listener.getsockname()[1:].decode()).close()
        lying.join(SOON_S)
    assert told.returncode in (1, 2), told.stderr
    assert "Traceback" not in told.stderr
    assert told.stderr.splitlines()[-1].startswith(f"host {ME}: ")


def test_deep_orders_leave_the_host_well(runtime: ExpertRuntime) -> None:
    for name in control.running_hosts()[os.getpid()]:
        with control.dial(name) as sock:
            sock.sendall(b"[" * 500_000 + b"\n")
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(SOON_S)
            assert sock.recv(1) == b""
    assert read_snapshot(stats()).workers
