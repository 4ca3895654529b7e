"""`bench fault` kills workers under load: how many calls fail, whether a bit changes, how long a
call stalls, and how soon the worker is back.

One thread calls one layer after the other. In each event a worker that the host started gets
SIGKILL at a random moment of a call; the stall is what that call took beyond the median of
undisturbed calls of its size. Results are compared bit for bit with those before the first kill.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dflash_moe.bench.harness import Recorder
from dflash_moe.bench.results import BenchResult, percentile, timing_fields
from dflash_moe.config.settings import MAX_DEATHS
from dflash_moe.errors import ConfigError, DflashError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec, model_spec
from dflash_moe.testing.tiny import routed_batch, tiny_checkpoint
from dflash_moe.topology import HOST, Topology

TOKENS = (1, 16, 256)
# Undisturbed calls of each size, whose median a stall is counted from.
QUIET_CALLS = 30
# A worker that is not back after this time is counted as left away, and the run ends.
BACK_S = 60.0
# Processes that were told to end are gone within this time.
GONE_S = 5.0
# Of a call that has not begun to wait, the kill comes so much later at most, in medians.
LATEST = 1.5


@dataclass(frozen=True, slots=True)
class FaultParams:
    """What is measured: `kills` events with calls of sizes drawn from `tokens`. Without `model` it
    is a tiny one with random weights.
    """

    kills: int = 40
    model: Path | None = None
    tokens: tuple[int, ...] = TOKENS
    seed: int = 0


@dataclass(slots=True)
class _Load:
    """The calls of one size on one layer: tensors, the bits that they must give, and what they take
    undisturbed.
    """

    layer: int
    tensors: tuple[Any, Any, Any]
    expected: np.ndarray[Any, Any]
    median_s: float


@dataclass(slots=True)
class _Events:
    """What has come of the kills so far."""

    stalls_s: list[float] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)
    failed: int = 0
    wrong: int = 0
    first_error: str = ""


def default_topology() -> Topology:
    """Two local workers, each of which holds all shards."""
    made = Topology.local(num_workers=2)
    return dataclasses.replace(made, placement=dataclasses.replace(made.placement, replicas=2))


def run_fault(params: FaultParams, topology: Topology, *, recorder: Recorder, overrides: Mapping[str, Any]) -> BenchResult:
    """Runs all events. Raises ConfigError for a topology without a worker that this host starts as
    a process of its own, and the errors of a start.
    """
    result = recorder.begin(
        "fault", {"kills": params.kills, "tokens": list(params.tokens), "seed": params.seed, "topology": topology.source},
        interleaved=False,
    )  # fmt: skip
    # These deaths are no crash loop, after which a worker is left alone.
    overrides = {"restart_deaths": MAX_DEATHS, **overrides}
    before = _descriptors()
    with recorder.recording(), _model(params) as spec:
        with ExpertRuntime.start(topology, model=spec, on_loading=recorder.reporter.loading, **overrides) as runtime:
            started = {process.name: process.pid for process in runtime.worker_processes() if process.pid != os.getpid()}
            victims = [worker.name for worker in topology.workers if worker.is_started_by_host and worker.name in started]
            if not victims:
                raise ConfigError(f"{topology.source}: bench fault kills workers that this host starts, and there is none")
            seen = set(started.values())
            events = _kill_all(params, runtime, victims, seen, recorder)
        result.rows.append(_row(params, runtime, events, _left_processes(seen), _descriptors() - before))
    return result


@contextmanager
def _model(params: FaultParams) -> Iterator[ModelSpec]:
    """The model's spec; a tiny one lives in a folder for the length of the block."""
    if params.model is not None:
        yield model_spec(params.model)
        return
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as folder:
        yield tiny_checkpoint(Path(folder), hidden_size=256, moe_intermediate_size=128, num_experts=16, top_k=4, num_layers=2)


def _kill_all(params: FaultParams, runtime: ExpertRuntime, victims: list[str], seen: set[int], recorder: Recorder) -> _Events:
    drawn = random.Random(params.seed)
    loads = [_quiet(runtime, layer.index, tokens, params.seed) for layer in runtime.layers[:2] for tokens in params.tokens]
    events = _Events()
    for done in range(params.kills):
        recorder.reporter.advance(done, params.kills, "kills")
        victim = drawn.choice(victims)
        pids = {process.name: process.pid for process in runtime.worker_processes()}
        seen.update(pid for name, pid in pids.items() if name != HOST and pid != os.getpid())
        _kill_in_call(runtime, pids[victim], drawn.choice(loads), drawn, events)
        if not _await_return(runtime, victim, loads, drawn, events):
            events.first_error = events.first_error or f"worker {victim} was not back after {BACK_S:g} s"
            break
    return events


def _quiet(runtime: ExpertRuntime, layer: int, tokens: int, seed: int) -> _Load:
    shape = next(one for one in runtime.layers if one.index == layer)
    tensors = _tensors(runtime, routed_batch(tokens, shape.ffn.in_size, shape.num_experts, shape.top_k, seed=seed))
    expected = _bits(runtime.experts(layer, *tensors))
    times = []
    for _ in range(QUIET_CALLS):
        began = time.perf_counter()
        runtime.experts(layer, *tensors)
        times.append(time.perf_counter() - began)
    return _Load(layer, tensors, expected, statistics.median(times))


def _tensors(runtime: ExpertRuntime, arrays: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    if runtime.spec.dtype == "f32":
        return arrays
    import torch

    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[runtime.spec.dtype]
    hidden, ids, weights = (torch.from_numpy(array).to(runtime.tensor_device) for array in arrays)
    return hidden.to(dtype), ids, weights


def _bits(result: Any) -> np.ndarray[Any, Any]:
    """The bytes of a result, whatever its kind and dtype."""
    if isinstance(result, np.ndarray):
        return np.array(result.view(np.uint8))
    import torch

    return np.asarray(result.cpu().contiguous().view(torch.uint8))


def _kill_in_call(runtime: ExpertRuntime, pid: int, load: _Load, drawn: random.Random, events: _Events) -> None:
    killer = threading.Timer(drawn.random() * LATEST * load.median_s, _kill, (pid,))
    began = time.perf_counter()
    killer.start()
    _call(runtime, load, events)
    events.stalls_s.append(max(0.0, time.perf_counter() - began - load.median_s))
    killer.join(BACK_S)


def _kill(pid: int) -> None:
    # It may have ended by itself, which the run then shows.
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _call(runtime: ExpertRuntime, load: _Load, events: _Events) -> None:
    try:
        found = _bits(runtime.experts(load.layer, *load.tensors))
    except DflashError as error:
        events.failed += 1
        events.first_error = events.first_error or str(error)
        return
    events.wrong += int(np.count_nonzero(found != load.expected))


def _await_return(runtime: ExpertRuntime, victim: str, loads: list[_Load], drawn: random.Random, events: _Events) -> bool:
    """Goes on calling until the killed worker is ready again. The kill may have come after its call
    had ended, so that it is seen lost first.
    """
    began = time.perf_counter()
    deaths = _deaths(runtime, victim)
    was_lost = False
    while time.perf_counter() - began < BACK_S:
        before = time.perf_counter()
        load = drawn.choice(loads)
        _call(runtime, load, events)
        events.stalls_s[-1] = max(events.stalls_s[-1], time.perf_counter() - before - load.median_s)
        state = next(one for one in runtime.workers() if one.name == victim)
        was_lost = was_lost or state.state != "ready" or state.deaths > deaths
        if was_lost and state.state == "ready":
            events.back_s.append(time.perf_counter() - began)
            return True
    return False


def _deaths(runtime: ExpertRuntime, victim: str) -> int:
    return next(one.deaths for one in runtime.workers() if one.name == victim)


def _row(params: FaultParams, runtime: ExpertRuntime, events: _Events, processes: int, descriptors: int) -> dict[str, Any]:
    totals = runtime.stats()["totals"]
    stalls = events.stalls_s or [0.0]
    return {
        "name": f"{params.kills} kills",
        "kills": len(events.stalls_s),
        "failed_calls": events.failed,
        "wrong_bits": 8 * events.wrong,
        "stall_p50_ms": 1e3 * statistics.median(stalls),
        "stall_p99_ms": 1e3 * percentile(stalls, 0.99),
        "back_p50_s": statistics.median(events.back_s or [0.0]),
        "back_max_s": max(events.back_s, default=0.0),
        "left_processes": processes,
        "left_descriptors": max(0, descriptors),
        "failovers": totals["failovers"],
        "hedges": totals["hedges"],
        "fallback_calls": runtime.stats()["fallback"]["calls"],
        "first_error": events.first_error,
        **timing_fields(stalls),
    }


def _left_processes(pids: set[int]) -> int:
    until = time.monotonic() + GONE_S
    while time.monotonic() < until and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.01)
    return sum(Path(f"/proc/{pid}").exists() for pid in pids)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
