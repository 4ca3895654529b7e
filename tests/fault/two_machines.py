"""Two network namespaces with a link between them: a worker on one, a host on the other.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_moe.model.spec import ModelSpec
from tests.fault.conftest import READY_S, first_line


class TwoMachines:
    """Two network namespaces with one link between them, as two machines with one cable."""

    def __init__(self) -> None:
        self.host, self.worker = (f"dflash{os.getpid()}{end}" for end in "hw")

    def make(self) -> str:
        """Returns why they cannot be made, empty where they were."""
        if shutil.which("ip") is None:
            return "there is no `ip` (package iproute2)"
        for command in (
            f"netns add {self.host}", f"netns add {self.worker}",
            f"-n {self.host} link add dm0 type veth peer name dm1 netns {self.worker}",
            f"-n {self.host} addr add 192.0.2.1/30 dev dm0", f"-n {self.worker} addr add 192.0.2.2/30 dev dm1",
            f"-n {self.host} link set dm0 up", f"-n {self.worker} link set dm1 up",
            f"-n {self.host} link set lo up", f"-n {self.worker} link set lo up",
        ):  # fmt: skip
            done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, timeout=30, check=False)
            if done.returncode != 0:
                return f"`ip {command}`: {done.stderr.strip()}"
        return ""

    def close(self) -> None:
        if shutil.which("ip") is None:
            return
        for name in (self.host, self.worker):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30, check=False)


def within(namespace: str, *arguments: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", namespace, sys.executable, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextlib.contextmanager
def worker_there(machines: TwoMachines, spec: ModelSpec, key_file: Path, folder: Path, *options: str) -> Iterator[str]:
    topology = folder / "worker.yaml"
    topology.write_text("version: 1\nworkers:\n  - {name: far, threads: 1}\n")
    process = within(
        machines.worker, "-m", "dflash_moe", "worker", "--topology", str(topology), "--name", "far", "--model", str(spec.path),
        "--listen", "tcp://192.0.2.2:0", "--key-file", str(key_file), *options,
    )  # fmt: skip
    try:
        yield first_line(process).rpartition(" ")[2]
    finally:
        process.kill()
        process.communicate(timeout=60)


def host_there(
    machines: TwoMachines, spec: ModelSpec, key_file: Path, address: str, *, worker: str = "", **settings: str
) -> dict[str, Any]:
    """Runs a host on the other machine and returns what it found (host_on_a_network.py). `worker`
    is what the topology says of its worker besides.
    """
    program = Path(__file__).with_name("host_on_a_network.py")
    process = within(machines.host, str(program), str(spec.path), str(key_file), address, worker, json.dumps(settings))
    stdout, stderr = process.communicate(timeout=2 * READY_S)
    assert process.returncode == 0, stderr
    return dict(json.loads(stdout))
