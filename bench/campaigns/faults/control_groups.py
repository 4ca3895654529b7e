"""Workers that the kernel ends because their control group is out of memory, and workers that its
freezer stops: a death and a stop like others, which cost no call where another worker holds the
shards.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from bench.campaigns.faults.campaign import Campaign, Run, spread
from bench.campaigns.faults.leftovers import belongings, left_since
from bench.campaigns.faults.load import Load, is_used, make_model, pids_of, start, state_of, wait_until
from dflash_moe.errors import DflashError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec

ROOT = Path("/sys/fs/cgroup")
SERVED_GOAL_MS, BACK_GOAL_S = 400.0, 5.0
# A worker in a group that may have this little more memory is ended at one of its next calls.
LIMIT_BYTES = 1 << 16
# A freeze ends before the worker is given up after 2 s.
FROZEN_S = (0.3, 1.0)
# What a kill for lack of memory takes to come, since it comes when the worker asks for a page.
KILLED_S = 20.0


def run(given: Run) -> None:
    """Runs workers out of memory `given.size` times, and freezes as many."""
    spec = make_model(given.folder / "model")
    for kind in ("memory", "freezer"):
        _run_kind(given, spec, kind)


def _run_kind(given: Run, spec: ModelSpec, kind: str) -> None:
    before = belongings()
    stalls_s: list[float] = []
    back_s: list[float] = []
    away = unkilled = 0
    with start(spec, "unix", restart_backoff_ms=(20, 100)) as runtime:
        load = Load.quiet(runtime, seed=given.seed)
        load.take_worst_s()
        with load.running(seed=given.seed):
            for _ in range(given.size):
                victim = given.drawn.choice(("w0", "w1"))
                pid, deaths = pids_of(runtime)[victim], state_of(runtime, victim).deaths
                with _group(kind, pid) as group:
                    if kind == "memory":
                        was_hit = _run_out(runtime, victim, deaths)
                        unkilled += int(not was_hit)
                    else:
                        (group / "freezer.state").write_text("FROZEN")
                        time.sleep(given.drawn.uniform(*FROZEN_S))
                        (group / "freezer.state").write_text("THAWED")
                    began = time.monotonic()
                    is_back = wait_until(is_used(runtime, victim))
                back_s.append(time.monotonic() - began)
                stalls_s.append(load.take_worst_s())
                away += int(not is_back)
                given.event(
                    kind, worker=victim, pid=pid, stall_ms=1e3 * stalls_s[-1], back_s=back_s[-1], failed_calls=load.failed,
                    wrong_results=load.wrong, deaths=state_of(runtime, victim).deaths - deaths,
                    verdict="back" if is_back else "away",
                )  # fmt: skip
    left = left_since(before)
    zero = {"failed calls": load.failed, "wrong results": load.wrong, "workers not back": away, "not killed": unkilled, **left}
    for what, value in zero.items():
        given.claim(f"{kind}: {what.replace('_', ' ')}", value, at_most=0)
    given.goal(f"{kind}: served, ms", 1e3 * max(stalls_s), at_most=SERVED_GOAL_MS)
    given.goal(f"{kind}: ready again, s", max(back_s), at_most=BACK_GOAL_S)
    given.row(
        kind, stalls_s, events=len(stalls_s), calls=load.calls, failed_calls=load.failed, wrong_results=load.wrong,
        not_back=away, **spread("stall", stalls_s), **spread("back", back_s, unit_ms=False), **left,
        first_error=load.errors[0][2] if load.errors else "",
    )  # fmt: skip


@contextlib.contextmanager
def _group(controller: str, pid: int) -> Iterator[Path]:
    """Puts a process into a control group of its own, which is gone at the end of the block."""
    group = ROOT / controller / f"dflash-fault-{pid}"
    group.mkdir()
    try:
        if controller == "memory":
            # What the process has already is counted where it was before.
            (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
        (group / "cgroup.procs").write_text(str(pid))
        yield group
    finally:
        # A group can go once nobody is in it, and who was in it may only be ending.
        wait_until(lambda: _is_removed(group, controller), KILLED_S, every_s=0.01)


def _is_removed(group: Path, controller: str) -> bool:
    with contextlib.suppress(OSError):
        if controller == "freezer":
            (group / "freezer.state").write_text("THAWED")
        for pid in (group / "cgroup.procs").read_text().split():
            (ROOT / controller / "cgroup.procs").write_text(pid)
        group.rmdir()
        return True
    return not group.exists()


def _run_out(runtime: ExpertRuntime, victim: str, deaths: int) -> bool:
    """Asks a worker that may have no more memory for its counters until it needs some. Returns
    whether it died of that.
    """

    def is_dead() -> bool:
        with contextlib.suppress(DflashError):
            runtime.worker_stats()
        return state_of(runtime, victim).deaths > deaths

    return wait_until(is_dead, KILLED_S)


def _lacking() -> str:
    if os.geteuid() != 0:
        return "control groups need root"
    for controller, file in (("memory", "memory.limit_in_bytes"), ("freezer", "tasks")):
        if not (ROOT / controller / file).exists():
            return f"control groups of version 1: {ROOT / controller / file} does not exist"
    return ""


CAMPAIGN = Campaign(
    "control-groups", "workers out of memory, and frozen, by their control groups", "events of each kind", 50, 3, run, _lacking
)
