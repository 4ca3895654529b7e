"""What a process has at one moment, read from /proc: children, threads, open descriptors by kind,
mapped segments, names in /dev/shm, memory. What is there more later was left behind.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path

# What was told to end is gone within this time on a busy machine.
GRACE_S = 20.0
# Python's own helpers of multiprocessing begin once in a process, and stay.
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
_FOREIGN_NAMES = ("sem.mp-", "psm_", "torch_")


@dataclass(frozen=True, slots=True)
class Belongings:
    """Counts of one process and the pids of its children."""

    children: frozenset[int]
    threads: int
    descriptors: int
    memfds: int
    sockets: int
    mapped_memfds: int
    names: frozenset[str]
    rss_bytes: int


def belongings(pid: int | None = None) -> Belongings:
    """Takes stock of a process, this one without `pid`. Raises OSError where it is gone."""
    root = Path(f"/proc/{pid if pid is not None else os.getpid()}")
    kinds = _kinds(root)
    rss_pages = int((root / "statm").read_text().split()[1])
    return Belongings(
        children=frozenset(_children(root)),
        threads=len(os.listdir(root / "task")),
        descriptors=len(kinds),
        memfds=sum(kind.startswith("/memfd:") for kind in kinds),
        sockets=sum(kind.startswith("socket:") for kind in kinds),
        mapped_memfds=(root / "maps").read_text().count("/memfd:"),
        names=frozenset(name for name in os.listdir("/dev/shm") if not name.startswith(_FOREIGN_NAMES)),
        rss_bytes=rss_pages * os.sysconf("SC_PAGE_SIZE"),
    )


def left_since(before: Belongings, *, grace_s: float = GRACE_S) -> dict[str, int]:
    """Returns how many things of each kind this process has more than `before`, at most `grace_s`
    seconds from now. Memory is no such thing.
    """
    until = time.monotonic() + grace_s
    while True:
        gc.collect()
        found = _more(before, belongings())
        if not any(found.values()) or time.monotonic() > until:
            return found
        time.sleep(0.02)


def _more(before: Belongings, now: Belongings) -> dict[str, int]:
    return {
        "left_processes": len(now.children - before.children),
        "left_threads": max(0, now.threads - before.threads),
        "left_descriptors": max(0, now.descriptors - before.descriptors),
        "left_memfds": max(0, now.memfds - before.memfds),
        "left_sockets": max(0, now.sockets - before.sockets),
        "left_segments": max(0, now.mapped_memfds - before.mapped_memfds),
        "left_names": len(now.names - before.names),
    }


def children_of(pid: int) -> set[int]:
    """Returns the children of a process, those that only wait to be reaped too."""
    return set(_children(Path(f"/proc/{pid}")))


def is_gone(pid: int) -> bool:
    """Says whether no such process runs any more. One that only waits to be reaped is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True


def _children(root: Path) -> list[int]:
    found: list[int] = []
    for task in os.listdir(root / "task"):
        try:
            found += [int(child) for child in (root / "task" / task / "children").read_text().split()]
        except OSError:
            # This thread has ended meanwhile.
            continue
    return [child for child in found if not _is_helper(child)]


def _is_helper(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False
    return any(name in command for name in _HELPERS)


def _kinds(root: Path) -> list[str]:
    kinds = []
    for entry in os.listdir(root / "fd"):
        try:
            kinds.append(os.readlink(root / "fd" / entry))
        except OSError:
            # This was the descriptor of the listing itself.
            continue
    return kinds
