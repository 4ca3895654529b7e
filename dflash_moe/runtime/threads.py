"""Shares the machine's cores between the host and its local workers, and decides whether anyone may
spin.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dflash_moe.config import Settings
from dflash_moe.errors import ConfigError
from dflash_moe.protocol.devices import COMPUTED_BY_PROCESSOR, PROCESSOR
from dflash_moe.runtime.pinning import plan_cpus
from dflash_moe.telemetry.cores import machine_cores
from dflash_moe.telemetry.machine import physical_cores, usable_cores
from dflash_moe.topology import Topology, WorkerSpec

MAX_DEFAULT_THREADS = 8
SPIN_NS = 50_000  # longer than a call's own overhead (25 us), shorter than a scheduling quantum


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """Compute threads of the host's own experts and of each local worker, and the spin budget of
    every poller.
    """

    host: int
    workers: Mapping[str, int]
    spin_ns: int
    is_oversubscribed: bool
    # of each pinned worker's threads, in order
    cpus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def thread_plan(topology: Topology, settings: Settings) -> ThreadPlan:
    """The threads that a runtime of this topology uses on this machine; a flag or variable wins
    over the topology.

    Errors: ConfigError for a worker with more threads than `cpus`.
    """
    workers = [worker for worker in topology.local_workers() if worker.backend in COMPUTED_BY_PROCESSOR]
    plan = plan_threads(
        host_threads=topology.host.threads,
        worker_threads={worker.name: _asked_threads(worker, settings) for worker in workers},
        usable_cores=usable_cores(),
        physical_cores=physical_cores(),
        spin_us=settings.spin_us,
    )
    for worker in workers:
        named = _named_cpus(worker)
        if named and plan.workers[worker.name] > len(named):
            raise ConfigError(
                f"{topology.source}:{worker.line or 1}: worker {worker.name} has {plan.workers[worker.name]} threads for "
                f"{len(named)} cpus; name one CPU per thread, or write cpus: auto"
            )
    cores = machine_cores()
    # Where a quota is what binds, a pinned thread could not leave a core that somebody else uses.
    may_choose = not plan.is_oversubscribed and usable_cores() == len(cores)
    return replace(plan, cpus=plan_cpus(topology, plan.workers, host_threads=plan.host, cores=cores, may_choose=may_choose))


def _asked_threads(worker: WorkerSpec, settings: Settings) -> int:
    if worker.backend != PROCESSOR:
        return 1  # a simulated device runs its threads one after the other
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
    """Explicit numbers are kept; the others get an even share of what is left, 1..8 each.

    Spinning is allowed only where every poller and every compute thread has a core of its own: with
    too few cores it costs up to 100 times what it saves. A worker's serving thread is one of its
    compute threads.
    """
    host = max(1, host_threads or 1)
    unset = [name for name, threads in worker_threads.items() if not threads]
    taken = host + sum(threads for threads in worker_threads.values() if threads)
    share = (min(physical_cores, usable_cores) - taken) // len(unset) if unset else 0
    share = max(1, min(MAX_DEFAULT_THREADS, share))
    workers = {name: threads or share for name, threads in worker_threads.items()}
    is_oversubscribed = host + sum(workers.values()) > usable_cores
    budget = SPIN_NS if spin_us is None else spin_us * 1000
    return ThreadPlan(host, workers, 0 if is_oversubscribed else budget, is_oversubscribed)
