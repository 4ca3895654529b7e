"""Workers started anew, added, removed and replaced while calls go on: no call fails and no bit
changes. One JSON, and one JSON line for each event where a file is named.

    python -m bench.campaigns.rolling_restarts [--cycles 7] [--seed 0] [--quick]
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
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.campaigns.faults.campaign import spread
from bench.campaigns.faults.leftovers import belongings, left_since
from bench.campaigns.faults.load import ADDRESSES, Load, make_model, wait_until
from bench.campaigns.harness import Broken, breaking_line
from dflash_moe.bench.results import percentile
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec
from dflash_moe.topology import Topology, WorkerSpec

# Counts that must be zero, beside those of what is left.
CLEAN = ("failed_calls", "wrong_bits")
# A worker that was lost by itself is back within this time.
READY_S = 120.0


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    given = _arguments()
    cycles = 1 if given.quick else given.cycles
    found = Broken.begin("rolling_restarts", cycles=cycles, seed=given.seed)
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as folder:
        spec = make_model(Path(folder))
        for transport in given.transports.split(","):
            row, events = _run(spec, transport, cycles, given.seed)
            found.events += [{"transport": transport, **event} for event in events]
            found.row(row, _shown(row), zero=[*CLEAN, *(name for name in row if name.startswith("left_"))])
    return found.end(given)


def _run(spec: ModelSpec, transport: str, cycles: int, seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the row of one transport, and its events."""
    topology = Topology.local(num_workers=2, address=ADDRESSES[transport])
    topology = dataclasses.replace(topology, placement=dataclasses.replace(topology.placement, replicas=2))
    before = belongings()
    events: list[dict[str, Any]] = []
    with ExpertRuntime.start(topology, model=spec) as runtime:
        load = Load.quiet(runtime, seed=seed)
        with load.running(2, seed=seed):
            drawn = random.Random(f"{seed} {transport}")
            for cycle in range(cycles):
                for kind, worker, change in _cycle(runtime, drawn, ADDRESSES[transport]):
                    _await_ready(runtime)
                    events.append({"cycle": cycle, **_event(load, kind, worker, change)})
    return _row(transport, load, events, left_since(before)), events


def _await_ready(runtime: ExpertRuntime) -> None:
    """Waits until all workers are ready. One that was lost meanwhile, for example because it stood
    still for the stall timeout on a busy machine, counts as a death of its event.
    """
    if not wait_until(lambda: all(state.state == "ready" for state in runtime.workers()), READY_S, every_s=0.01):
        raise SystemExit(f"not all workers are ready within {READY_S:g} s: {runtime.workers()}")


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
    load.take_worst_s()
    before, deaths = (load.calls, load.failed, load.wrong), _deaths(load.runtime)
    began = time.perf_counter()
    change()
    seconds = time.perf_counter() - began
    deaths = {name: count - deaths.get(name, 0) for name, count in _deaths(load.runtime).items()}
    calls, failed, wrong = (now - then for now, then in zip((load.calls, load.failed, load.wrong), before, strict=True))
    return {
        "kind": kind, "worker": worker, "seconds": seconds, "calls": calls, "failed_calls": failed, "wrong_results": wrong,
        "stall_ms": 1e3 * load.take_worst_s(), "deaths": sum(deaths.values()),
    }  # fmt: skip


def _row(transport: str, load: Load, events: list[dict[str, Any]], left: dict[str, int]) -> dict[str, Any]:
    return {
        "name": transport, "events": len(events), "calls": load.calls, "failed_calls": load.failed, "wrong_bits": load.wrong,
        **left, "deaths": sum(event["deaths"] for event in events), "first_error": load.errors[0][2] if load.errors else "",
        "kinds": [_kind(kind, [event for event in events if event["kind"] == kind]) for kind in ("restart", "add", "remove")],
    }  # fmt: skip


def _kind(kind: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [event["seconds"] for event in events]
    return {
        "kind": kind, "count": len(events), "calls": sum(event["calls"] for event in events),
        **spread("stall", [event["stall_ms"] / 1e3 for event in events]),
        "seconds_p50": percentile(seconds, 0.5), "seconds_max": max(seconds),
    }  # fmt: skip


def _shown(row: dict[str, Any]) -> str:
    kinds = "; ".join(f"{one['count']} {one['kind']}s, stall p99 {one['stall_p99_ms']:.0f} ms" for one in row["kinds"])
    return (
        f"{row['name']}: {row['events']} events under {row['calls']:,} calls: {row['failed_calls']} failed, "
        f"{row['wrong_bits']} with wrong bits; {kinds}; left {row['left_processes']} processes, "
        f"{row['left_descriptors']} descriptors" + (f"; first error: {row['first_error']}" if row["first_error"] else "")
    )


def _arguments() -> argparse.Namespace:
    parser = breaking_line(__doc__, "rolling_restarts")
    parser.add_argument("--cycles", type=int, default=7, help="over each transport [%(default)s]")
    parser.add_argument("--quick", action="store_true", help="one cycle over each transport")
    parser.add_argument("--transports", default="shared,unix,tcp", help="[%(default)s]")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
