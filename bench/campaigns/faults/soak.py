"""Many calls, sessions and restarts, after which a process has as many descriptors, threads and
segments as before, and as much memory.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from array import array

from bench.campaigns.faults.by_hand import WAYS, reaching, worker_by_hand
from bench.campaigns.faults.campaign import Campaign, Run, spread
from bench.campaigns.faults.leftovers import Belongings, belongings, left_since
from bench.campaigns.faults.load import ALONE, BACK_S, Load, make_model, pids_of, start, state_of, wait_until
from dflash_moe.bench.results import percentile
from dflash_moe.errors import WorkerError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.spec import ModelSpec

# A unit of size is so many of each: 1,000 of them are 10 million calls, 10,000 sessions and 1,000
# restarts.
CALLS, SESSIONS, RESTARTS = 10_000, 10, 1
# So many come first, which warm caches and pools, and are not judged.
WARM_CALLS, WARM_SESSIONS, WARM_RESTARTS = 20_000, 20, 5
RSS_PER_1000_CALLS = 1024
# Memory that was freed is not at once the system's again, so that short runs have this much slack.
RSS_SLACK = 4 << 20


def run(given: Run) -> None:
    """Runs `given.size` thousandths of 10 million calls, of 10,000 sessions and of 1,000 restarts,
    each kind on its own.
    """
    spec = make_model(given.folder / "model")
    _calls(given, spec, given.size * CALLS)
    _sessions(given, spec, given.size * SESSIONS)
    _restarts(given, spec, given.size * RESTARTS)


def _calls(given: Run, spec: ModelSpec, count: int) -> None:
    with start(spec, "shared") as runtime:
        load = Load.quiet(runtime, seed=given.seed, tokens=(1,))
        work = load.works[0]
        for _ in range(WARM_CALLS):
            load.call(work)
        pids = pids_of(runtime).values()
        # All of its memory is in use before anything is measured, so that no growth is its own.
        times = array("d", bytes(8 * count))
        before, theirs = belongings(), [belongings(pid) for pid in pids]
        for number in range(count):
            began = time.perf_counter()
            load.call(work)
            times[number] = time.perf_counter() - began
        after, theirs_after = belongings(), [belongings(pid) for pid in pids]
        tenth = max(1, count // 10)
        early, late = percentile(times[tenth : 2 * tenth], 0.99), percentile(times[-tenth:], 0.99)
    _judge_one(given, f"{count:,} calls: host", before, after, count)
    for number, (was, now) in enumerate(zip(theirs, theirs_after, strict=True)):
        _judge_one(given, f"{count:,} calls: worker w{number}", was, now, count)
    given.claim("failed calls", load.failed, at_most=0)
    given.claim("wrong results", load.wrong, at_most=0)
    given.goal("p99 of the last tenth beside the second", late / early, at_most=1.05)
    given.row(
        "calls", times[:1000].tolist(), calls=count, failed_calls=load.failed, wrong_results=load.wrong,
        rss_bytes_per_1000_calls=_slope(before, after, count), **spread("call", times),
    )  # fmt: skip


def _sessions(given: Run, spec: ModelSpec, count: int) -> None:
    """Opens and closes sessions with one worker that was started by hand."""
    failed = 0
    folder = given.folder / "sessions"
    times: list[float] = []
    with worker_by_hand(spec, folder, f"unix://{folder}/far.sock") as worker:
        topology = reaching(worker.address)
        before, theirs = belongings(), belongings(worker.pid)
        for number in range(count + WARM_SESSIONS):
            if number == WARM_SESSIONS:
                before, theirs = belongings(), belongings(worker.pid)
            began = time.perf_counter()
            way = list(WAYS)[number % 2]  # shared memory and a Unix stream in turn
            failed += int(not _session(topology, spec, way))
            times.append(time.perf_counter() - began)
        left = left_since(before)
        after, theirs_after = belongings(), belongings(worker.pid)
    for what, value in left.items():
        given.claim(f"{count:,} sessions: {what.replace('_', ' ')}", value, at_most=0)
    given.claim(f"{count:,} sessions: failed", failed, at_most=0)
    _judge_one(given, f"{count:,} sessions: worker", theirs, theirs_after, 1000 * count)
    given.row(
        "sessions", times[:1000], sessions=count, failed=failed, host_rss_growth_bytes=after.rss_bytes - before.rss_bytes,
        worker_rss_growth_bytes=theirs_after.rss_bytes - theirs.rss_bytes, **left,
    )  # fmt: skip


def _session(topology: object, spec: ModelSpec, way: str) -> bool:
    until = time.monotonic() + BACK_S
    while True:
        try:
            with ExpertRuntime.start(topology, model=spec, **ALONE, **WAYS[way]) as runtime:  # type: ignore[arg-type]
                return all(one.state == "ready" for one in runtime.workers())
        except WorkerError as error:
            # The worker may still be ending the former session.
            if "is busy" not in str(error) or time.monotonic() > until:
                return False
            time.sleep(0.005)


def _restarts(given: Run, spec: ModelSpec, count: int) -> None:
    away = 0
    back_s: list[float] = []
    generations: list[int] = []
    with start(spec, "shared", restart_backoff_ms=(1, 20)) as runtime:
        load = Load.quiet(runtime, seed=given.seed, tokens=(1, 16))
        before = belongings()
        for number in range(count + WARM_RESTARTS):
            if number == WARM_RESTARTS:
                before = belongings()
            victim = ("w0", "w1")[number % 2]
            deaths = state_of(runtime, victim).deaths
            began = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids_of(runtime)[victim], signal.SIGKILL)
            is_back = wait_until(
                lambda: (now := state_of(runtime, victim)).state == "ready" and now.deaths > deaths,  # noqa: B023
                every_s=0.01,
            )
            back_s.append(time.monotonic() - began)
            away += int(not is_back)
            generations.append(int(runtime.stats()["workers"][victim]["generation"]))
            given.event("restart", worker=victim, back_s=back_s[-1], verdict="back" if is_back else "away")
            for work in load.works:
                load.call(work)
        # Two workers are there as before; only who they are has changed.
        left = left_since(before)
        left["left_processes"] = max(0, len(belongings().children) - len(before.children))
        after = belongings()
    for what, value in left.items():
        given.claim(f"{count:,} restarts: {what.replace('_', ' ')}", value, at_most=0)
    given.claim(f"{count:,} restarts: not back", away, at_most=0)
    given.claim(f"{count:,} restarts: failed calls", load.failed, at_most=0)
    given.claim(f"{count:,} restarts: wrong results", load.wrong, at_most=0)
    given.claim("generations used twice", len(generations) - len(set(generations)), at_most=0)
    given.row(
        "restarts", back_s, restarts=count, calls=load.calls, failed_calls=load.failed, wrong_results=load.wrong, not_back=away,
        rss_growth_bytes=after.rss_bytes - before.rss_bytes, **spread("back", back_s, unit_ms=False), **left,
    )  # fmt: skip


def _judge_one(given: Run, what: str, before: Belongings, after: Belongings, calls: int) -> None:
    """Compares counts of one process, which must be equal, and its memory."""
    for name in ("descriptors", "threads", "memfds", "sockets", "mapped_memfds"):
        given.claim(f"{what}: more {name.replace('_', ' ')}", getattr(after, name) - getattr(before, name), at_most=0)
    growth = after.rss_bytes - before.rss_bytes
    given.claim(f"{what}: growth, bytes", growth, at_most=RSS_SLACK + RSS_PER_1000_CALLS * calls / 1000)


def _slope(before: Belongings, after: Belongings, calls: int) -> float:
    return (after.rss_bytes - before.rss_bytes) / max(1, calls) * 1000


CAMPAIGN = Campaign(
    "soak", "many calls, sessions and restarts leave everything as it was",
    "thousandths of 10 million calls, 10,000 sessions and 1,000 restarts", 1000, 2, run,
)  # fmt: skip
