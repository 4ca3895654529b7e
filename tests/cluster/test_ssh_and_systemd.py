"""The script and the unit of docs/howto/ssh_and_systemd.md: the script with an sshd of this test,
the unit as systemd reads it, and its command.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_moe.model.spec import ModelSpec
from tests.cluster.conftest import CLUSTER_S, ENVIRONMENT, ROOT, comes_back, host, topology_text
from tests.fault.conftest import READY_S, first_line, is_gone, pids, state_of, wait_until

PAGE = (ROOT / "docs" / "howto" / "ssh_and_systemd.md").read_text(encoding="utf-8")
(SCRIPT,) = re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
(UNIT,) = re.findall(r"^```ini\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
VALUES = "head=tcp://10.0.0.1:7170 model=/models/qwen3 key=/etc/dflash/workers.key threads=8"


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[Path]:
    """A folder whose `ssh` reaches an sshd of this test, in which commands start."""
    sshd = shutil.which("sshd", path="/usr/sbin:" + os.environ["PATH"])
    if sshd is None or shutil.which("ssh") is None:
        pytest.skip("needs ssh and sshd (packages openssh-client and openssh-server)")
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], timeout=READY_S, check=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    # Folders of tests are below one that everybody may write to, which StrictModes would refuse.
    options = f"""
    Port {port}
    ListenAddress 127.0.0.1
    HostKey {tmp_path}/host_key
    AuthorizedKeysFile {tmp_path}/user_key.pub
    PidFile {tmp_path}/sshd.pid
    StrictModes no
    UsePAM no
    PermitRootLogin prohibit-password
    SetEnv PATH={tmp_path}:{os.environ["PATH"]} PYTHONPATH={ROOT}
    """
    (tmp_path / "sshd_config").write_text(textwrap.dedent(options))
    Path("/run/sshd").mkdir(exist_ok=True)
    (tmp_path / "dflash-moe").write_text(f'#!/bin/sh\nexec {sys.executable} -m dflash_moe "$@"\n')
    (tmp_path / "ssh").write_text(
        f"#!/bin/sh\nexec {shutil.which('ssh')} -p {port} -i {tmp_path}/user_key -o StrictHostKeyChecking=no "
        f'-o UserKnownHostsFile={tmp_path}/known -o LogLevel=ERROR "$@"\n'
    )
    for name in ("ssh", "dflash-moe"):
        (tmp_path / name).chmod(0o755)
    process = subprocess.Popen([sshd, "-D", "-e", "-f", str(tmp_path / "sshd_config")], stderr=subprocess.DEVNULL)
    assert wait_until(lambda: _answers(port), READY_S)
    yield tmp_path
    process.terminate()
    process.wait(READY_S)


def _answers(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_the_script_starts_workers_that_outlive_it(ssh: Path, spec: ModelSpec, key_file: Path, port: int) -> None:
    assert VALUES in SCRIPT
    values = f"head=tcp://127.0.0.1:{port} model={spec.path} key={key_file} threads=1"
    script = SCRIPT.replace(VALUES, values).replace(">>w$index.log", f">>{ssh}/w$index.log")
    machine = f"{getpass.getuser()}@127.0.0.1"
    environment = {**ENVIRONMENT, "PATH": f"{ssh}:{os.environ['PATH']}"}

    def start() -> dict[str, int]:
        done = subprocess.run(
            ["bash", "-c", script, "start.sh", machine, machine], env=environment, capture_output=True, text=True,
            timeout=CLUSTER_S, check=False,
        )  # fmt: skip
        found = {name: int(pid) for name, pid in re.findall(r"^(w\d): process (\d+)$", done.stdout, re.MULTILINE)}
        assert len(found) == 2, done.stderr
        return found

    started = start()
    again: dict[str, int] = {}
    try:
        with host(topology_text(f"tcp://127.0.0.1:{port}", "w0", "w1"), spec, key_file) as runtime:
            assert pids(runtime) == started
            os.kill(started["w1"], signal.SIGKILL)
            # A second w0 waits.
            again = start()
            assert comes_back(runtime, "w1", started["w1"]) == again["w1"]
            assert state_of(runtime, "w0").deaths == 0
            os.kill(again["w0"], signal.SIGKILL)
            os.kill(started["w0"], signal.SIGTERM)
            assert wait_until(lambda: "told to stop" in state_of(runtime, "w0").reason, READY_S)
    finally:
        every = {*started.values(), *again.values()}
        for pid in every:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: all(map(is_gone, every)), READY_S)


def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze (package systemd)")
    unit = tmp_path / "dflash-worker@.service"
    unit.write_text(UNIT.replace("User=dflash", f"User={getpass.getuser()}"))
    instance = tmp_path / "dflash-worker@w0.service"
    instance.symlink_to(unit.name)
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(instance)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=READY_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_units_command_is_a_worker_that_a_signal_ends_with_success(spec: ModelSpec, key_file: Path, port: int) -> None:
    settings = dict(line.split("=", 1) for line in UNIT.splitlines() if "=" in line)
    assert settings["RestartPreventExitStatus"] == "2"
    command = settings["ExecStart"].replace("%i", "w0").replace("--threads 8", "--threads 1")
    for page, here in {
        "tcp://10.0.0.1:7170": f"tcp://127.0.0.1:{port}", "/models/qwen3": spec.path, "/etc/dflash/workers.key": str(key_file),
        "/usr/bin/env dflash-moe": f"{sys.executable} -m dflash_moe",
    }.items():  # fmt: skip
        assert page in command
        command = command.replace(page, here)
    pipe = subprocess.PIPE
    worker = subprocess.Popen(shlex.split(command), env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True)
    try:
        assert first_line(worker) == f"worker w0 registers at tcp://127.0.0.1:{port}"
        with host(
            topology_text(f"tcp://127.0.0.1:{port}", "w0").replace("replicas: 2", "replicas: 1"), spec, key_file
        ) as runtime:
            assert pids(runtime) == {"w0": worker.pid}
            worker.terminate()
            assert worker.wait(READY_S) == int(settings["SuccessExitStatus"])
            assert wait_until(lambda: "told to stop" in state_of(runtime, "w0").reason, READY_S)
    finally:
        worker.kill()
        worker.communicate(timeout=READY_S)
