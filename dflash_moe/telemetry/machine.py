"""Says what this process may use of its machine: the cores that affinity and cgroup quota leave,
and the memory that is free within the cgroup's limit.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from dflash_moe.telemetry.cgroup import CGROUP, PROC, cpu_quota, memory_left, read_text

_CPU_TOPOLOGY = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")


def usable_cores(cgroup: Path = CGROUP, proc: Path = PROC) -> int:
    """Returns the number of logical CPUs in the affinity mask, at most the cgroup's quota rounded
    down, and at least 1.
    """
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(cgroup, proc)
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


def cores_reason() -> str:
    """Returns a phrase that says why `usable_cores` is what it is."""
    mask, online = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    reason = f"affinity mask of {mask} of {online}" if mask < online else f"all {online}"
    quota = cpu_quota(CGROUP, PROC)
    if quota is None:
        return f"{reason}, no control group quota"
    return f"{reason}, control group quota {quota:g}" + (" binds" if math.floor(quota) < mask else "")


def physical_cores(cgroup: Path = CGROUP, proc: Path = PROC) -> int:
    """Returns the number of physical cores among the usable logical ones. Where the kernel does not
    tell, it is the logical count.
    """
    siblings = set()
    for cpu in os.sched_getaffinity(0):
        text = read_text(_CPU_TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list")
        siblings.add(text or str(cpu))
    return max(1, min(len(siblings), usable_cores(cgroup, proc)))


def num_memory_nodes(nodes: Path = _NODES) -> int:
    """Returns the number of memory nodes of this machine that have memory, and 1 where the kernel
    does not tell.
    """
    texts = [read_text(folder / "meminfo") for folder in nodes.glob("node[0-9]*")]
    sizes = [line.split()[3] for text in texts for line in text.splitlines() if line.split()[2:3] == ["MemTotal:"]]
    return max(1, sum(size != "0" for size in sizes))


def memory_available(cgroup: Path = CGROUP, proc: Path = PROC) -> int:
    """Returns the bytes that new processes may still take: MemAvailable, but at most what the
    cgroup leaves. The page cache counts as free, unless /proc cannot be read, as in a process that
    has no descriptor left.
    """
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in read_text(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    left = memory_left(cgroup, proc)
    return available if left is None else min(available, left)
