"""Reads the limits that control groups of version 1 and 2 set on the CPU time and memory of this
process.

A limit of an outer group binds as well, so that each level is read and the tightest limit counts.
Where the path of the group is not visible below the mount (a container without its own cgroup
namespace), the root of the mount stands for it.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
# Version 1 of control groups writes "no limit" as the largest multiple of the page size below
# 2**63.
_UNLIMITED_V1 = 1 << 62
# The kernel gives these pages back under pressure: they are the page cache without shared memory.
_RECLAIMABLE = ("active_file", "inactive_file")


def cpu_quota(cgroup: Path = CGROUP, proc: Path = PROC) -> float | None:
    """Returns how many CPUs' worth of time the tightest group grants, None without a quota."""
    quotas = []
    for group in _levels("", cgroup, proc):
        fields = read_text(group / "cpu.max").split()
        quotas.append((fields[0], fields[1]) if len(fields) == 2 else ("", ""))
    for group in _levels("cpu", cgroup, proc):
        quotas.append((read_text(group / "cpu.cfs_quota_us"), read_text(group / "cpu.cfs_period_us")))
    found = [int(quota) / int(period) for quota, period in quotas if quota.isdigit() and period.isdigit() and int(period)]
    return min(found, default=None)


def memory_left(cgroup: Path = CGROUP, proc: Path = PROC) -> int | None:
    """Returns the bytes that the tightest group still grants, None without a limit. The page cache
    counts as free.
    """
    left = []
    for group in _levels("", cgroup, proc):
        left.append(_left(group, "memory.max", "memory.current", ""))
    for group in _levels("memory", cgroup, proc):
        left.append(_left(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
    return min((num_bytes for num_bytes in left if num_bytes is not None), default=None)


def read_text(path: Path) -> str:
    """Returns the text of a file without surrounding blanks, empty when it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _left(group: Path, limit_name: str, usage_name: str, prefix: str) -> int | None:
    limit = read_text(group / limit_name)
    if not limit.isdigit() or int(limit) >= _UNLIMITED_V1:
        return None
    usage = read_text(group / usage_name)
    reclaimable = 0
    for line in read_text(group / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key.removeprefix(prefix) in _RECLAIMABLE and key.startswith(prefix) and value.isdigit():
            reclaimable += int(value)
    return max(0, int(limit) - int(usage if usage.isdigit() else 0) + reclaimable)


def _levels(controller: str, cgroup: Path, proc: Path) -> Iterator[Path]:
    """Yields the folders from the group of this process up to the mount. `controller` is one of
    version 1, and empty for version 2.
    """
    mounts = [cgroup / controller] if controller else [cgroup, cgroup / "unified"]
    own = ""
    for line in read_text(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            own = "" if ".." in path.split("/") else path
    for mount in mounts:
        group = mount / own.strip("/")
        while group != mount and mount in group.parents:
            yield group
            group = group.parent
        yield mount
