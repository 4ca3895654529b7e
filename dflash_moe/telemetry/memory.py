"""Resident memory of a process, split by what it costs: anonymous bytes are its own, file-backed
ones the page cache's.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Resident bytes; `shared_bytes` are memfd segments mapped by several processes."""

    anonymous_bytes: int
    file_bytes: int
    shared_bytes: int


def process_memory(pid: int | None = None, proc: Path = Path("/proc")) -> ProcessMemory:
    """Reads /proc/PID/status (None: this process); all zero when the process is gone."""
    try:
        text = (proc / ("self" if pid is None else str(pid)) / "status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ProcessMemory(0, 0, 0)
    found = {"RssAnon": 0, "RssFile": 0, "RssShmem": 0}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key in found:
            found[key] = int(value.split()[0]) * 1024
    return ProcessMemory(found["RssAnon"], found["RssFile"], found["RssShmem"])
