"""Calls without a pause while something breaks: every result is compared bit for bit, and the
longest stall of each event is kept. And the runtimes that are called: two workers that hold all
shards of a tiny model, over each transport.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dflash_moe import _core
from dflash_moe.config.settings import MAX_DEATHS
from dflash_moe.errors import DflashError, UnsupportedError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.holders.worker_keeper import WorkerState
from dflash_moe.model.spec import ModelSpec
from dflash_moe.testing.tiny import routed_batch, tiny_checkpoint
from dflash_moe.topology import Topology

# A transport and the address of workers that are reached so.
ADDRESSES: dict[str, str | None] = {"shared": None, "unix": "unix", "tcp": "tcp"}
FABRIC = "fabric"
# The host does not stand in for workers.
ALONE = {"host_fallback": "none"}
TOKENS = (1, 16, 256)
# Undisturbed calls of each size, from whose median a stall is counted.
QUIET_CALLS = 30
# What has not come back after this time stays away, and the run says so.
BACK_S = 60.0
# A thread that calls ends after its call, which has a deadline of its own.
JOIN_S = 300.0


def make_model(folder: Path, *, seed: int = 0) -> ModelSpec:
    """Writes a model of two layers with 16 experts of 0.4 MB each."""
    return tiny_checkpoint(
        folder, hidden_size=256, moe_intermediate_size=128, num_experts=16, top_k=4, num_layers=2, seed=seed
    )  # fmt: skip


def start(
    spec: ModelSpec, transport: str = "shared", *, replicas: int = 2, workers: int = 2, **overrides: Any
) -> ExpertRuntime:
    """Starts workers over a transport. Their deaths are no crash loop unless the caller says so,
    and the host computes nothing in their place, which is another campaign's (fallback_kills.py).
    """
    topology = Topology.local(num_workers=workers, address=ADDRESSES["tcp" if transport == FABRIC else transport])
    if transport == FABRIC:
        overrides = {"transport": FABRIC, **overrides}
    placement = dataclasses.replace(topology.placement, replicas=replicas)
    topology = dataclasses.replace(topology, placement=placement)
    return ExpertRuntime.start(topology, model=spec, **{**ALONE, "restart_deaths": MAX_DEATHS, **overrides})


def transports(spec: ModelSpec) -> list[str]:
    """Returns the transports of this machine. Over a fabric one path is made and ended first, since
    libfabric keeps some threads and descriptors from then on.
    """
    try:
        _core.fabric_providers()
    except UnsupportedError:
        return list(ADDRESSES)
    start(spec, FABRIC).close()
    return [*ADDRESSES, FABRIC]


def state_of(runtime: ExpertRuntime, name: str) -> WorkerState:
    """Returns how one worker stands."""
    return next(one for one in runtime.workers() if one.name == name)


def is_used(runtime: ExpertRuntime, name: str) -> Callable[[], bool]:
    """Returns the claim that a worker is ready, and that more calls go to it since it was first
    asked.
    """
    first: int | None = None

    def claim() -> bool:
        nonlocal first
        found = runtime.stats()["workers"][name]
        if state_of(runtime, name).state != "ready" or found["state"] != "ready":
            first = None
            return False
        if first is None:
            first = found["calls"]
        return bool(found["calls"] > first)

    return claim


def pids_of(runtime: ExpertRuntime) -> dict[str, int]:
    """Returns the process of each worker that is not this one."""
    return {one.name: one.pid for one in runtime.worker_processes() if one.pid != os.getpid()}


def wait_until(claim: Callable[[], bool], seconds: float = BACK_S, *, every_s: float = 0.002) -> bool:
    """Polls for at most `seconds`, and returns whether the claim came to hold."""
    until = time.monotonic() + seconds
    while not claim():
        if time.monotonic() > until:
            return False
        time.sleep(every_s)
    return True


@dataclass(slots=True)
class Work:
    """A call of one size on one layer, the bits that it must give, and what it takes when nothing
    is broken.
    """

    layer: int
    tensors: tuple[Any, Any, Any]
    expected: np.ndarray[Any, Any]
    median_s: float


@dataclass(slots=True)
class Load:
    """Calls of all sizes. `num_threads` threads make them between `running` and its end; `call`
    makes one in the caller's thread. Any thread may read the counters.
    """

    runtime: ExpertRuntime
    works: list[Work]
    calls: int = 0
    failed: int = 0
    wrong: int = 0
    errors: list[tuple[float, str, str]] = field(default_factory=list)
    _worst_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _may_call: threading.Event = field(default_factory=threading.Event)
    _is_over: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def quiet(cls, runtime: ExpertRuntime, *, seed: int = 0, tokens: tuple[int, ...] = TOKENS) -> Load:
        """Measures calls of every size on the first two layers while nothing is broken."""
        return cls(runtime, [_measured(runtime, layer.index, size, seed) for layer in runtime.layers[:2] for size in tokens])

    def call(self, work: Work) -> bool:
        """Makes one call, compares it, and returns whether it was answered."""
        began = time.perf_counter()
        error: DflashError | None = None
        differing = 0
        try:
            found = np.asarray(self.runtime.experts(work.layer, *work.tensors))
            differing = int(np.count_nonzero(found.view(np.uint8) != work.expected))
        except DflashError as caught:
            error = caught
        took = time.perf_counter() - began
        with self._lock:
            self.calls += 1
            self.wrong += bool(differing)
            self._worst_s = max(self._worst_s, took - work.median_s)
            if error is not None:
                self.failed += 1
                self.errors.append((took, type(error).__name__, str(error)))
        return error is None

    def take_worst_s(self) -> float:
        """Returns the longest stall since it was last asked for."""
        with self._lock:
            worst, self._worst_s = self._worst_s, 0.0
        return max(0.0, worst)

    def pause(self) -> None:
        """Has the threads stand still once their calls are done."""
        self._may_call.clear()

    def go_on(self) -> None:
        """Has them call again."""
        self._may_call.set()

    @contextlib.contextmanager
    def running(self, num_threads: int = 1, *, seed: int = 0) -> Iterator[None]:
        """Calls without a pause for the length of the block."""
        self._is_over.clear()
        self._may_call.set()
        threads = [threading.Thread(target=self._run, args=(random.Random(f"{seed} {one}"),)) for one in range(num_threads)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            self._may_call.set()
            for thread in threads:
                thread.join(JOIN_S)

    def _run(self, drawn: random.Random) -> None:
        while not self._is_over.is_set():
            if not self._may_call.wait(1.0):
                continue
            # A failed call comes back at once; a thread that only fails leaves the core to others.
            if not self.call(drawn.choice(self.works)):
                self._is_over.wait(0.005)


def _measured(runtime: ExpertRuntime, layer: int, tokens: int, seed: int) -> Work:
    shape = next(one for one in runtime.layers if one.index == layer)
    tensors = routed_batch(tokens, shape.ffn.in_size, shape.num_experts, shape.top_k, seed=seed)
    expected = np.array(np.asarray(runtime.experts(layer, *tensors)).view(np.uint8))
    times = []
    for _ in range(QUIET_CALLS):
        began = time.perf_counter()
        runtime.experts(layer, *tensors)
        times.append(time.perf_counter() - began)
    return Work(layer, tensors, expected, statistics.median(times))
