"""The late-writer hazard: a worker stopped in a call, timed out, and resumed while its slots are
wanted again.

A slot that is reused too early reads the old answer; every round compares every bit.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time

import numpy as np
import pytest

from dflash_moe.errors import WorkerLost, WorkerTimeout
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.topology import Emulate
from tests.expert_cases import Batch, Expected, local_topology, make_batch
from tests.fault.conftest import wait_until

CALL_TIMEOUT_S = 0.15
# So many calls are submitted while the worker is still stopped: as many as there are slots.
PRESSURE = 3
# A worker that gives no answer for twice that is given up, which only a busy machine comes to.
LATE = (WorkerTimeout, WorkerLost)
# A machine that is busy with other things needs more rounds until enough stops fall inside a call.
MOST_S = 200.0


def timed_call(runtime: ExpertRuntime, batch: Batch) -> float:
    """The seconds of a call, which on a busy machine takes as long as it may."""
    started = time.monotonic()
    with contextlib.suppress(*LATE):
        runtime.experts(0, *batch)
    return time.monotonic() - started


def signal_workers(runtime: ExpertRuntime, number: int) -> None:
    """Signals whatever process there is."""
    for process in runtime.worker_processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("rounds", "seed"), [(50, 1), pytest.param(150, 2, marks=pytest.mark.long)])
def test_a_late_writer_never_changes_a_bit(spec: ModelSpec, rounds: int, seed: int) -> None:
    # The worker is slowed down so that the stop falls inside a call.
    topology = local_topology(1, emulate=Emulate(slowdown=16.0))
    order = random.Random(seed)
    timeouts = compared = 0
    with ExpertRuntime.start(topology, model=spec, call_timeout_s=CALL_TIMEOUT_S, stall_timeout_s=60.0) as runtime:
        oracle = Expected(runtime.placement, spec)
        batches = [make_batch(400, seed=seed) for seed in range(8)]
        expected = [oracle.experts(0, batch) for batch in batches]
        call_s = min(timed_call(runtime, batches[0]) for _ in range(5))
        deadline = time.monotonic() + MOST_S
        for number in itertools.count():
            if number >= rounds and timeouts > rounds // 8 and compared > rounds // 2:
                break
            if time.monotonic() > deadline:
                pytest.skip(f"this machine is too busy: {timeouts} time-outs and {compared} right answers in {number} rounds")
            try:
                stopped = runtime.submit(0, *batches[number % 8])
                # Where in the call the stop falls is the point of the test.
                time.sleep(order.random() * 0.7 * call_s)
                signal_workers(runtime, signal.SIGSTOP)
                assert np.array_equal(stopped.result(timeout=60), expected[number % 8])
            except LATE:
                timeouts += 1
            pressing = []
            for which in range(PRESSURE):
                # A time-out here means that slots ran out and the path could not be renewed yet.
                with contextlib.suppress(*LATE):
                    pressing.append((which, runtime.submit(0, *batches[which])))
            signal_workers(runtime, signal.SIGCONT)
            for which, one in pressing:
                # What counts is that no answer is wrong, not that each comes.
                with contextlib.suppress(*LATE):
                    assert np.array_equal(one.result(timeout=60), expected[which])
                    compared += 1
        assert wait_until(lambda: runtime.stats()["workers"]["w0"]["state"] == "ready", 60)
