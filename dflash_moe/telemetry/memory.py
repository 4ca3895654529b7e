"""Reads the resident memory of a process, split by what it costs: anonymous bytes are its own, and
file-backed ones are the page cache's.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The resident bytes of a process. `shared_bytes` are those of memfd segments, which several
    processes map.
    """

    anonymous_bytes: int
    file_bytes: int
    shared_bytes: int


def process_memory(pid: int | None = None) -> ProcessMemory:
    """Reads /proc/PID/status, of this process where `pid` is None. All is zero when the process is
    gone.
    """
    try:
        text = _read(pid, "status")
    except OSError:
        return ProcessMemory(0, 0, 0)
    found = {"RssAnon": 0, "RssFile": 0, "RssShmem": 0}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key in found:
            found[key] = int(value.split()[0]) * 1024
    return ProcessMemory(found["RssAnon"], found["RssFile"], found["RssShmem"])


def _read(pid: int | None, name: str) -> str:
    """Returns a file of /proc/PID. Raises OSError where there is none."""
    path = Path("/proc", "self" if pid is None else str(pid), name)
    return path.read_text(encoding="ascii", errors="replace")


def huge_page_bytes(pid: int | None = None) -> int | None:
    """Returns how many anonymous bytes of a process lie on huge pages (/proc/PID/smaps_rollup), of
    this process where `pid` is None; None where the system does not say.
    """
    try:
        text = _read(pid, "smaps_rollup")
    except OSError:
        return None
    found = [line.split()[1] for line in text.splitlines() if line.startswith("AnonHugePages:")]
    return int(found[0]) * 1024 if found else None


def trim_heap() -> None:
    """Gives freed memory back to the system that the C library keeps for later, where it has a
    function for that.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
