"""Cores and memory this process may use, read from made-up control groups of both versions.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os

import pytest

from dflash_moe.telemetry import machine
from dflash_moe.telemetry.cgroup import cpu_quota, memory_left

GIB = 1 << 30


@pytest.fixture
def make(tmp_path):
    """make({relative path: text}) writes files and returns (cgroup, proc)."""

    def write(files: dict[str, object]):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return tmp_path / "cgroup", tmp_path / "proc"

    return write


def test_without_control_groups_there_is_no_limit(make):
    where = make({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    2048 kB"})
    assert cpu_quota(*where) is None
    assert memory_left(*where) is None
    assert machine.usable_cores(*where) == len(os.sched_getaffinity(0))
    assert machine.memory_available(*where) == 2 << 20


@pytest.mark.parametrize(
    ("text", "expected"), [("max 100000", None), ("150000 100000", 1.5), ("50000 100000", 0.5), ("", None), ("x y", None)]
)
def test_quota_of_version_2(make, text, expected):
    assert cpu_quota(*make({"cgroup/cpu.max": text})) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", None), ("200000", 2.0)])
def test_quota_of_version_1(make, quota, expected):
    assert cpu_quota(*make({"cgroup/cpu/cpu.cfs_quota_us": quota, "cgroup/cpu/cpu.cfs_period_us": "100000"})) == expected


def test_the_tightest_level_counts(make):
    where = make(
        {
            "proc/self/cgroup": "0::/outer/inner",
            "cgroup/outer/cpu.max": "100000 100000",
            "cgroup/outer/inner/cpu.max": "400000 100000",
            "cgroup/outer/memory.max": "max",
            "cgroup/outer/inner/memory.max": 3 * GIB,
            "cgroup/outer/inner/memory.current": GIB,
            "cgroup/elsewhere/memory.max": 1,
        }
    )
    assert cpu_quota(*where) == 1.0
    assert memory_left(*where) == 2 * GIB


def test_page_cache_counts_as_free_and_shared_memory_does_not(make):
    where = make(
        {
            "proc/meminfo": f"MemAvailable: {8 * GIB // 1024} kB",
            "cgroup/memory.max": 4 * GIB,
            "cgroup/memory.current": 3 * GIB,
            "cgroup/memory.stat": f"anon 1\nfile {3 * GIB}\nshmem {2 * GIB}\ninactive_file {GIB}\nactive_file 5",
        }
    )
    assert machine.memory_available(*where) == 2 * GIB + 5


def test_memory_of_version_1_follows_the_controllers_own_path(make):
    files = {
        "proc/self/cgroup": "4:memory:/box/a\n2:cpu,cpuacct:/\n0::/",
        "cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
        "cgroup/memory/box/a/memory.limit_in_bytes": 2 * GIB,
        "cgroup/memory/box/a/memory.usage_in_bytes": GIB,
        "cgroup/memory/box/a/memory.stat": "inactive_file 7\ntotal_inactive_file 8\ntotal_active_file 1",
    }
    assert memory_left(*make(files)) == GIB + 9


def test_a_path_outside_the_mount_falls_back_to_its_root(make):
    where = make({"proc/self/cgroup": "0::/../host/box", "cgroup/memory.max": 5, "cgroup/cpu.max": "300000 100000"})
    assert (memory_left(*where), cpu_quota(*where)) == (5, 3.0)


def test_a_quota_below_one_core_leaves_one(make):
    where = make({"cgroup/cpu.max": "10000 100000"})
    assert machine.usable_cores(*where) == machine.physical_cores(where[0], proc=where[1]) == 1


def test_without_a_descriptor_to_read_proc_memory_is_not_said_to_be_full(tmp_path):
    # What the system call says leaves the page cache out.
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < machine.memory_available(tmp_path / "no cgroup", tmp_path / "no proc") <= total


def test_memory_nodes_are_those_with_memory(make, tmp_path):
    make(
        {
            "node/node0/meminfo": "\nNode 0 MemTotal:       32768 kB\nNode 0 MemFree:            0 kB",
            "node/node1/meminfo": "Node 1 MemTotal:          64 kB",
            "node/node10/meminfo": "Node 10 MemTotal:          0 kB\nNode 10 MemFree:            0 kB",
            "node/node11/cpulist": "0-3",
            "node/has_memory": "0-1",
        }
    )
    assert machine.num_memory_nodes(tmp_path / "node") == 2
    assert machine.num_memory_nodes(tmp_path / "no folder") == 1
    assert machine.num_memory_nodes() >= 1
