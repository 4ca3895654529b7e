"""A host that is stopped in a call, as by Ctrl-Z, alone or with its workers, goes on with it as if
nothing had been: no time of the stop counts against anybody.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.topology import Emulate
from tests.expert_cases import expected_of, local_topology, make_batch, tiny_spec
from tests.fault.conftest import first_line, freeze

ROOT = Path(__file__).resolve().parents[2]
CALL_TIMEOUT_S = 2.0
# All that is judged would have been over by then.
STOP_S = 5.0
# The workers go on so much later than their host, which finds its call unanswered.
LATER_S = 0.2


def main(directory: str) -> None:
    """The host: makes one call, which takes a quarter of its time, and says how it ended."""
    topology = local_topology(emulate=Emulate(delay_ms=250.0))
    limits = {"call_timeout_s": CALL_TIMEOUT_S, "stall_timeout_s": 1.0}
    with ExpertRuntime.start(topology, model=tiny_spec(Path(directory)), **limits) as runtime:
        expected = expected_of(runtime, 8)
        call = runtime.submit(0, *make_batch(8))
        print("ready", *(process.pid for process in runtime.worker_processes()), flush=True)
        is_right = np.array_equal(call.result(), expected)
        print("right" if is_right else "wrong", *(worker.state for worker in runtime.workers()), flush=True)


@pytest.mark.parametrize("stops_workers", [False, True])
def test_a_host_that_was_stopped_in_a_call_blames_nobody(spec: ModelSpec, stops_workers: bool) -> None:
    command = [sys.executable, "-c", f"from tests.fault.test_stopped_host import main; main({spec.path!r})"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as host:
        word, _, pids = first_line(host).partition(" ")
        assert word == "ready"
        workers = [int(pid) for pid in pids.split()] if stops_workers else []
        for pid in (host.pid, *workers):
            freeze(pid)
        time.sleep(STOP_S)  # what is tested takes this long
        os.kill(host.pid, signal.SIGCONT)
        time.sleep(LATER_S if stops_workers else 0)
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
        assert host.communicate(timeout=60)[0].split() == ["right", "ready", "ready"]
