"""The batch script of docs/howto/slurm.md in a cluster of Slurm's on this machine, of two nodes.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_moe.model.spec import ModelSpec
from tests.cluster.conftest import CLUSTER_S, ENVIRONMENT, ROOT, comes_back, host, topology_text
from tests.cluster.kills import kill_one_after_the_other
from tests.cluster.slurm_nodes import SlurmNodes, slurm_nodes
from tests.fault.conftest import READY_S, is_gone, pids, state_of, wait_until

pytestmark = pytest.mark.slurm
PAGE = (ROOT / "docs" / "howto" / "slurm.md").read_text(encoding="utf-8")
(SCRIPT,) = (textwrap.dedent(block) for block in re.findall(r"^ *```bash\n(.*?)^ *```", PAGE, re.DOTALL | re.MULTILINE))
VALUES = "export head=tcp://10.0.0.1:7170 model=/models/qwen3 key=$HOME/workers.key"
SIZE = "--cpus-per-task=8"


@pytest.fixture(scope="session")
def nodes() -> Iterator[SlurmNodes]:
    # Paths of sockets are short, and pytest's own folders are not.
    with tempfile.TemporaryDirectory(prefix="dflash-slurm-") as folder, slurm_nodes(Path(folder)) as made:
        command = made.folder / "dflash-moe"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m dflash_moe "$@"\n')
        command.chmod(0o755)
        made.environment |= {
            **ENVIRONMENT,
            "SLURM_CONF": made.environment["SLURM_CONF"],
            "PATH": f"{folder}:{os.environ['PATH']}",
        }
        yield made


@pytest.fixture
def job(nodes: SlurmNodes, spec: ModelSpec, key_file: Path, port: int) -> Iterator[str]:
    """Submits the script with values of this test, and cancels the job after it."""
    assert VALUES in SCRIPT
    assert SIZE in SCRIPT
    values = f"export head=tcp://127.0.0.1:{port} model={spec.path} key={key_file}"
    (nodes.folder / "workers.sh").write_text(SCRIPT.replace(VALUES, values).replace(SIZE, "--cpus-per-task=1"))
    number = nodes.run("sbatch", "--parsable", "workers.sh").strip()
    yield number
    nodes.run("scancel", number)
    assert wait_until(nodes.are_idle, CLUSTER_S), nodes.logs()


def test_the_scripts_workers_come_back_under_their_names_and_say_goodbye(
    nodes: SlurmNodes, job: str, spec: ModelSpec, key_file: Path, port: int
) -> None:
    with host(topology_text(f"tcp://127.0.0.1:{port}", "w0", "w1"), spec, key_file) as runtime:
        assert nodes.run("squeue", "--noheader", "--format=%T %D").split() == ["RUNNING", "2"]
        for name in ("w1", "w0"):
            former = pids(runtime)[name]
            os.kill(former, signal.SIGKILL)
            comes_back(runtime, name, former)
        found = pids(runtime)
        nodes.run("scancel", job)
        for name in ("w0", "w1"):
            assert wait_until(lambda name=name: is_gone(found[name]), READY_S)  # type: ignore[misc]
            assert wait_until(lambda name=name: "told to stop" in state_of(runtime, name).reason, READY_S)  # type: ignore[misc]


@pytest.mark.usefixtures("job")
def test_no_call_fails_while_workers_are_killed(spec: ModelSpec, key_file: Path, port: int) -> None:
    with host(topology_text(f"tcp://127.0.0.1:{port}", "w0", "w1"), spec, key_file) as runtime:
        kill_one_after_the_other(runtime, "slurm", "w0", "w1")
