"""Plans which cores the threads of each worker are pinned to: those that `workers[].cpus` names, or
cores of its own where there are enough for all workers.

Workers compute while the host waits for them. So cores of their own are worth it even where the
host has to share them: unpinned workers are often woken on one core, one behind the other, while
the host's stands idle.

A worker gets cores of one memory node where one has room. Its pinned threads load the weights, so
that these lie on that node too.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dflash_moe.telemetry.cores import Core
from dflash_moe.topology import Topology


def plan_cpus(
    topology: Topology, threads: Mapping[str, int], *, host_threads: int, cores: Sequence[Core], may_choose: bool
) -> dict[str, tuple[int, ...]]:
    """Returns the CPUs of every pinned worker by its name, one for each thread in order.

    `threads` gives the number of threads of the workers that the host starts. `cores` are the
    usable ones, best first. Where `may_choose` is false, only workers whose CPUs the topology names
    are pinned. The first `host_threads` cores stay free for the host, as far as workers leave any:
    it is not pinned, and its threads move to the cores that nobody else has.
    """
    named = {worker.name: worker.cpus for worker in topology.workers if isinstance(worker.cpus, tuple)}
    choosing = [worker.name for worker in topology.workers if worker.name in threads and worker.cpus == "auto"]
    taken = {cpu for worker in topology.local_workers() for cpu in named.get(worker.name, ())}
    free = [core for core in cores if core.cpu not in taken]
    num_left = len(free) - sum(threads[name] for name in choosing)
    planned = dict(named)
    if may_choose and num_left >= 0:
        free = free[min(host_threads, num_left) :]
        for name in choosing:
            chosen = _choose(threads[name], free)
            free = [core for core in free if core not in chosen]
            planned[name] = tuple(core.cpu for core in chosen)
    return planned


def _choose(count: int, free: Sequence[Core]) -> list[Core]:
    """Chooses `count` of the `free` cores. They are of one memory node where a node has room, of
    the one with most whole physical cores left; else they are the first.
    """
    nodes: dict[int, list[Core]] = {}
    for core in free:
        nodes.setdefault(core.node, []).append(core)
    roomy = [cores for cores in nodes.values() if len(cores) >= count]
    if not roomy:
        return list(free[:count])
    # max() returns the first of equals, so that the choice is the same in every run.
    best = max(roomy, key=lambda cores: sum(core.rank == 0 for core in cores))
    return best[:count]
