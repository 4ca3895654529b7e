"""A worker that dies in every start: its pauses double, it is left alone after five deaths, nobody
else notices, and `release` brings it back.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from bench.campaigns.faults.campaign import Campaign, Run
from bench.campaigns.faults.leftovers import belongings, children_of, left_since
from bench.campaigns.faults.load import Load, make_model, pids_of, start, state_of, wait_until
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.holders.membership import JITTER

DEATHS = 5
FIRST_MS, LONGEST_MS = 100.0, 5000.0
# A state is seen so much after it began, and the pause is drawn in seconds as a float.
SLACK_MS = 2.0


def run(given: Run) -> None:
    """Sends a worker into a crash loop `given.size` times."""
    spec = make_model(given.folder / "model")
    before = belongings()
    off = unreleased = 0
    pauses_s: list[float] = []
    with start(spec, restart_deaths=DEATHS, restart_backoff_ms=(int(FIRST_MS), int(LONGEST_MS))) as runtime:
        load = Load.quiet(runtime, seed=given.seed)
        with load.running(seed=given.seed):
            for _ in range(given.size):
                victim = given.drawn.choice(("w0", "w1"))
                drawn_ms = _loop(runtime, victim)
                wanted = [min(LONGEST_MS, FIRST_MS * 2**number) for number in range(DEATHS - 1)]
                is_even = len(drawn_ms) == len(wanted) and all(
                    abs(one - want) <= JITTER * want + SLACK_MS for one, want in zip(drawn_ms, wanted, strict=True)
                )
                found = state_of(runtime, victim)
                is_quarantined = found.state == "quarantined" and f"{DEATHS} deaths within" in found.reason
                off += int(not (is_even and is_quarantined))
                pauses_s += [one / 1e3 for one in drawn_ms]
                began = time.monotonic()
                with contextlib.suppress(Exception):
                    runtime.release(victim)
                is_back = wait_until(lambda victim=victim: state_of(runtime, victim).state == "ready")  # type: ignore[misc]
                unreleased += int(not is_back)
                given.event(
                    "crash loop", worker=victim, pauses_ms=drawn_ms, state=found.state, reason=found.reason[:120],
                    release_s=time.monotonic() - began, failed_calls=load.failed, wrong_results=load.wrong,
                    verdict="released" if is_back else "away",
                )  # fmt: skip
        is_served = all(load.call(work) for work in load.works)
    left = left_since(before)
    zero = {"failed calls": load.failed, "wrong results": load.wrong, "loops that ended otherwise": off,
            "not released": unreleased + int(not is_served), **left}  # fmt: skip
    for what, value in zero.items():
        given.claim(what.replace("_", " "), value, at_most=0)
    given.row(
        "crash loops", pauses_s, loops=given.size, deaths=DEATHS * given.size, calls=load.calls, failed_calls=load.failed,
        wrong_results=load.wrong, not_back=unreleased, **left,
    )  # fmt: skip


def _loop(runtime: ExpertRuntime, victim: str) -> list[float]:
    """Kills a worker, and each process that takes its place, until it is left alone; returns the
    pauses in milliseconds that were drawn in between.
    """
    others = {pid for name, pid in pids_of(runtime).items() if name != victim}
    # By how many deaths there were before.
    pauses_ms: dict[int, float] = {}
    _kill(pids_of(runtime)[victim])

    def is_left_alone() -> bool:
        found = state_of(runtime, victim)
        if found.state in ("starting", "joining"):
            for pid in children_of(os.getpid()) - others:
                _kill(pid)
        elif found.state == "waiting" and found.next_try_s:
            # The pause is what is left of it and what has passed.
            pauses_ms.setdefault(found.deaths, 1e3 * (found.since_s + found.next_try_s))
        return found.state == "quarantined"

    wait_until(is_left_alone, every_s=0.001)
    return list(pauses_ms.values())


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


CAMPAIGN = Campaign("crash-loop", "a worker that dies in every start", "crash loops", 10, 1, run)
