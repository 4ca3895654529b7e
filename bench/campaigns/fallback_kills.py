"""All workers are killed while calls are under way, and nobody but the host's processor is left:
no call fails, no bit changes, and what the host computed is counted. One JSON, and one JSON line
for each event where a file is named.

    python -m bench.campaigns.fallback_kills [--kills 150] [--seed 0] [--restarts off,on]
        [--events FILE] [--json bench/results/fallback_kills.json]

Two workers of a tiny model hold one half of each layer's experts each; there are no replicas. In an
event both get SIGKILL at a random moment of a call. Its stall is what the call takes beyond the
median of undisturbed calls of its size; a few more calls follow, and the longest stall counts. Then
the workers come back: by themselves (restart on), or because they are released (restart off), and
until then every call is the host's. The first event also maps the experts. Exit status 1 where a
call failed, a bit differs, or nothing was counted; times are shown against their goal and decide
nothing, since they are the machine's.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from bench.campaigns.faults.load import BACK_S, Load, make_model
from bench.campaigns.harness import Broken, breaking_line
from dflash_moe.bench.results import percentile
from dflash_moe.config.settings import MAX_DEATHS
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.topology import Topology

WORKERS = ("w0", "w1")
# Calls after the kill that belong to an event at least.
LATER_CALLS = 5
# Of a call that has not begun to wait, the kill comes so much later at most, in medians.
LATEST = 1.5
# The host is asked 50 ms after a loss (failure.reconnect_grace_ms), which is seen within 20 ms.
GOALS = {"stall_p99_ms": 1000.0}
# Counts that must be zero.
CLEAN = ("failed_calls", "wrong_bits")


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    given = _arguments()
    found = Broken.begin("fallback_kills", kills=given.kills, seed=given.seed)
    for restart in given.restarts.split(","):
        row, events = _run(given.kills, given.seed, is_on=restart == "on")
        found.events += events
        found.row(row, _shown(row), zero=CLEAN, goals=GOALS)
        found.is_clean = found.is_clean and row["events"] == given.kills and row["fallback_calls"] > 0
    return found.end(given)


def _run(kills: int, seed: int, *, is_on: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    drawn = random.Random(seed)
    # These deaths are no crash loop, after which a worker is left alone.
    settings = {"host_fallback": "mapped", "restart": is_on, "restart_deaths": MAX_DEATHS, "restart_backoff_ms": (100, 1000)}
    events: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as folder:
        spec = make_model(Path(folder))
        with ExpertRuntime.start(Topology.local(num_workers=len(WORKERS)), model=spec, **settings) as runtime:
            load = Load.quiet(runtime, seed=seed)
            for _ in range(kills):
                events.append(_event(runtime, drawn, load, is_on=is_on))
                if not events[-1]["is_back"]:
                    break
            fallback = runtime.stats()["fallback"]
    stalls = [event["stall_ms"] for event in events]
    row = {
        "name": f"restart {'on' if is_on else 'off'}",
        "events": len(events),
        "killed_workers": len(events) * len(WORKERS),
        "calls": sum(event["calls"] for event in events),
        "failed_calls": sum(event["failed"] for event in events),
        "wrong_bits": sum(event["wrong_bits"] for event in events),
        "fallback_calls": fallback["calls"],
        "fallback_rows": fallback["rows"],
        "stall_p50_ms": statistics.median(stalls),
        "stall_p99_ms": percentile(stalls, 0.99),
        "stall_max_ms": max(stalls),
        "first_stall_ms": stalls[0],
        "back_p50_s": statistics.median(event["back_s"] for event in events),
        "first_error": load.errors[0][2] if load.errors else "",
    }
    return row, events


def _event(runtime: ExpertRuntime, drawn: random.Random, load: Load, *, is_on: bool) -> dict[str, Any]:
    """Kills all workers once and calls until they are back."""
    pids = {process.name: process.pid for process in runtime.worker_processes()}
    before = {state.name: state.deaths for state in runtime.workers()}
    calls, failed, wrong = load.calls, load.failed, load.wrong
    load.take_worst_s()
    work = drawn.choice(load.works)
    killer = threading.Timer(drawn.random() * LATEST * work.median_s, _kill, ([pids[name] for name in WORKERS],))
    began = time.perf_counter()
    killer.start()
    load.call(work)
    killer.join(BACK_S)
    killed, is_back = time.perf_counter(), False
    released: set[str] = set()
    while not is_back and time.perf_counter() - killed < BACK_S:
        load.call(drawn.choice(load.works))
        states = {state.name: state for state in runtime.workers()}
        for name in WORKERS:
            if not is_on and load.calls - calls > LATER_CALLS and states[name].state == "quarantined" and name not in released:
                runtime.release(name)
                released.add(name)
        is_back = all(states[name].state == "ready" and states[name].deaths > before[name] for name in WORKERS)
    return {
        "restart": is_on, "tokens": len(work.tensors[0]), "calls": load.calls - calls, "failed": load.failed - failed,
        "wrong_bits": load.wrong - wrong, "stall_ms": 1e3 * load.take_worst_s(), "is_back": is_back,
        "back_s": time.perf_counter() - began,
    }  # fmt: skip


def _kill(pids: list[int]) -> None:
    for pid in pids:
        # It may have ended by itself, which the run then shows.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _shown(row: dict[str, Any]) -> str:
    return (
        f"{row['name']}: {row['events']} times all of {len(WORKERS)} workers killed, {row['calls']} calls: "
        f"{row['failed_calls']} failed, {row['wrong_bits']} with wrong bits, {row['fallback_calls']} requests computed "
        f"by the host; stall p50 {row['stall_p50_ms']:.1f} ms, p99 {row['stall_p99_ms']:.1f} ms, max "
        f"{row['stall_max_ms']:.1f} ms"
    )


def _arguments() -> argparse.Namespace:
    parser = breaking_line(__doc__, "fallback_kills")
    parser.add_argument("--kills", type=int, default=150, help="events for each of --restarts [%(default)s]")
    parser.add_argument("--restarts", default="off,on", help="[%(default)s]")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
