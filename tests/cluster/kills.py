"""Registered workers that a cluster starts are killed one after the other while calls go on: no
call fails, no bit changes, and each is back under its name before the next is killed. KILLS says
how often (10), and kills_CLUSTER.json in KILLS_OUT (build/cluster) has what came of it, as
campaigns write it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from pathlib import Path
from typing import Any

from bench.campaigns.faults.load import Load, is_used, pids_of, state_of, wait_until
from bench.campaigns.harness import Broken
from dflash_moe.bench.results import percentile
from dflash_moe.experts.expert_runtime import ExpertRuntime
from tests.cluster.conftest import CLUSTER_S, ROOT

NUM_KILLS = int(os.environ.get("KILLS", "10"))
OUT = Path(os.environ.get("KILLS_OUT", ROOT / "build" / "cluster"))
# A kill comes so much later at most than the worker before is back.
LATEST_S = 0.02
# Counts that must be zero.
CLEAN = ("failed_calls", "wrong_bits", "not_back")


def kill_one_after_the_other(runtime: ExpertRuntime, cluster: str, *names: str) -> None:
    """Kills workers that are processes of this machine, NUM_KILLS times, and writes the result."""
    drawn = random.Random(0)
    found = Broken.begin(f"kills_{cluster}", kills=NUM_KILLS, workers=len(names), seed=0)
    load = Load.quiet(runtime)
    with load.running():
        for _ in range(NUM_KILLS):
            found.events.append(_event(runtime, drawn.choice(names), drawn.random() * LATEST_S, load))
            if not found.events[-1]["is_back"]:
                break
    row = _row(cluster, found.events, load)
    found.row(row, f"{row}", zero=CLEAN)
    found.result.params["load_after"] = os.getloadavg()[0]
    found.result.complete = True
    OUT.mkdir(parents=True, exist_ok=True)
    found.result.write(OUT / f"kills_{cluster}.json")
    assert found.is_clean, (row, load.errors[:3])
    assert row["kills"] == NUM_KILLS


def _event(runtime: ExpertRuntime, worker: str, pause_s: float, load: Load) -> dict[str, Any]:
    """Kills a worker after a pause, and returns once more calls go to it."""
    former, deaths = pids_of(runtime)[worker], state_of(runtime, worker).deaths
    time.sleep(pause_s)
    load.take_worst_s()
    os.kill(former, signal.SIGKILL)
    began = time.perf_counter()
    is_back = wait_until(lambda: state_of(runtime, worker).deaths > deaths, CLUSTER_S)
    is_back = is_back and wait_until(is_used(runtime, worker), CLUSTER_S)
    back_s = time.perf_counter() - began
    return {
        "worker": worker, "back_s": back_s, "stall_ms": 1e3 * load.take_worst_s(),
        "is_back": is_back and pids_of(runtime)[worker] != former,
    }  # fmt: skip


def _row(cluster: str, events: list[Any], load: Load) -> dict[str, Any]:
    stalls, backs = [event["stall_ms"] for event in events], [event["back_s"] for event in events]
    return {
        "name": cluster,
        "kills": len(events),
        "calls": load.calls,
        "failed_calls": load.failed,
        "wrong_bits": load.wrong,
        "not_back": sum(not event["is_back"] for event in events),
        "stall_p50_ms": statistics.median(stalls),
        "stall_p99_ms": percentile(stalls, 0.99),
        "stall_max_ms": max(stalls),
        "back_p50_s": statistics.median(backs),
        "back_max_s": max(backs),
    }
