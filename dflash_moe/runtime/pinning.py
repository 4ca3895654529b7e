"""Which cores the threads of each worker are pinned to: `workers[].cpus`, or cores of its own where
there are enough.

Workers get cores of one memory node where one has room: pinned threads load the weights, so that
these lie on that node too.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dflash_moe.telemetry.cores import Core
from dflash_moe.topology import Topology


def plan_cpus(
    topology: Topology, threads: Mapping[str, int], *, host_threads: int, cores: Sequence[Core], may_choose: bool
) -> dict[str, tuple[int, ...]]:
    """CPUs by worker, one per thread in order; workers that are not pinned are left out.

    `threads` are those of the workers that the host starts. `cores` are the usable ones, best
    first. `may_choose` False: only what the topology names. The host's threads keep the first
    cores: it is not pinned, and moves to those nobody else has.
    """
    named = {worker.name: worker.cpus for worker in topology.workers if isinstance(worker.cpus, tuple)}
    choosing = [worker.name for worker in topology.workers if worker.name in threads and worker.cpus == "auto"]
    taken = {cpu for worker in topology.local_workers() for cpu in named.get(worker.name, ())}
    free = [core for core in cores if core.cpu not in taken][host_threads:]
    planned = dict(named)
    if may_choose and sum(threads[name] for name in choosing) <= len(free):
        for name in choosing:
            chosen = _choose(threads[name], free)
            free = [core for core in free if core not in chosen]
            planned[name] = tuple(core.cpu for core in chosen)
    return planned


def _choose(count: int, free: Sequence[Core]) -> list[Core]:
    """`count` of the `free` cores: of the node with most whole physical cores left, of any node
    with room, else the first.
    """
    nodes: dict[int, list[Core]] = {}
    for core in free:
        nodes.setdefault(core.node, []).append(core)
    roomy = [members for members in nodes.values() if len(members) >= count]
    if not roomy:
        return list(free[:count])
    # the first of equals: deterministic
    best = max(roomy, key=lambda members: sum(core.rank == 0 for core in members))
    return best[:count]
