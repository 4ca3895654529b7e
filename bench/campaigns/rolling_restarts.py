"""Workers started anew, added, removed and replaced while calls go on: no call fails and no bit
changes. One JSON, and one JSON line for each event where a file is named.

    python bench/campaigns/rolling_restarts.py [--cycles 7] [--seed 0] [--quick]
        [--transports shared,unix,tcp] [--events FILE] [--json bench/results/rolling_restarts.json]

Two threads call the experts of a tiny model without a pause, on two workers that hold both shards
of a layer. A cycle starts each worker anew, one after the other; adds a third one and removes one
of the three; and replaces all workers by others (add, then remove), as an upgrade does. The seed
draws the order. An event's stall is what the slowest call took that ended in it, beyond the median
of undisturbed calls of its size; starting a process takes a core from them. Exit status 1 where a
call failed, a bit changed, or something was left behind; times decide nothing.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
# The package is the one of this tree.
sys.path.insert(0, str(ROOT))

from dflash_moe.bench.results import BenchResult, percentile  # noqa: E402
from dflash_moe.cli import options  # noqa: E402
from dflash_moe.errors import DflashError  # noqa: E402
from dflash_moe.experts.expert_runtime import ExpertRuntime  # noqa: E402
from dflash_moe.model.spec import ModelSpec  # noqa: E402
from dflash_moe.testing.tiny import routed_batch, tiny_checkpoint  # noqa: E402
from dflash_moe.topology import Topology, WorkerSpec  # noqa: E402

RESULT = ROOT / "bench" / "results" / "rolling_restarts.json"
ADDRESSES = {"shared": None, "unix": "unix", "tcp": "tcp"}
TOKENS = (1, 16, 256)
SIZES = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 16, "top_k": 4, "num_layers": 2}
# Undisturbed calls of each size, whose median a stall is counted from.
QUIET_CALLS = 60
# Counts that must be zero.
CLEAN = ("failed_calls", "wrong_bits", "left_processes", "left_descriptors")
# Processes that were told to end are gone within this time.
GONE_S = 5.0
# A worker that was lost by itself is back within this time.
READY_S = 120.0
# The threads that call see that they shall end after each call.
STOP_S = 120.0


@dataclass(slots=True)
class Load:
    """Two threads that call, and what they saw. One thread at a time adds to `stalls_s`."""

    runtime: ExpertRuntime
    inputs: dict[int, tuple[Any, ...]]
    right: dict[int, list[np.ndarray[Any, Any]]] = field(default_factory=dict)
    median_s: dict[int, float] = field(default_factory=dict)
    is_over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    calls: int = 0
    failed: int = 0
    wrong: int = 0
    first_error: str = ""
    stall_s: float = 0.0
    seen: set[int] = field(default_factory=set)

    def learn(self) -> None:
        """Notes the bits that calls must give, and what they take undisturbed."""
        for tokens, inputs in self.inputs.items():
            layers = [layer.index for layer in self.runtime.layers]
            self.right[tokens] = [np.asarray(self.runtime.experts(layer, *inputs)) for layer in layers]
            times = []
            for turn in range(QUIET_CALLS):
                began = time.perf_counter()
                self.runtime.experts(layers[turn % len(layers)], *inputs)
                times.append(time.perf_counter() - began)
            self.median_s[tokens] = statistics.median(times)

    def drive(self, seed: int) -> None:
        drawn = random.Random(seed)
        while not self.is_over.is_set():
            tokens, layer = drawn.choice(TOKENS), drawn.randrange(SIZES["num_layers"])
            began = time.perf_counter()
            error, num_wrong = "", 0
            try:
                found = np.asarray(self.runtime.experts(layer, *self.inputs[tokens]))
                num_wrong = int(np.count_nonzero(found.view(np.uint32) != self.right[tokens][layer].view(np.uint32)))
            except DflashError as failure:
                error = str(failure) or type(failure).__name__
            stall_s = time.perf_counter() - began - self.median_s[tokens]
            with self.lock:
                self.calls += 1
                self.failed += bool(error)
                self.wrong += num_wrong
                self.first_error = self.first_error or error
                self.stall_s = max(self.stall_s, stall_s)

    @contextmanager
    def running(self, seed: int) -> Iterator[None]:
        threads = [threading.Thread(target=self.drive, args=(2 * seed + half,)) for half in range(2)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.is_over.set()
            for thread in threads:
                thread.join(STOP_S)


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    given = _arguments()
    cycles = 1 if given.quick else given.cycles
    result = BenchResult("rolling_restarts", {"cycles": cycles, "seed": given.seed, "load_before": os.getloadavg()[0]})
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as folder:
        spec = tiny_checkpoint(Path(folder), **SIZES)
        for transport in given.transports.split(","):
            row, events = _run(spec, transport, cycles, given.seed)
            lines += [json.dumps({"transport": transport, **event}) for event in events]
            result.rows.append(row)
            result.summary += [
                {"what": f"{transport}: {name}", "value": row[name], "at_most": 0, "met": row[name] == 0} for name in CLEAN
            ]
            options.say(_shown(row))
    result.params["load_after"] = os.getloadavg()[0]
    result.complete = True
    result.write(given.json)
    if given.events is not None:
        given.events.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return 0 if all(entry["met"] for entry in result.summary) else 1


def _run(spec: ModelSpec, transport: str, cycles: int, seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the row of one transport, and its events."""
    topology = Topology.local(num_workers=2, address=ADDRESSES[transport])
    topology = dataclasses.replace(topology, placement=dataclasses.replace(topology.placement, replicas=2))
    descriptors = len(os.listdir("/proc/self/fd"))
    events: list[dict[str, Any]] = []
    with ExpertRuntime.start(topology, model=spec) as runtime:
        batches = {
            tokens: routed_batch(tokens, SIZES["hidden_size"], SIZES["num_experts"], SIZES["top_k"], seed=seed)
            for tokens in TOKENS
        }
        load = Load(runtime, batches)
        load.learn()
        with load.running(seed):
            drawn = random.Random(f"{seed} {transport}")
            for cycle in range(cycles):
                for kind, worker, change in _cycle(runtime, drawn, ADDRESSES[transport]):
                    _await_ready(runtime)
                    events.append({"cycle": cycle, **_event(load, kind, worker, change)})
    left = len(os.listdir("/proc/self/fd")) - descriptors
    return _row(transport, load, events, max(0, left)), events


def _await_ready(runtime: ExpertRuntime) -> None:
    """Waits until all workers are ready. One that was lost meanwhile, for example because it stood
    still for the stall timeout on a busy machine, counts as a death of its event.
    """
    until = time.monotonic() + READY_S
    while any(state.state != "ready" for state in runtime.workers()):
        if time.monotonic() > until:
            raise SystemExit(f"not all workers are ready within {READY_S:g} s: {runtime.workers()}")
        time.sleep(0.01)


def _deaths(runtime: ExpertRuntime) -> dict[str, int]:
    return {state.name: state.deaths for state in runtime.workers()}


Change = tuple[str, str, Callable[[], None]]


def _cycle(runtime: ExpertRuntime, drawn: random.Random, address: str | None) -> Iterator[Change]:
    """Yields the events of one cycle, each by the workers that there are then."""

    def names() -> list[str]:
        found = [state.name for state in runtime.workers()]
        drawn.shuffle(found)
        return found

    def add(name: str) -> Change:
        return "add", name, lambda: runtime.add_worker(WorkerSpec(name, threads=1, address=address))

    def remove(name: str) -> Change:
        return "remove", name, lambda: runtime.remove_worker(name)

    for name in names():
        yield "restart", name, lambda name=name: runtime.restart_worker(name)  # type: ignore[misc]
    yield add(next(name for name in ("w0", "w1", "w2") if name not in names()))
    yield remove(names()[0])
    for old in names():
        yield add(next(name for name in ("w0", "w1", "w2") if name not in names()))
        yield remove(old)


def _event(load: Load, kind: str, worker: str, change: Callable[[], None]) -> dict[str, Any]:
    """Makes one change and returns what the calls saw of it."""
    load.seen.update(process.pid for process in load.runtime.worker_processes())
    with load.lock:
        before, load.stall_s = (load.calls, load.failed, load.wrong), 0.0
    deaths = _deaths(load.runtime)
    began = time.perf_counter()
    change()
    seconds = time.perf_counter() - began
    deaths = {name: count - deaths.get(name, 0) for name, count in _deaths(load.runtime).items()}
    with load.lock:
        calls, failed, wrong = (now - then for now, then in zip((load.calls, load.failed, load.wrong), before, strict=True))
        stall_s = load.stall_s
    return {
        "kind": kind, "worker": worker, "seconds": seconds, "calls": calls, "failed_calls": failed, "wrong_values": wrong,
        "stall_ms": 1e3 * max(0.0, stall_s), "deaths": sum(deaths.values()),
    }  # fmt: skip


def _row(transport: str, load: Load, events: list[dict[str, Any]], left_descriptors: int) -> dict[str, Any]:
    return {
        "name": transport,
        "events": len(events),
        "calls": load.calls,
        "failed_calls": load.failed,
        "wrong_bits": 32 * load.wrong,
        "left_processes": _left_processes(load.seen - {os.getpid()}),
        "left_descriptors": left_descriptors,
        "deaths": sum(event["deaths"] for event in events),
        "first_error": load.first_error,
        "kinds": [_kind(kind, [event for event in events if event["kind"] == kind]) for kind in ("restart", "add", "remove")],
    }


def _kind(kind: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    stalls, seconds = [event["stall_ms"] for event in events], [event["seconds"] for event in events]
    return {
        "kind": kind, "count": len(events), "calls": sum(event["calls"] for event in events),
        "stall_p50_ms": percentile(stalls, 0.5), "stall_p99_ms": percentile(stalls, 0.99), "stall_max_ms": max(stalls),
        "seconds_p50": percentile(seconds, 0.5), "seconds_max": max(seconds),
    }  # fmt: skip


def _left_processes(pids: set[int]) -> int:
    until = time.monotonic() + GONE_S
    while time.monotonic() < until and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.01)
    return sum(Path(f"/proc/{pid}").exists() for pid in pids)


def _shown(row: dict[str, Any]) -> str:
    kinds = "; ".join(f"{one['count']} {one['kind']}s, stall p99 {one['stall_p99_ms']:.0f} ms" for one in row["kinds"])
    return (
        f"{row['name']}: {row['events']} events under {row['calls']:,} calls: {row['failed_calls']} failed, "
        f"{row['wrong_bits']} wrong bits; {kinds}; left {row['left_processes']} processes, "
        f"{row['left_descriptors']} descriptors" + (f"; first error: {row['first_error']}" if row["first_error"] else "")
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=7, help="over each transport [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn [%(default)s]")
    parser.add_argument("--quick", action="store_true", help="one cycle over each transport")
    parser.add_argument("--transports", default="shared,unix,tcp", help="[%(default)s]")
    parser.add_argument("--events", type=Path, help="where one JSON line for each event goes")
    parser.add_argument("--json", type=Path, default=RESULT, help="[bench/results/rolling_restarts.json]")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
