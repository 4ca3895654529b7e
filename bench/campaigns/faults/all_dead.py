"""All holders of all shards killed at once. Calls wait for them while they come back, and where
that takes longer than calls wait, they end in a typed error by their deadline; then all heals
unaided.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

from bench.campaigns.faults.campaign import Campaign, Run, spread
from bench.campaigns.faults.leftovers import belongings, left_since
from bench.campaigns.faults.load import BACK_S, Load, make_model, pids_of, start, state_of, wait_until
from dflash_moe.model.spec import ModelSpec

# What calls wait for, by case: their settings, and the seconds by which an error has come, None
# where none may come.
SLOW_RETURN = {"restart_backoff_ms": (1500, 1500)}
CASES: dict[str, tuple[dict[str, Any], float | None]] = {
    "waits": ({"restart_backoff_ms": (20, 100), "park_s": BACK_S, "call_timeout_s": BACK_S}, None),
    "parks too short": ({**SLOW_RETURN, "park_s": 0.3}, 0.3),
    "deadline": ({**SLOW_RETURN, "park_s": 30.0, "call_timeout_s": 0.3}, 0.3),
}
# By so much an error may come late, beside what the machine takes to wake a thread.
LATE_MS = 50.0


def run(given: Run) -> None:
    """Kills everybody `given.size` times in each case."""
    spec = make_model(given.folder / "model")
    for case in CASES:
        _run_case(given, spec, case)


def _run_case(given: Run, spec: ModelSpec, case: str) -> None:
    settings, limit_s = CASES[case]
    before = belongings()
    back_s: list[float] = []
    away = 0
    with start(spec, "shared", **settings) as runtime:
        # With a short deadline, calls of 256 tokens would end at it on a busy machine.
        load = Load.quiet(runtime, seed=given.seed, tokens=(1, 16))
        with load.running(seed=given.seed):
            for _ in range(given.size):
                deaths = {name: state_of(runtime, name).deaths for name in ("w0", "w1")}
                known = len(load.errors)
                time.sleep(given.drawn.random() * 0.02)
                pids = pids_of(runtime)
                for pid in pids.values():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                began = time.monotonic()
                is_back = wait_until(
                    lambda deaths=deaths: all(  # type: ignore[misc]
                        (now := state_of(runtime, name)).state == "ready" and now.deaths > deaths[name] for name in deaths
                    )
                )
                back_s.append(time.monotonic() - began)
                away += int(not is_back)
                given.event(
                    case, pid=list(pids.values()), errors=len(load.errors) - known, back_s=back_s[-1],
                    latest_error_s=max((took for took, _, _ in load.errors[known:]), default=0.0),
                    wrong_results=load.wrong, verdict="back" if is_back else "away",
                )  # fmt: skip
        is_served = all(load.call(work) for work in load.works)
    left = left_since(before)
    _judge(given, case, load, limit_s, away + int(not is_served), left)
    late_s = [max(0.0, took - limit_s) for took, _, _ in load.errors] if limit_s is not None else []
    given.row(
        case, back_s, kills=2 * len(back_s), calls=load.calls, failed_calls=load.failed, wrong_results=load.wrong,
        not_back=away, **spread("late", late_s), **spread("back", back_s, unit_ms=False), **left,
        last_error=load.errors[-1][2] if load.errors else "",
    )  # fmt: skip


def _judge(given: Run, case: str, load: Load, limit_s: float | None, away: int, left: dict[str, int]) -> None:
    untyped = sum(kind not in ("WorkerLost", "WorkerTimeout") for _, kind, _ in load.errors)
    for what, value in {"wrong results": load.wrong, "not recovered": away, "errors of other kinds": untyped, **left}.items():
        given.claim(f"{case}: {what.replace('_', ' ')}", value, at_most=0)
    if limit_s is None:
        given.claim(f"{case}: failed calls", load.failed, at_most=0)
        return
    given.claim(f"{case}: failed calls", load.failed, at_least=given.size)
    late_ms = 1e3 * max((took - limit_s for took, _, _ in load.errors), default=0.0)
    given.goal(f"{case}: errors after their limit, ms", max(0.0, late_ms), at_most=LATE_MS)


CAMPAIGN = Campaign("all-dead", "all holders killed at once", "times in each of three cases", 10, 2, run)
