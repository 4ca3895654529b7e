"""The n-th call of a function of the system fails: an allocation of the core, mmap, memfd_create,
eventfd, send, recv, open, pthread_create. While a runtime starts, while it is called, and while a
worker is started again, in the host; and in a worker that starts. Each ends in a typed error or in
a recovery, with the right bits, and nothing hangs or crashes.

A library that is loaded first (failing_calls.c) has the call fail. The host is a process of its own
(failing_host.py), so that a crash or a hang of it ends nothing else.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.campaigns.faults.campaign import Campaign, Run

ROOT = Path(__file__).resolve().parents[3]
SOURCE = Path(__file__).with_suffix(".c")
# In the order of the enum in failing_calls.c.
KINDS = ("malloc", "mmap", "memfd", "eventfd", "send", "recv", "open", "thread")
# Where and while what; the worker that is armed is one that starts.
PLACES = ("start", "call", "restart", "worker")
# An event has a limit of its own below this; who says nothing for so long hangs.
HANG_S = 150.0
COMPILE_S = 120.0
GOOD = ("passed", "error", "recovered")


def run(given: Run) -> None:
    """Has `given.size` calls of each kind fail in each place, spread over those that there are."""
    library = given.folder / "failing_calls.so"
    command = [_compiler(), "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl", "-pthread"]
    subprocess.run(command, check=True, timeout=COMPILE_S)
    verdicts: Counter[str] = Counter()
    for place in PLACES:
        of_place = _sweep(given, library, place)
        for kind in KINDS:
            found = [one for one in of_place if one["kind"] == kind]
            fired = sum(one["fired"] for one in found)
            tally = Counter(one["verdict"] for one in found)
            verdicts += tally
            given.row(
                f"{place}, {kind}", [one["seconds"] for one in found], failed_calls_injected=fired, **tally,
                calls_seen=max((one["seen"] for one in found), default=0),
            )  # fmt: skip
    for verdict in ("crash", "hang", "wrong", "leak", "lasting", "untyped"):
        given.claim(verdict, verdicts[verdict], at_most=0)
    given.claim("calls that failed", sum(row["failed_calls_injected"] for row in given.result.rows), at_least=given.size)


def _sweep(given: Run, library: Path, place: str) -> list[dict[str, Any]]:
    """Runs one kind after the other in one place; a host that crashes or hangs is followed by
    another.
    """
    kinds = [kind for kind in KINDS for _ in range(given.size)]
    found: list[dict[str, Any]] = []
    while len(found) < len(kinds):
        found += _one_host(given, library, place, kinds, first=len(found))
    return found


def _one_host(given: Run, library: Path, place: str, kinds: list[str], *, first: int) -> list[dict[str, Any]]:
    """Returns what one host found until it ended; the event in which it crashed or hung is one."""
    arguments = [str(given.folder), place, str(len(KINDS)), str(given.size), str(first), str(given.seed)]
    command = [sys.executable, "-m", "bench.campaigns.faults.failing_host", *arguments]
    found: list[dict[str, Any]] = []
    with (given.folder / "host.log").open("a") as log:
        host = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "LD_PRELOAD": str(library)}, stdout=subprocess.PIPE, stderr=log, text=True,
            start_new_session=True,
        )  # fmt: skip
    if host.stdout is None:
        raise RuntimeError("a pipe was asked for")
    began = time.monotonic()
    try:
        while True:
            readable, _, _ = select.select([host.stdout], [], [], HANG_S)
            line = host.stdout.readline() if readable else ""
            if not line:
                break
            one = {"kind": kinds[first + len(found)], **json.loads(line)}
            found.append(one)
            given.event(place, **one)
            began = time.monotonic()
        status = host.poll() if readable else None
        if not readable or host.wait(HANG_S) != 0:
            log_tail = (given.folder / "host.log").read_text(errors="replace")[-400:]
            # What comes at the end of a host is counted as the last kind's.
            kind = kinds[min(first + len(found), len(kinds) - 1)]
            one = {"kind": kind, "verdict": "crash" if readable else "hang", "n": -1, "fired": 1, "seen": 0,
                   "seconds": time.monotonic() - began}  # fmt: skip
            found.append(one)
            given.event(place, **one, status=status, error=log_tail)
    finally:
        host.kill()
        host.communicate(timeout=HANG_S)
    return found


def _compiler() -> str:
    return shutil.which("cc") or shutil.which("gcc") or ""


def _lacking() -> str:
    return "" if _compiler() else "a C compiler (cc)"


CAMPAIGN = Campaign(
    "failing-calls", "the n-th call of a function of the system fails", "failures of each of 8 kinds in each of 4 places", 12,
    2, run, _lacking,
)  # fmt: skip
