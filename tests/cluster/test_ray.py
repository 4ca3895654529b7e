"""`dflash-moe launch ray` with a cluster of Ray's on this machine, of three nodes: where workers
run, what becomes of them when something is killed, and what bad input gets.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from dflash_moe.model.spec import ModelSpec
from tests.cluster.conftest import (
    CLUSTER_S,
    ENVIRONMENT,
    check_bits,
    comes_back,
    command_of,
    dflash_moe,
    host,
    parent_of,
    topology_text,
)
from tests.cluster.kills import kill_one_after_the_other
from tests.cluster.ray_nodes import NAMED
from tests.fault.conftest import READY_S, is_gone, pids, state_of, wait_until

pytestmark = pytest.mark.ray
PLACED = re.compile(r"worker (\w+) runs on node (\S+) \((\w+)\), process (\d+)")


class Nodes(NamedTuple):
    address: str
    ids: list[str]


class Launch(NamedTuple):
    """A `launch ray` that runs: its process, and by worker the node's id and the process there."""

    process: subprocess.Popen[str]
    nodes: dict[str, str]
    pids: dict[str, int]


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    # Paths of sockets are short, and pytest's own folders are not.
    with tempfile.TemporaryDirectory(prefix="dflash-ray-") as folder:
        program = Path(__file__).with_name("ray_nodes.py")
        with Path(folder, "nodes.log").open("w") as log:
            started = subprocess.Popen(
                [sys.executable, str(program), folder], env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, text=True,
            )  # fmt: skip
        assert started.stdout is not None
        assert started.stdin is not None
        said = started.stdout.readline()
        assert said, Path(folder, "nodes.log").read_text()
        found = json.loads(said)
        yield Nodes(found["address"], found["nodes"])
        started.stdin.close()
        # It ends when the last of the cluster's processes has let go of it.
        started.stdout.read()
        started.wait(READY_S)


@pytest.fixture
def launch(nodes: Nodes, spec: ModelSpec, key_file: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `launch ray` for a topology's text, and ends it after the test."""
    processes = []

    def start(text: str, *options: str, key: Path = key_file) -> subprocess.Popen[str]:
        (tmp_path / "topology.yaml").write_text(text)
        process = dflash_moe(
            "launch", "ray", "--topology", str(tmp_path / "topology.yaml"), "--model", spec.path, "--key-file", str(key),
            "--address", nodes.address, *options,
        )  # fmt: skip
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.terminate()
        process.communicate(timeout=READY_S)


def placed(process: subprocess.Popen[str]) -> Launch:
    """Waits until all workers have been placed."""
    found = Launch(process, {}, {})
    assert process.stdout is not None
    for line in process.stdout:
        if match := PLACED.match(line):
            found.nodes[match[1]], found.pids[match[1]] = match[3], int(match[4])
        if "register at" in line:
            return found
    raise AssertionError(process.communicate(timeout=READY_S)[1])


def refused(process: subprocess.Popen[str]) -> str:
    """Waits for a command that ends with the exit code of bad input; returns its last line."""
    _, said = process.communicate(timeout=CLUSTER_S)
    assert process.returncode == 2, said
    return said.splitlines()[-1]


def test_workers_are_spread_and_come_back_under_their_names(
    launch: Callable[..., subprocess.Popen[str]], nodes: Nodes, spec: ModelSpec, key_file: Path, port: int
) -> None:
    text = topology_text(f"tcp://127.0.0.1:{port}", "w0", "w1", "w2")
    started = placed(launch(text, "--resource", f"w0={NAMED}"))
    assert set(started.nodes.values()) == set(nodes.ids)
    assert started.nodes["w0"] == nodes.ids[2]
    with host(text, spec, key_file) as runtime:
        first = pids(runtime)["w1"]
        assert first == started.pids["w1"]
        assert " -m dflash_moe worker --register " in command_of(first)
        os.kill(first, signal.SIGKILL)
        second = comes_back(runtime, "w1", first)
        # Ray leaves the child of an actor that is killed to itself.
        os.kill(parent_of(second), signal.SIGKILL)
        comes_back(runtime, "w1", second)
        assert state_of(runtime, "w0").deaths == state_of(runtime, "w2").deaths == 0
        assert stored_bytes(nodes) == 0
        # The others have shards of all that it holds.
        before = pids(runtime)
        started.process.terminate()
        assert started.process.wait(READY_S) == 130
        for name in ("w0", "w1", "w2"):
            assert wait_until(lambda name=name: is_gone(before[name]), READY_S)  # type: ignore[misc]
            assert "told to stop" in state_of(runtime, name).reason


def stored_bytes(nodes: Nodes) -> float:
    """Returns what the store of objects holds on all nodes."""
    program = (
        f"import ray; ray.init(address='{nodes.address}', log_to_driver=False); kind = 'object_store_memory'; "
        "print(ray.cluster_resources()[kind] - ray.available_resources()[kind])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=CLUSTER_S, check=True)
    return float(done.stdout.splitlines()[-1])


def test_workers_end_with_a_launcher_that_is_killed(launch: Callable[..., subprocess.Popen[str]], port: int) -> None:
    started = placed(launch(topology_text(f"tcp://127.0.0.1:{port}", "w0", "w1")))
    started.process.kill()
    assert wait_until(lambda: all(map(is_gone, started.pids.values())), CLUSTER_S)


def test_a_key_may_travel_with_the_order_and_no_file_lies_on_the_nodes(
    launch: Callable[..., subprocess.Popen[str]], spec: ModelSpec, key_file: Path, port: int
) -> None:
    text = topology_text(f"tcp://127.0.0.1:{port}", "w0", "w1", more=", require_key_per_worker: true")
    process = launch(text, "--share-key")
    started = placed(process)
    assert process.stderr is not None
    assert "everyone in that cluster can read them" in process.stderr.readline()
    assert "--key-file /proc/self/fd/" in command_of(started.pids["w0"])
    with host(text, spec, key_file) as runtime:
        check_bits(runtime)


def test_a_resource_that_is_missing_is_named(nodes: Nodes, spec: ModelSpec, key_file: Path, tmp_path: Path, port: int) -> None:
    """The command with a limit of its own, which is a minute for others."""
    (tmp_path / "topology.yaml").write_text(
        topology_text(f"tcp://127.0.0.1:{port}", "w0") + "  - {name: card, threads: 1, backend: cuda, address: registered}\n"
    )
    program = (
        "import sys; from dflash_moe.cli.main import main; from dflash_moe.integrations.ray import placed_workers; "
        "placed_workers.PENDING_S = 3; sys.exit(main())"
    )
    command = [
        sys.executable,
        "-c",
        program,
        "launch",
        "ray",
        "--topology",
        str(tmp_path / "topology.yaml"),
        "--model",
        spec.path,
    ]
    command += ["--key-file", str(key_file), "--address", nodes.address]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=CLUSTER_S, check=False)
    assert done.returncode == 2, done.stderr
    assert "worker card needs 1 GPU, and none of 3 nodes has more than 0 GPU" in done.stderr.splitlines()[-1]


def test_an_address_without_a_cluster_is_named(launch: Callable[..., subprocess.Popen[str]], port: int) -> None:
    text = topology_text(f"tcp://127.0.0.1:{port}", "w0")
    assert f"--address 127.0.0.1:{port}: no cluster of Ray's" in refused(launch(text, "--address", f"127.0.0.1:{port}"))


def test_no_call_fails_while_workers_are_killed(
    launch: Callable[..., subprocess.Popen[str]], spec: ModelSpec, key_file: Path, port: int
) -> None:
    text = topology_text(f"tcp://127.0.0.1:{port}", "w0", "w1", "w2")
    started = placed(launch(text))
    # Nobody reads what Ray says of each death, which a pipe would not hold.
    assert started.process.stdout is not None
    assert started.process.stderr is not None
    for pipe in (started.process.stdout, started.process.stderr):
        threading.Thread(target=pipe.read, daemon=True).start()
    with host(text, spec, key_file) as runtime:
        kill_one_after_the_other(runtime, "ray", "w0", "w1", "w2")
