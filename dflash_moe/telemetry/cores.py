"""Lists the logical CPUs of this machine as the kernel knows them, each with its memory node and
its place among those that share a physical core.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from dflash_moe.telemetry.cgroup import read_text

_SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True)
class Core:
    """One logical CPU. `rank` counts the usable ones before it on the same physical core, so that
    those of rank 0 are taken first.
    """

    cpu: int
    node: int
    rank: int


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Returns the ascending numbers that a list of the kernel such as "0-3,8" means. What is no
    number or range counts for nothing.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit() and (last or first).isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def numa_nodes(system: Path = _SYSTEM) -> dict[int, tuple[int, ...]]:
    """Returns the CPUs of each memory node that has any. It is empty where the kernel tells
    nothing.
    """
    nodes: dict[int, tuple[int, ...]] = {}
    for path in system.glob("node/node[0-9]*"):
        number = path.name.removeprefix("node")
        cpus = parse_cpu_list(read_text(path / "cpulist"))
        if number.isdigit() and cpus:
            nodes[int(number)] = cpus
    return dict(sorted(nodes.items()))


def last_cache_bytes(system: Path = _SYSTEM) -> int:
    """Returns the size of the largest cache of any CPU, 0 where the kernel does not tell."""
    return max((_cache_bytes(read_text(path)) for path in system.glob("cpu/cpu[0-9]*/cache/index*/size")), default=0)


def _cache_bytes(text: str) -> int:
    # The kernel writes a whole number and K, or once M.
    number, unit = text.strip()[:-1], text.strip()[-1:]
    return int(number) << {"K": 10, "M": 20}[unit] if number.isdigit() and unit in ("K", "M") else 0


def machine_cores(usable: Collection[int] | None = None, system: Path = _SYSTEM) -> tuple[Core, ...]:
    """Returns the CPUs of `usable`, by default those of this process's affinity mask. Those that
    stand for a physical core come first.

    Where the kernel does not tell, every CPU is a core of its own on node 0.
    """
    cpus = sorted(os.sched_getaffinity(0) if usable is None else usable)
    node_of = {cpu: node for node, members in numa_nodes(system).items() for cpu in members}
    seen: dict[tuple[int, ...], int] = {}
    cores = []
    for cpu in cpus:
        siblings = parse_cpu_list(read_text(system / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list")) or (cpu,)
        cores.append(Core(cpu, node_of.get(cpu, 0), seen.get(siblings, 0)))
        seen[siblings] = seen.get(siblings, 0) + 1
    return tuple(sorted(cores, key=lambda core: (core.rank, core.node, core.cpu)))
