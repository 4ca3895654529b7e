"""Measures for `bench ipc` what one expert call adds: the time from the Python call to its return,
minus the computation of the worker itself.

A tiny layer keeps the computation small; its hidden size of 2048 gives a row its usual size. One
worker and this process are pinned to cores of their own. Every sample subtracts the computation
that the worker reported for that very call.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_moe.bench.results import percentile, timing_fields
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.testing.tiny import routed_batch, tiny_checkpoint
from dflash_moe.topology import Topology

HIDDEN_SIZE, NUM_EXPERTS, TOP_K = 2048, 8, 2
TRANSPORTS = ("loopback", "shared", "unix", "tcp")
WARMUP_CALLS, CALLS = 200, 2000


def measure_calls(transports: tuple[str, ...], pinned: tuple[int, int]) -> list[dict[str, Any]]:
    """Measures calls of one token in f32, as in decode, and returns a row `call_<transport>` for
    each transport.
    """
    rows = []
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as folder:
        spec = tiny_checkpoint(
            Path(folder), hidden_size=HIDDEN_SIZE, moe_intermediate_size=16, num_experts=NUM_EXPERTS, top_k=TOP_K, num_layers=1
        )
        for transport in transports:
            rows.append(_measure(transport, spec, pinned))
    return rows


def _measure(transport: str, spec: ModelSpec, pinned: tuple[int, int]) -> dict[str, Any]:
    address = "" if transport == "shared" else f", address: {transport}"
    topology = Topology.parse(f"version: 1\nhost: {{threads: 1}}\nworkers: [{{name: w0, backend: cpu, threads: 1{address}}}]\n")
    tensors = _batch()
    with ExpertRuntime.start(topology, model=spec, mode="batched", profile=1) as runtime, _pinned(runtime, pinned):
        for _ in range(WARMUP_CALLS):
            runtime.experts(0, *tensors)
        runtime.take_traces()
        walls = []
        # Calls follow each other at once, as in a decode step. Anything between them would let the
        # worker fall asleep.
        for _ in range(CALLS):
            started = time.perf_counter_ns()
            runtime.experts(0, *tensors)
            walls.append(time.perf_counter_ns() - started)
        # Each call has one slice, and slices are in the order of the calls.
        traces = runtime.take_traces()
        computes = [trace["worker_finished_ns"] - trace["worker_started_ns"] for trace in traces]
    added_us = [(wall - compute) / 1e3 for wall, compute in zip(walls, computes, strict=True)]
    return {
        "name": f"call_{transport}",
        "transport": transport,
        "tokens": 1,
        "hidden_size": HIDDEN_SIZE,
        "tensors": type(tensors[0]).__module__,
        **timing_fields([wall / 1e9 for wall in walls]),
        "worker_p50_us": statistics.median(computes) / 1e3,
        "added_p50_us": statistics.median(added_us),
        "added_p99_us": percentile(added_us, 0.99),
    }


def _batch() -> tuple[Any, Any, Any]:
    """Returns one token, as torch tensors where torch is installed, as at a host, and else as NumPy
    arrays.
    """
    arrays = routed_batch(1, HIDDEN_SIZE, NUM_EXPERTS, TOP_K)
    try:
        import torch
    except ImportError:
        return arrays
    return tuple(torch.from_numpy(array) for array in arrays)


@contextmanager
def _pinned(runtime: ExpertRuntime, cpus: tuple[int, int]) -> Iterator[None]:
    """This thread on the first core, every thread of worker processes on the second; this thread is
    freed again at the end.
    """
    allowed = os.sched_getaffinity(0)
    if cpus[0] == cpus[1]:
        yield
        return
    for process in runtime.worker_processes():
        if process.pid != os.getpid():
            for thread in os.listdir(f"/proc/{process.pid}/task"):
                os.sched_setaffinity(int(thread), {cpus[1]})
    os.sched_setaffinity(0, {cpus[0]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
