"""The late-writer hazard: a worker stopped in a call, timed out, and resumed while its slots are
wanted again.

A slot that is reused too early reads the old answer; 200 rounds compare every bit.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import time
from pathlib import Path

import numpy as np

from dflash_moe.errors import WorkerTimeout
from dflash_moe.model.spec import ModelSpec
from dflash_moe.runtime.expert_runtime import ExpertRuntime
from dflash_moe.topology import Emulate, Topology
from tests.expert_cases import Batch, Expected, make_batch

ROUNDS = 200
CALL_TIMEOUT_S = 0.08
PRESSURE = 3  # calls submitted while the worker is still stopped: as many as there are slots


def timed_call(runtime: ExpertRuntime, batch: Batch) -> float:
    started = time.monotonic()
    runtime.experts(0, *dataclasses.astuple(batch))
    return time.monotonic() - started


def test_a_late_writer_never_changes_a_bit(spec: ModelSpec) -> None:
    topology = Topology.local(num_workers=1)
    # so that the stop falls inside a call
    slowed = dataclasses.replace(topology.workers[0], emulate=Emulate(slowdown=16.0))
    topology = dataclasses.replace(topology, workers=(slowed,))
    order = random.Random(1)
    timeouts = compared = 0
    with ExpertRuntime.start(topology, model=spec, call_timeout_s=CALL_TIMEOUT_S, stall_timeout_s=60.0) as runtime:
        oracle = Expected(Path(spec.path), runtime.placement, spec)
        batches = [make_batch(400, seed=seed) for seed in range(8)]
        expected = [oracle.experts(0, batch) for batch in batches]
        pid = runtime.worker_processes()[0].pid
        call_s = min(timed_call(runtime, batches[0]) for _ in range(5))
        for number in range(ROUNDS):
            try:
                stopped = runtime.submit(0, *dataclasses.astuple(batches[number % 8]))
                # where in the call the stop falls is the point of the test
                time.sleep(order.random() * 0.7 * call_s)
                os.kill(pid, signal.SIGSTOP)
                assert np.array_equal(stopped.result(timeout=5), expected[number % 8])
            except WorkerTimeout:
                timeouts += 1
            pressing = []
            for which in range(PRESSURE):
                # slots ran out and the path could not be renewed yet
                with contextlib.suppress(WorkerTimeout):
                    pressing.append((which, runtime.submit(0, *dataclasses.astuple(batches[which]))))
            os.kill(pid, signal.SIGCONT)
            for which, one in pressing:
                with contextlib.suppress(WorkerTimeout):  # what counts is that no answer is wrong
                    assert np.array_equal(one.result(timeout=5), expected[which])
                    compared += 1
        assert runtime.stats()["workers"]["w0"]["state"] == "ready"
    assert timeouts > ROUNDS // 8, "the stop hardly ever fell inside a call"
    assert compared > ROUNDS // 2, "hardly any answer came back after a resumption"
