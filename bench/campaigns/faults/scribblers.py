"""Hostile processes: workers that write random bytes into the memory that they share with the host,
at any moment of a call. The host's side must hold: no wrong result, no crash, no failed call while
another worker holds the shards.

The bytes are written by this process into the worker's own writable mapping (/proc/PID/mem), which
is what a worker gone mad could do to its segment. It needs root, or the right to trace.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.campaigns.faults.campaign import Campaign, Run, spread
from bench.campaigns.faults.leftovers import belongings, left_since
from bench.campaigns.faults.load import Load, is_used, make_model, pids_of, start, state_of, wait_until

# What one event writes: so many pieces of so many bytes at most.
MOST_PIECES, MOST_BYTES = 50, 64
# Pieces fall into the first so many bytes as often as into others: there are the ring's indices,
# the slots that are used first, and then all the rest.
ZONES_BYTES = (512, 4096, 1 << 18, 1 << 40)


@dataclass(frozen=True, slots=True)
class _Segment:
    """A mapping of a segment that a process may write."""

    start: int
    length: int


def run(given: Run) -> None:
    """Scribbles `given.size` times."""
    spec = make_model(given.folder / "model")
    before = belongings()
    stalls_s: list[float] = []
    away = pieces = deaths = 0
    with start(spec, "shared", restart_backoff_ms=(20, 100), call_timeout_s=10.0) as runtime:
        load = Load.quiet(runtime, seed=given.seed)
        load.take_worst_s()
        with load.running(seed=given.seed):
            for _ in range(given.size):
                # Always the same one: what was written is found when it is read, maybe later.
                victim = "w1"
                pid, known = pids_of(runtime)[victim], state_of(runtime, victim).deaths
                time.sleep(given.drawn.random() * 0.005)
                written = scribble(pid, given.drawn)
                time.sleep(given.drawn.random() * 0.01)
                is_back = wait_until(is_used(runtime, victim))
                stalls_s.append(load.take_worst_s())
                away += int(not is_back)
                pieces += written
                died = state_of(runtime, victim).deaths - known
                deaths += died
                given.event(
                    "scribble", worker=victim, pid=pid, pieces=written, stall_ms=1e3 * stalls_s[-1], deaths=died,
                    failed_calls=load.failed, wrong_results=load.wrong, verdict="back" if is_back else "away",
                )  # fmt: skip
        is_served = all(load.call(work) for work in load.works)
    left = left_since(before)
    zero = {"failed calls": load.failed, "wrong results": load.wrong, "not back": away + int(not is_served), **left}
    for what, value in zero.items():
        given.claim(what.replace("_", " "), value, at_most=0)
    given.claim("pieces written", pieces, at_least=given.size)
    given.row(
        "scribbles", stalls_s, scribbles=given.size, pieces=pieces, deaths=deaths, calls=load.calls, failed_calls=load.failed,
        wrong_results=load.wrong, not_back=away, **spread("stall", stalls_s), **left,
        first_error=load.errors[0][2] if load.errors else "",
    )  # fmt: skip


def scribble(pid: int, drawn: random.Random) -> int:
    """Writes random bytes into random places of a process's writable segments, and returns how many
    pieces were written.
    """
    segments = list(_segments(pid))
    written = 0
    with contextlib.suppress(OSError), open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for _ in range(drawn.randrange(1, MOST_PIECES) if segments else 0):
            segment = drawn.choice(segments)
            memory.seek(segment.start + drawn.randrange(min(drawn.choice(ZONES_BYTES), segment.length)))
            memory.write(drawn.randbytes(drawn.randrange(1, MOST_BYTES)))
            written += 1
    return written


def _segments(pid: int) -> Iterator[_Segment]:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            place, rights, *rest = line.split()
            if "w" in rights and "s" in rights and any("/memfd:" in word for word in rest):
                first, last = (int(part, 16) for part in place.split("-"))
                yield _Segment(first, last - first)


def _lacking() -> str:
    return "" if os.geteuid() == 0 else "writing into another process needs root"


CAMPAIGN = Campaign("scribblers", "workers that scribble over shared memory", "scribbles", 300, 10, run, _lacking)
