"""A cluster of Slurm's with two nodes on this machine: munged for its keys, slurmctld, and a slurmd
for each node, all with files and ports of their own.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.fault.conftest import READY_S, is_gone, wait_until

NODES = ("n0", "n1")
CONFIGURATION = """
ClusterName=dflash
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# These nodes have what a test says and not what the machine has.
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=batch_sched_delay=1,sched_min_interval=100000
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=8 RealMemory=65536 State=UNKNOWN
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=8 RealMemory=65536 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmNodes:
    """The cluster; `environment` is what Slurm's commands need to find it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str) -> str:
        """Runs one of Slurm's commands and returns what it prints."""
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=READY_S, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        return "".join(f"\n{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))

    def are_idle(self) -> bool:
        return self.run("sinfo", "--noheader", "--format=%T").split() == ["idle"]


def _ports(count: int) -> list[int]:
    with contextlib.ExitStack() as taken:
        found = [taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in found]


@contextlib.contextmanager
def slurm_nodes(folder: Path) -> Iterator[SlurmNodes]:
    """Starts the daemons, which leave this process by themselves, and ends them."""
    nodes = SlurmNodes(folder)
    controller, first, second = _ports(3)
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, timeout=READY_S, check=True).stdout.strip()
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            folder=folder,
            host=socket.gethostname().partition(".")[0],
            user=user,
            controller=controller,
            first=first,
            second=second,
        )
    )
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)
    munge = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    try:
        # Its folder is a temporary one, whose parents others may write to; --force lets that be.
        nodes.run("munged", "--force", *(f"--{option}={folder}/munge.{end}" for option, end in munge.items()))
        nodes.run("slurmctld")
        for node in NODES:
            nodes.run("slurmd", "-N", node)
        assert wait_until(nodes.are_idle, READY_S), nodes.logs()
        yield nodes
    finally:
        for path in sorted(folder.glob("*.pid"), reverse=True):
            pid = int(path.read_text())
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            wait_until(lambda pid=pid: is_gone(pid), READY_S)  # type: ignore[misc]
