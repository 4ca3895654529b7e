"""When the host dies, however it dies, its workers go with it and nothing is left that blocks the
next start.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_moe.model.spec import ModelSpec
from tests import leaks
from tests.fault.conftest import first_line, is_gone, wait_until

GONE_S = 30.0  # they are gone in a fraction of a second where nothing else runs
ROOT = Path(__file__).resolve().parents[2]


def start_host(spec: ModelSpec) -> tuple[subprocess.Popen[str], list[int]]:
    """A host process with a call under way, and its workers' process ids."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    host = subprocess.Popen(
        [sys.executable, "-m", "tests.fault.host_program", spec.path], stdout=subprocess.PIPE, text=True, env=environment
    )
    word, _, pids = first_line(host).partition(" ")
    assert word == "ready"
    return host, [int(pid) for pid in pids.split()]


def finish(host: subprocess.Popen[str], signal_number: int) -> None:
    host.send_signal(signal_number)
    host.communicate(timeout=200)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_in_a_call_go_with_their_host(spec: ModelSpec, how: signal.Signals) -> None:
    host, workers = start_host(spec)
    assert not any(is_gone(pid) for pid in workers)
    finish(host, how)
    assert wait_until(lambda: all(is_gone(pid) for pid in workers), GONE_S), [Path(f"/proc/{pid}/stat") for pid in workers]


def test_a_stopped_worker_goes_with_its_host_too(spec: ModelSpec) -> None:
    host, workers = start_host(spec)
    os.kill(workers[0], signal.SIGSTOP)
    finish(host, signal.SIGKILL)
    assert wait_until(lambda: all(is_gone(pid) for pid in workers), GONE_S)


def test_kill_minus_nine_of_everything_leaves_nothing(spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = leaks.take()
    host, workers = start_host(spec)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    finish(host, signal.SIGKILL)
    assert wait_until(lambda: all(is_gone(pid) for pid in workers), GONE_S)
    assert leaks.take().names == before.names
    assert not list(tmp_path.iterdir())
    again, workers = start_host(spec)
    finish(again, signal.SIGKILL)
    assert wait_until(lambda: all(is_gone(pid) for pid in workers), GONE_S)
