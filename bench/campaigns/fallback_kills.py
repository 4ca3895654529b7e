"""All workers are killed while calls are under way, and nobody but the host's processor is left:
no call fails, no bit changes, and what the host computed is counted. One JSON, and one JSON line
for each event where a file is named.

    python bench/campaigns/fallback_kills.py [--kills 150] [--seed 0] [--restarts off,on]
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
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
# The package is the one of this tree.
sys.path.insert(0, str(ROOT))

from dflash_moe.bench.results import BenchResult, percentile  # noqa: E402
from dflash_moe.cli import options  # noqa: E402
from dflash_moe.config.settings import MAX_DEATHS  # noqa: E402
from dflash_moe.errors import DflashError  # noqa: E402
from dflash_moe.experts.expert_runtime import ExpertRuntime  # noqa: E402
from dflash_moe.testing.tiny import routed_batch, tiny_checkpoint  # noqa: E402
from dflash_moe.topology import Topology  # noqa: E402

RESULT = ROOT / "bench" / "results" / "fallback_kills.json"
WORKERS = ("w0", "w1")
TOKENS = (1, 16, 256)
# Undisturbed calls of each size, whose median a stall is counted from.
QUIET_CALLS = 50
# Calls after the kill that belong to an event at least.
LATER_CALLS = 5
# Of a call that has not begun to wait, the kill comes so much later at most, in medians.
LATEST = 1.5
# Workers that are not back after this time are left away, and the run ends.
BACK_S = 60.0
# The host is asked 50 ms after a loss (failure.reconnect_grace_ms), which is seen within 20 ms.
GOALS = {"stall_p99_ms": 1000.0, "failed_calls": 0.0, "wrong_bits": 0.0}


@dataclass(frozen=True, slots=True)
class Load:
    """The calls of one size: tensors, the bits they must give, and what they take undisturbed."""

    tokens: int
    tensors: tuple[Any, Any, Any]
    expected: np.ndarray[Any, Any]
    median_s: float


def main() -> int:
    """Does what the module text says, and returns the exit status."""
    given = _arguments()
    result = BenchResult("fallback_kills", {"kills": given.kills, "seed": given.seed, "load_before": os.getloadavg()[0]})
    lines: list[str] = []
    is_clean = True
    for restart in given.restarts.split(","):
        row, events = _run(given.kills, given.seed, is_on=restart == "on")
        lines += [json.dumps(event) for event in events]
        result.rows.append(row)
        is_clean = is_clean and not (row["failed_calls"] or row["wrong_bits"]) and row["events"] == given.kills
        is_clean = is_clean and row["fallback_calls"] > 0
        for what, most in GOALS.items():
            result.summary.append(
                {"what": f"{row['name']}: {what}", "value": row[what], "at_most": most, "met": row[what] <= most}
            )
        options.say(_shown(row))
    result.params["load_after"] = os.getloadavg()[0]
    result.complete = True
    result.write(given.json)
    if given.events is not None:
        given.events.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return 0 if is_clean else 1


def _run(kills: int, seed: int, *, is_on: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    drawn = random.Random(seed)
    # These deaths are no crash loop, after which a worker is left alone.
    settings = {"host_fallback": "mapped", "restart": is_on, "restart_deaths": MAX_DEATHS, "restart_backoff_ms": (100, 1000)}
    events: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as folder:
        spec = tiny_checkpoint(Path(folder), hidden_size=256, moe_intermediate_size=128, num_experts=16, top_k=4, num_layers=2)
        with ExpertRuntime.start(Topology.local(num_workers=len(WORKERS)), model=spec, **settings) as runtime:
            loads = [_quiet(runtime, tokens, seed) for tokens in TOKENS]
            for _ in range(kills):
                events.append(_event(runtime, drawn, loads, is_on=is_on))
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
        "first_error": next((event["error"] for event in events if event["error"]), ""),
    }
    return row, events


def _quiet(runtime: ExpertRuntime, tokens: int, seed: int) -> Load:
    shape = runtime.layers[0]
    tensors = routed_batch(tokens, shape.ffn.in_size, shape.num_experts, shape.top_k, seed=seed)
    expected = np.array(runtime.experts(0, *tensors))
    times = []
    for _ in range(QUIET_CALLS):
        began = time.perf_counter()
        runtime.experts(0, *tensors)
        times.append(time.perf_counter() - began)
    return Load(tokens, tensors, expected, statistics.median(times))


def _event(runtime: ExpertRuntime, drawn: random.Random, loads: list[Load], *, is_on: bool) -> dict[str, Any]:
    """Kills all workers once and calls until they are back."""
    event: dict[str, Any] = {
        "restart": is_on, "calls": 0, "failed": 0, "wrong_bits": 0, "stall_ms": 0.0, "error": "", "is_back": False,
    }  # fmt: skip
    pids = {process.name: process.pid for process in runtime.worker_processes()}
    before = {state.name: state.deaths for state in runtime.workers()}
    load = drawn.choice(loads)
    event["tokens"] = load.tokens
    killer = threading.Timer(drawn.random() * LATEST * load.median_s, _kill, ([pids[name] for name in WORKERS],))
    began = time.perf_counter()
    killer.start()
    _call(runtime, load, event)
    killer.join(BACK_S)
    killed = time.perf_counter()
    released: set[str] = set()
    while time.perf_counter() - killed < BACK_S:
        _call(runtime, drawn.choice(loads), event)
        states = {state.name: state for state in runtime.workers()}
        for name in WORKERS:
            if not is_on and event["calls"] > LATER_CALLS and states[name].state == "quarantined" and name not in released:
                runtime.release(name)
                released.add(name)
        if all(states[name].state == "ready" and states[name].deaths > before[name] for name in WORKERS):
            event["is_back"] = True
            break
    event["back_s"] = time.perf_counter() - began
    return event


def _kill(pids: list[int]) -> None:
    for pid in pids:
        # It may have ended by itself, which the run then shows.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _call(runtime: ExpertRuntime, load: Load, event: dict[str, Any]) -> None:
    began = time.perf_counter()
    event["calls"] += 1
    try:
        found = np.asarray(runtime.experts(0, *load.tensors))
        differing = found.view(np.uint32) ^ load.expected.view(np.uint32)
        event["wrong_bits"] += int(np.unpackbits(differing.view(np.uint8)).sum())
    except DflashError as error:
        event["failed"] += 1
        event["error"] = event["error"] or str(error)
    event["stall_ms"] = max(event["stall_ms"], 1e3 * (time.perf_counter() - began - load.median_s))


def _shown(row: dict[str, Any]) -> str:
    return (
        f"{row['name']}: {row['events']} times all of {len(WORKERS)} workers killed, {row['calls']} calls: "
        f"{row['failed_calls']} failed, {row['wrong_bits']} wrong bits, {row['fallback_calls']} requests computed by the host; "
        f"stall p50 {row['stall_p50_ms']:.1f} ms, p99 {row['stall_p99_ms']:.1f} ms, max {row['stall_max_ms']:.1f} ms"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=150, help="events for each of --restarts [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn [%(default)s]")
    parser.add_argument("--restarts", default="off,on", help="[%(default)s]")
    parser.add_argument("--events", type=Path, help="where one JSON line for each event goes")
    parser.add_argument("--json", type=Path, default=RESULT, help="[bench/results/fallback_kills.json]")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
