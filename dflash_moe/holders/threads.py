"""Shares the machine's cores between the host and its local workers: how many threads each has,
whether anyone may spin, and which cores the threads of a worker are pinned to.

Those are the cores that `workers[].cpus` names, or cores of its own where there are enough for all
workers. Workers compute while the host waits for them. So cores of their own are worth it even
where the host has to share them: unpinned workers are often woken on one core, one behind the
other, while the host's stands idle. A worker gets cores of one memory node where one has room. Its
pinned threads load the weights, so that these lie on that node too.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dflash_moe.config import Settings
from dflash_moe.errors import ConfigError
from dflash_moe.protocol.devices import COMPUTED_BY_PROCESSOR, PROCESSOR, DeviceChoice
from dflash_moe.telemetry.cores import Core, machine_cores
from dflash_moe.telemetry.machine import physical_cores, usable_cores
from dflash_moe.topology import Topology, WorkerSpec

# A worker gets at most this many threads unless somebody asks for more.
MAX_DEFAULT_THREADS = 8
# A poller spins this long before it sleeps: longer than the own overhead of a call (25 us), and
# shorter than a scheduling quantum.
SPIN_NS = 50_000


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """The number of compute threads of the host and of each local worker, and how long every poller
    may spin. It is oversubscribed where there are more threads than usable cores.

    The host has one pool, which its operators, its own experts and workers at `loopback` share;
    these workers are not among `workers`.
    """

    host: int
    workers: Mapping[str, int]
    spin_ns: int
    is_oversubscribed: bool
    # Each pinned worker has one CPU for each of its threads, in order.
    cpus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def thread_plan(topology: Topology, settings: Settings, holders: Collection[str] | None = None) -> ThreadPlan:
    """Plans the threads that a runtime of this topology uses on this machine. A flag or variable
    wins over the topology. Workers that are not among `holders`, where that is given, hold no
    experts and are not started. Raises ConfigError for a worker that has more threads than `cpus`.
    """
    workers = [
        worker
        for worker in topology.local_workers()
        if worker.backend in COMPUTED_BY_PROCESSOR and (holders is None or worker.name in holders)
    ]
    pooled = [worker for worker in workers if shares_pool(topology, worker)]
    workers = [worker for worker in workers if worker not in pooled]
    plan = plan_threads(
        host_threads=max((_asked_threads(worker, settings) or 0 for worker in pooled), default=0) or topology.host.threads,
        worker_threads={worker.name: _asked_threads(worker, settings) for worker in workers},
        usable_cores=usable_cores(),
        physical_cores=physical_cores(),
        spin_us=settings.spin_us,
    )
    for worker in (*workers, *pooled):
        named, threads = _named_cpus(worker), plan.workers.get(worker.name, plan.host)
        if named and threads > len(named):
            raise ConfigError(
                f"{topology.source}:{worker.line or 1}: worker {worker.name} has {threads} threads for "
                f"{len(named)} cpus; name one CPU per thread, or write cpus: auto"
            )
    cores = machine_cores()
    # Cores are chosen only where no quota of a control group limits this process. Under a quota a
    # pinned thread could not leave a core that somebody else uses.
    may_choose = usable_cores() == len(cores)
    return replace(plan, cpus=plan_cpus(topology, plan.workers, host_threads=plan.host, cores=cores, may_choose=may_choose))


def plan_without(plan: ThreadPlan, worker: str, settings: Settings) -> ThreadPlan:
    """Returns the plan once a worker is gone. Nobody else gets other threads."""
    return _plan_anew(plan, {name: threads for name, threads in plan.workers.items() if name != worker}, settings)


def plan_with(plan: ThreadPlan, worker: WorkerSpec, settings: Settings) -> ThreadPlan:
    """Returns the plan with one more worker, which gets what the others have left over, at least
    one thread. Only CPUs that it names are its own. Raises ConfigError for one that has more
    threads than `cpus`.
    """
    if not worker.is_started_by_host or worker.backend not in COMPUTED_BY_PROCESSOR:
        return plan
    found = _plan_anew(plan, {**plan.workers, worker.name: _asked_threads(worker, settings)}, settings)
    named, threads = _named_cpus(worker), found.workers[worker.name]
    if named and threads > len(named):
        raise ConfigError(
            f"worker {worker.name} has {threads} threads for {len(named)} cpus; name one CPU per thread, or write cpus: auto"
        )
    return replace(found, cpus={**found.cpus, worker.name: named[:threads]} if named else found.cpus)


def _plan_anew(plan: ThreadPlan, workers: Mapping[str, int | None], settings: Settings) -> ThreadPlan:
    found = plan_threads(
        host_threads=plan.host, worker_threads=workers, usable_cores=usable_cores(), physical_cores=physical_cores(),
        spin_us=settings.spin_us,
    )  # fmt: skip
    return replace(found, cpus={name: cpus for name, cpus in plan.cpus.items() if name in workers})


def shares_pool(topology: Topology, worker: WorkerSpec) -> bool:
    """Says whether a worker computes with the host's pool: one inside a host whose device is the
    processor, on the processor.
    """
    is_inside = worker.parsed_address.kind == "loopback" and worker.backend == PROCESSOR
    return is_inside and DeviceChoice.of_host(topology.host).is_processor


def _asked_threads(worker: WorkerSpec, settings: Settings) -> int:
    if worker.backend != PROCESSOR:
        # A simulated device runs its threads one after the other.
        return 1
    return settings.threads or worker.threads or len(_named_cpus(worker))


def _named_cpus(worker: WorkerSpec) -> tuple[int, ...]:
    return worker.cpus if isinstance(worker.cpus, tuple) else ()


def plan_threads(
    *,
    host_threads: int | None,
    worker_threads: Mapping[str, int | None],
    usable_cores: int,
    physical_cores: int,
    spin_us: int | None = None,
) -> ThreadPlan:
    """Plans threads without looking at the machine. Explicit numbers are kept; the other workers
    get an even share of the cores that are left, 1 to MAX_DEFAULT_THREADS each, and then the host
    likewise, for which one core was set aside.

    Spinning is allowed only where every poller and every compute thread has a core of its own,
    because with too few cores it costs up to 100 times what it saves. The serving thread of a
    worker is one of its compute threads.
    """
    host = max(1, host_threads or 1)
    unset = [name for name, threads in worker_threads.items() if not threads]
    taken = host + sum(threads for threads in worker_threads.values() if threads)
    share = (min(physical_cores, usable_cores) - taken) // len(unset) if unset else 0
    share = max(1, min(MAX_DEFAULT_THREADS, share))
    workers = {name: threads or share for name, threads in worker_threads.items()}
    if not host_threads:
        left = min(physical_cores, usable_cores) - sum(workers.values())
        host = max(1, min(MAX_DEFAULT_THREADS, left))
    is_oversubscribed = host + sum(workers.values()) > usable_cores
    budget = SPIN_NS if spin_us is None else spin_us * 1000
    return ThreadPlan(host, workers, 0 if is_oversubscribed else budget, is_oversubscribed)


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
