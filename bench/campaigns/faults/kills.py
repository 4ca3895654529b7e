"""Kills of workers in every phase of their lives, while another one holds their shards: no call
fails, no bit changes, the worker is back by itself, and nothing is left.

Phases: while nobody calls; at any moment of calls; while one long call is on its way; while the
worker that was killed is started again; and while it loads and joins. The last two are seen from
outside, so that the product needs no hooks for them.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field

from bench.campaigns.faults.campaign import Campaign, Run, spread
from bench.campaigns.faults.leftovers import belongings, children_of, left_since
from bench.campaigns.faults.load import BACK_S, Load, make_model, pids_of, start, state_of, transports, wait_until
from dflash_moe.experts.expert_runtime import ExpertRuntime

PHASES = ("idle", "any", "in_call", "starting", "joining")
# A worker that is started again imports its package for half a second before it greets.
STARTING_S = 0.4
GOALS_MS = {"p50": 20.0, "p99": 100.0}
BACK_GOAL_S = 5.0


@dataclass(slots=True)
class _Found:
    stalls_s: list[float] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)
    phases: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    away: int = 0


def run(given: Run) -> None:
    """Kills `given.size` times over each transport."""
    spec = make_model(given.folder / "model")
    for transport in transports(spec):
        before = belongings()
        with start(spec, transport, restart_backoff_ms=(20, 100)) as runtime:
            load = Load.quiet(runtime, seed=given.seed)
            load.take_worst_s()
            found = _Found()
            with load.running(seed=given.seed):
                for _ in range(given.size):
                    _kill_once(given, transport, runtime, load, found)
            totals = runtime.stats()["totals"]
        left = left_since(before)
        _judge(given, transport, load, found, left)
        given.row(
            transport, found.stalls_s, kills=len(found.stalls_s), calls=load.calls, failed_calls=load.failed,
            wrong_results=load.wrong, not_back=found.away, failovers=totals["failovers"], hedges=totals["hedges"],
            **spread("stall", found.stalls_s), **spread("back", found.back_s, unit_ms=False), **left, phases=found.phases,
            first_error=load.errors[0][2] if load.errors else "",
        )  # fmt: skip


def _kill_once(given: Run, transport: str, runtime: ExpertRuntime, load: Load, found: _Found) -> None:
    victim, phase = given.drawn.choice(("w0", "w1")), PHASES[len(found.stalls_s) % len(PHASES)]
    pid, deaths = pids_of(runtime)[victim], state_of(runtime, victim).deaths
    others = children_of(os.getpid())
    if phase == "idle":
        load.pause()
        time.sleep(0.02)
    elif phase == "in_call":
        longest = max(load.works, key=lambda work: work.median_s)
        load.pause()
        time.sleep(given.drawn.random() * longest.median_s)
        load.go_on()
    else:
        time.sleep(given.drawn.random() * 0.02)
    _kill(pid)
    began, kills = time.monotonic(), 1
    if phase == "idle":
        time.sleep(0.02)
        load.go_on()
    if phase in ("starting", "joining"):
        second = _second_kill(given, runtime, victim, phase, deaths, others)
        kills += int(second)
        began = time.monotonic()
    is_back = wait_until(lambda: (now := state_of(runtime, victim)).state == "ready" and now.deaths >= deaths + kills, BACK_S)
    back_s, stall_s = time.monotonic() - began, load.take_worst_s()
    found.phases[phase] += kills
    found.stalls_s.append(stall_s)
    found.away += int(not is_back)
    if is_back:
        found.back_s.append(back_s)
    given.event(
        phase, transport=transport, worker=victim, pid=pid, kills=kills, stall_ms=1e3 * stall_s, back_s=back_s,
        failed_calls=load.failed, wrong_results=load.wrong, verdict="back" if is_back else "away",
    )  # fmt: skip


def _second_kill(given: Run, runtime: ExpertRuntime, victim: str, phase: str, deaths: int, before: set[int]) -> bool:
    """Kills the process that takes the place of a killed one, in this phase of its start."""
    seen = []

    def is_there() -> bool:
        now = state_of(runtime, victim)
        seen.append(now.state)
        return now.state == phase or (now.state == "ready" and now.deaths > deaths)

    if not wait_until(is_there, every_s=0.0005) or seen[-1] != phase:
        return False
    if phase == "starting":
        time.sleep(given.drawn.random() * STARTING_S)
    fresh = children_of(os.getpid()) - before
    for pid in fresh:
        _kill(pid)
    return len(fresh) == 1


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _judge(given: Run, transport: str, load: Load, found: _Found, left: dict[str, int]) -> None:
    zero = {"failed calls": load.failed, "wrong results": load.wrong, "workers not back": found.away, **left}
    for what, value in zero.items():
        given.claim(f"{transport}: {what.replace('_', ' ')}", value, at_most=0)
    for what, value in spread("stall", found.stalls_s).items():
        if (bound := GOALS_MS.get(what.split("_")[1])) is not None:
            given.goal(f"{transport}: {what}", value, at_most=bound)
    given.goal(f"{transport}: ready again, s", max(found.back_s, default=0.0), at_most=BACK_GOAL_S)


CAMPAIGN = Campaign(
    "kills", "workers killed in every phase while another holds their shards", "events over each transport", 40, 5, run
)
