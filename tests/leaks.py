"""Finds what a test leaves behind, which must be nothing, by comparing snapshots of child
processes, descriptors and names.

Snapshots are read from /proc and /dev/shm only, so that a leak is seen whoever caused it: a worker
that outlived its session, a segment or a socket that its owner forgot, a name.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path

# A process that was told to end may take so long to be reaped. It is far more than it needs,
# because a busy machine is no leak, and only a test that leaks waits so long.
GRACE_S = 20.0
# multiprocessing starts these long-lived children once in a process.
_TOLERATED_COMMANDS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_COUNTED_KINDS = {"memfd": "/memfd:", "socket": "socket:[", "eventfd": "anon_inode:[eventfd]"}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What exists at one moment: `processes` has the command line of every descendant by its pid,
    `descriptors` the number of open ones by kind, and `names` the entries of /dev/shm.
    """

    processes: dict[int, str]
    descriptors: dict[str, int]
    names: frozenset[str]


def take() -> Snapshot:
    """Takes a snapshot of this process and its descendants."""
    return Snapshot(_descendants(os.getpid()), _descriptors(), frozenset(_shared_names()))


def leaks_since(before: Snapshot, grace_s: float | None = None) -> list[str]:
    """Returns a line for each thing that is there now and was not `before`. It waits at most
    `grace_s` seconds, GRACE_S by default, for things to go.
    """
    deadline = time.monotonic() + (GRACE_S if grace_s is None else grace_s)
    found = _differences(before, take())
    if found:
        # Objects in reference cycles close their descriptors only now, and that is no leak.
        gc.collect()
        found = _differences(before, take())
    while found and time.monotonic() < deadline:
        time.sleep(0.02)
        found = _differences(before, take())
    return found


def _differences(before: Snapshot, now: Snapshot) -> list[str]:
    left = {pid: command for pid, command in now.processes.items() if pid not in before.processes}
    lines = [f"process {pid} is still there: {command}" for pid, command in left.items()]
    for kind, count in now.descriptors.items():
        extra = count - before.descriptors.get(kind, 0)
        if extra > 0:
            lines.append(f"{extra} more open {kind} descriptors than before")
    return lines + [f"/dev/shm/{name} was left behind" for name in sorted(now.names - before.names)]


def _descendants(root: int) -> dict[int, str]:
    children: dict[int, list[int]] = {}
    # Every test reads all of these twice, so that they are read the shortest way.
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb", buffering=0) as file:
                stat = file.read()
        except OSError:
            # The process has ended meanwhile.
            continue
        _state, parent = stat[stat.rindex(b")") + 1 :].split(None, 2)[:2]
        children.setdefault(int(parent), []).append(int(name))
    found: dict[int, str] = {}
    queue = list(children.get(root, []))
    while queue:
        pid = queue.pop()
        command = _command(pid)
        if command is not None and not any(name in command for name in _TOLERATED_COMMANDS):
            found[pid] = command
        queue += children.get(pid, [])
    return found


def _command(pid: int) -> str | None:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
        return raw.replace(b"\0", b" ").decode(errors="replace").strip() or Path(f"/proc/{pid}/stat").read_text()[:80]
    except OSError:
        return None


def _descriptors() -> dict[str, int]:
    counts = dict.fromkeys(_COUNTED_KINDS, 0)
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            # This was the descriptor of the listing itself.
            continue
        for kind, prefix in _COUNTED_KINDS.items():
            if target.startswith(prefix):
                counts[kind] += 1
    return counts


def _shared_names() -> list[str]:
    folder = Path("/dev/shm")
    # These are semaphores and blocks of multiprocessing and torch, whose own trackers remove them
    # when the process ends.
    foreign = ("sem.mp-", "psm_", "torch_")
    return [entry.name for entry in folder.iterdir() if not entry.name.startswith(foreign)] if folder.is_dir() else []
