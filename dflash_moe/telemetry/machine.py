"""What this process may use of its machine: cores (affinity and cgroup quota) and memory (free and cgroup limit).

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
import os
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_CPU_TOPOLOGY = Path("/sys/devices/system/cpu")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Logical CPUs of the affinity mask, at most the cgroup's quota rounded down, at least 1."""
    cores = len(os.sched_getaffinity(0))
    quota = _cpu_quota(cgroup)
    return max(1, min(cores, math.floor(quota))) if quota else cores


def physical_cores(cgroup: Path = _CGROUP, topology: Path = _CPU_TOPOLOGY) -> int:
    """Distinct physical cores among the usable logical ones; where the kernel does not tell, the logical count."""
    siblings = set()
    for cpu in os.sched_getaffinity(0):
        text = _read(topology / f"cpu{cpu}" / "topology" / "thread_siblings_list")
        siblings.add(text or str(cpu))
    return max(1, min(len(siblings), usable_cores(cgroup)))


def memory_available(cgroup: Path = _CGROUP, proc: Path = _PROC) -> int:
    """Bytes that new processes may still take: MemAvailable, at most what the cgroup leaves. Page cache counts as free."""
    available = 0
    for line in (_read(proc / "meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = _read(cgroup / "memory.max")
    if limit and limit.isdigit():
        current = int(_read(cgroup / "memory.current") or 0)
        reclaimable = _stat_value(cgroup / "memory.stat", "file")
        available = min(available, max(0, int(limit) - current + reclaimable))
    return available


def _cpu_quota(cgroup: Path) -> float:
    fields = (_read(cgroup / "cpu.max") or "").split()
    if len(fields) == 2 and fields[0].isdigit() and int(fields[1]):
        return int(fields[0]) / int(fields[1])
    return 0.0


def _stat_value(path: Path, name: str) -> int:
    for line in (_read(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
