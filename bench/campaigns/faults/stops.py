"""Workers that stand still and go on (SIGSTOP, SIGCONT). With another holder of their shards calls
are answered meanwhile; without one they end in a typed error, and all heals once the worker goes
on.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from bench.campaigns.faults.by_hand import WAYS, reached
from bench.campaigns.faults.campaign import Campaign, Run, spread
from bench.campaigns.faults.leftovers import belongings, is_gone, left_since
from bench.campaigns.faults.load import Load, is_used, make_model, pids_of, start, state_of, transports, wait_until
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec

# Every so many stops one lasts until the worker is given up and replaced.
EVERY_LONG = 4
# A worker without another holder is given up after this time, and calls wait for it this much
# longer.
STALL_S, PARK_S = 1.0, 1.0
SERVED_GOAL_MS, ERROR_GOAL_S = 400.0, PARK_S + 0.5


def run(given: Run) -> None:
    """Stops workers `given.size` times over each transport with another holder, and as often
    without one.
    """
    spec = make_model(given.folder / "model")
    for transport in transports(spec):
        _with_another(given, spec, transport)
    for way in WAYS:
        _alone(given, spec, way)


def _with_another(given: Run, spec: ModelSpec, transport: str) -> None:
    before = belongings()
    stalls_s: list[float] = []
    away = kept = 0
    with start(spec, transport, restart_backoff_ms=(20, 100)) as runtime:
        load = Load.quiet(runtime, seed=given.seed)
        load.take_worst_s()
        with load.running(seed=given.seed):
            for number in range(given.size):
                is_long = number % EVERY_LONG == EVERY_LONG - 1
                victim = given.drawn.choice(("w0", "w1"))
                pid, deaths = pids_of(runtime)[victim], state_of(runtime, victim).deaths
                time.sleep(given.drawn.random() * 0.02)
                is_back = _stop(given, runtime, victim, is_long=is_long)
                kept += int(is_long and not is_gone(pid))
                away += int(not is_back)
                stalls_s.append(load.take_worst_s())
                given.event(
                    "until lost" if is_long else "passing", transport=transport, worker=victim, pid=pid,
                    stall_ms=1e3 * stalls_s[-1], failed_calls=load.failed, wrong_results=load.wrong,
                    deaths=state_of(runtime, victim).deaths - deaths, verdict="back" if is_back else "away",
                )  # fmt: skip
        totals = runtime.stats()["totals"]
    left = left_since(before)
    zero = {"failed calls": load.failed, "wrong results": load.wrong, "workers not back": away, "stopped processes": kept}
    for what, value in {**zero, **left}.items():
        given.claim(f"{transport}: {what.replace('_', ' ')}", value, at_most=0)
    given.goal(f"{transport}: served, ms", 1e3 * max(stalls_s), at_most=SERVED_GOAL_MS)
    given.row(
        transport, stalls_s, stops=len(stalls_s), calls=load.calls, failed_calls=load.failed, wrong_results=load.wrong,
        not_back=away, hedges=totals["hedges"], hedges_won=totals["hedges_won"], **spread("stall", stalls_s), **left,
        first_error=load.errors[0][2] if load.errors else "",
    )  # fmt: skip


def _stop(given: Run, runtime: ExpertRuntime, victim: str, *, is_long: bool) -> bool:
    """Stops a worker for a while, or until its loss is known and its process is replaced, and
    returns whether it is ready again.
    """
    pid, deaths = pids_of(runtime)[victim], state_of(runtime, victim).deaths
    os.kill(pid, signal.SIGSTOP)
    if is_long:
        return wait_until(lambda: (now := state_of(runtime, victim)).state == "ready" and now.deaths > deaths)
    time.sleep(0.3 + given.drawn.random() * 0.7)
    # A slow machine may have given it up meanwhile, and then its process is gone.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    return wait_until(is_used(runtime, victim))


def _alone(given: Run, spec: ModelSpec, way: str) -> None:
    errors_s: list[float] = []
    back_s: list[float] = []
    away = untyped = 0
    folder = given.folder / way
    with reached(spec, folder, way, stall_timeout_s=STALL_S, park_s=PARK_S, restart_backoff_ms=(20, 100)) as (runtime, worker):
        load = Load.quiet(runtime, seed=given.seed)
        for number in range(given.size):
            os.kill(worker.pid, signal.SIGSTOP)
            known = len(load.errors)
            with load.running(seed=given.seed + number):
                was_lost = wait_until(lambda: state_of(runtime, "far").state != "ready")
                lost_at = time.monotonic()
                had_error = wait_until(lambda known=known: len(load.errors) > known)  # type: ignore[misc]
                errors_s.append(time.monotonic() - lost_at)
                os.kill(worker.pid, signal.SIGCONT)
                began = time.monotonic()
                is_back = wait_until(lambda: state_of(runtime, "far").state == "ready")
                back_s.append(time.monotonic() - began)
            is_served = all(load.call(work) for work in load.works)
            away += int(not (was_lost and had_error and is_back and is_served))
            untyped += sum(kind not in ("WorkerLost", "WorkerTimeout") for _, kind, _ in load.errors[known:])
            given.event(
                "only holder", transport=way, worker="far", pid=worker.pid, error_after_loss_s=errors_s[-1],
                back_s=back_s[-1], wrong_results=load.wrong, verdict="back" if is_back and is_served else "away",
                error=load.errors[-1][2] if load.errors else "",
            )  # fmt: skip
    name = f"{way}, only holder"
    zero = {"wrong results": load.wrong, "not recovered": away, "errors of other kinds": untyped}
    for what, value in zero.items():
        given.claim(f"{name}: {what}", value, at_most=0)
    given.goal(f"{name}: error after the loss, s", max(errors_s), at_most=ERROR_GOAL_S)
    given.row(
        name, errors_s, stops=len(errors_s), calls=load.calls, failed_calls=load.failed, wrong_results=load.wrong,
        not_back=away, park_s=PARK_S, **spread("error", errors_s, unit_ms=False), **spread("back", back_s, unit_ms=False),
    )  # fmt: skip


CAMPAIGN = Campaign(
    "stops", "workers stopped and sent on, with another holder and without", "stops over each transport, twice", 20, 4, run
)
