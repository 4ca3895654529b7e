"""What workers ask of a cluster of Ray's, which resource it lacks, and how an actor and its worker
live. None of it needs Ray.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_moe.cli.main import run
from dflash_moe.errors import ConfigError
from dflash_moe.integrations.ray.orders import MARK, WorkerOrder, head_of, missing_resource, worker_orders
from dflash_moe.protocol.keys import own_key_text, read_any_key_file, read_key_file, worker_key, write_key_file
from dflash_moe.topology import Topology, parse_address
from tests.expert_cases import make_checkpoint
from tests.fault.conftest import READY_S, is_gone, wait_until

ROOT = Path(__file__).parents[3]
HEAD = parse_address("tcp://10.0.0.1:7170")
LISTEN = "version: 1\nregistration: {listen: 'tcp://10.0.0.1:7170'}\nworkers:\n"
CPU_WORKER = "  - {name: w0, threads: 3, memory: 8GiB, address: registered}\n"
CARD_WORKER = "  - {name: w1, threads: 2, backend: cuda, address: registered}\n"


def orders_of(text: str, *, key: bytes | None = None, **named: str) -> list[WorkerOrder]:
    return worker_orders(Topology.parse(text), model="/models/m", head=HEAD, key_file="/keys/k", group_key=key, named=named)


def test_a_worker_asks_for_its_threads_card_memory_and_named_resource():
    local = "  - {name: near, threads: 1}\n"
    first, second = orders_of(LISTEN + CPU_WORKER + CARD_WORKER + local, w1="rack:3")
    assert first.bundle == {"CPU": 3, "memory": 8 << 30}
    assert second.bundle == {"CPU": 2, "GPU": 1, "rack:3": MARK}
    assert first.arguments == (
        "--register", "tcp://10.0.0.1:7170", "--name", "w0", "--model", "/models/m", "--threads", "3",
        "--memory", str(8 << 30), "--key-file", "/keys/k",
    )  # fmt: skip


def test_a_shared_key_is_the_workers_own(tmp_path):
    write_key_file(tmp_path / "group")
    group = read_key_file(tmp_path / "group")
    (order,) = orders_of(LISTEN + CPU_WORKER, key=group)
    assert "--key-file" not in order.arguments
    (tmp_path / "own").write_text(order.key_text or "")
    (tmp_path / "own").chmod(0o600)
    found = read_any_key_file(tmp_path / "own")
    assert (found.key, found.worker) == (worker_key(group, "w0"), "w0")
    assert group.hex() not in repr(order) + (order.key_text or "")
    assert found.key.hex() not in repr(order)


@pytest.mark.parametrize(
    ("worker", "named", "said"),
    [
        ("{name: w0, address: registered}", {}, "<string>:4: worker w0 has no threads; .* write threads: N"),
        ("{name: w0, threads: 1, backend: hip, device: 1, address: registered}", {}, "device 1: Ray gives a worker one card"),
        ("{name: w0, threads: 1, address: registered}", {"w1": "rack"}, "--resource 'w1': .* no worker of that name"),
    ],
)
def test_what_ray_cannot_place_is_refused(worker, named, said):
    with pytest.raises(ConfigError, match=said):
        orders_of(f"{LISTEN}  - {worker}\n", **named)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("version: 1\nworkers: [{name: w0, threads: 1}]\n", "none has address: registered"),
        (LISTEN.replace("10.0.0.1", "0.0.0.0") + CPU_WORKER, "is every address of the host; say with --register"),
        (LISTEN.replace("10.0.0.1", "[::]") + CPU_WORKER, "is every address of the host; say with --register"),
    ],
)
def test_a_head_that_nodes_cannot_dial_is_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        head_of(Topology.parse(text))


@pytest.mark.parametrize(
    ("nodes", "free", "said"),
    [
        ([{"CPU": 4}], {"CPU": 4}, "worker b needs 1 GPU, and none of 1 nodes has more than 0 GPU; .*backend"),
        ([], {}, "worker a needs 2 CPU, and none of 0 nodes has more than 0 CPU; .*threads"),
        ([{"CPU": 1, "GPU": 1}, {"CPU": 2}], {"CPU": 3, "GPU": 1}, "worker b needs 2 CPU and 1 GPU on one node, .* all of it"),
        ([{"CPU": 4, "GPU": 1}], {"CPU": 3, "GPU": 1}, "2 workers need 4 CPU, and 3 CPU of all nodes is free"),
        ([{"CPU": 2, "GPU": 1}, {"CPU": 2}], {"CPU": 4, "GPU": 1}, "worker a needs 2 CPU, and no node has as much left"),
    ],
)
def test_the_resource_that_is_missing_is_named(nodes, free, said):
    orders = [WorkerOrder("a", {"CPU": 2}, ()), WorkerOrder("b", {"CPU": 2, "GPU": 1}, ())]
    with pytest.raises(ConfigError, match=said):
        raise ConfigError(missing_resource(orders, nodes, free))


def test_missing_memory_is_written_as_people_write_it():
    said = missing_resource([WorkerOrder("a", {"CPU": 1, "memory": 8 << 30}, ())], [{"CPU": 4, "memory": 1 << 30}], {})
    assert said.startswith("worker a needs 8.0 GiB of memory, and none of 1 nodes has more than 1.0 GiB of memory")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "here", "--key-file", "/keys/k"], "--model 'here' is relative"),
        (["--model", "demo", "--key-file", "k"], "--key-file 'k' is relative"),
        (["--model", "demo", "--key-file", "/no/k", "--share-key"], "key file /no/k cannot be read"),
        (["--model", "demo", "--key-file", "/k", "--resource", "w0"], "--resource 'w0': give WORKER=NAME"),
        (["--model", "demo", "--key-file", "/k", "--register", "tcp://h:0"], "--register: 'tcp://h:0' is no tcp://"),
    ],
)
def test_bad_flags_are_named(flags, said, tmp_path, capsys):
    (tmp_path / "t.yaml").write_text(LISTEN + CPU_WORKER)
    assert run(["launch", "ray", "--topology", str(tmp_path / "t.yaml"), *flags]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_without_ray_the_extra_is_named(tmp_path, capsys):
    (tmp_path / "t.yaml").write_text(LISTEN + CPU_WORKER)
    assert run(["launch", "ray", "--topology", str(tmp_path / "t.yaml"), "--model", "demo", "--key-file", "/k"]) == 2
    assert "needs it here and on each node: pip install 'dflash-moe[ray]'" in capsys.readouterr().err


def actor(*arguments: str, key: str | None = None) -> subprocess.Popen[str]:
    """A process that is an actor, without Ray."""
    program = (
        "import sys, time; from dflash_moe.integrations.ray.worker_actor import WorkerActor; "
        f"actor = WorkerActor('w0', {arguments!r}, {key!r}); sys.stdin.read(); actor.stop(); print('stopped')"
    )
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=pipe, stdout=pipe,
        stderr=pipe, text=True,
    )  # fmt: skip


def read_until(pipe, text: str) -> None:
    for line in pipe:
        if text in line:
            return
    raise AssertionError(text)


def child_of(process: subprocess.Popen[str]) -> int:
    found = [task.read_text().split() for task in Path(f"/proc/{process.pid}/task").glob("*/children")]
    (pid,) = [int(pid) for pids in found for pid in pids]
    return pid


def test_an_actor_ends_with_its_worker_and_lingers_after_a_refusal():
    left = actor("--help")
    read_until(left.stderr, "worker w0 ended with exit code 0, and Ray starts it anew")
    assert left.wait(READY_S) == 1
    left.communicate(timeout=READY_S)
    refused = actor("--name", "w0")
    read_until(refused.stderr, "worker w0 ended with exit code 2, and Ray starts it anew")
    assert refused.poll() is None
    assert refused.communicate("", timeout=READY_S)[0] == "stopped\n"


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_worker_ends_with_its_actor(is_killed, tmp_path):
    """It has the key that came with the order, and nobody listens where it dials."""
    checkpoint = make_checkpoint(tmp_path / "tiny")
    process = actor(
        "--register", "tcp://127.0.0.1:1", "--name", "w0", "--model", str(checkpoint), key=own_key_text(bytes(range(32)), "w0")
    )
    read_until(process.stdout, "worker w0 registers at tcp://127.0.0.1:1")
    pid = child_of(process)
    assert b"\0--register\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    if is_killed:
        process.send_signal(signal.SIGKILL)
    _, said = process.communicate("", timeout=READY_S)
    assert wait_until(lambda: is_gone(pid), READY_S)
    assert ("interrupted" in said) == (not is_killed)
