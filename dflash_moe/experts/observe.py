"""What a runtime can tell about itself: the counters of calls, the workers' own counters, and the
processes with their memory.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_moe import _core
from dflash_moe.errors import DflashError, WorkerError, WorkerLost
from dflash_moe.holders.fleet import EXIT_S, Fleet
from dflash_moe.holders.holder import Holder
from dflash_moe.holders.launcher import StartedWorker
from dflash_moe.placement.held_shards import HeldShard
from dflash_moe.telemetry.counters import add_counters, zero_counters
from dflash_moe.telemetry.memory import process_memory

if TYPE_CHECKING:
    from dflash_moe.holders.events import HolderEvents
    from dflash_moe.holders.host_fallback import HostFallback
    from dflash_moe.holders.worker_keeper import WorkerKeeper

# A worker is given this time to send its counters. Its control thread answers at once, also while
# the worker computes.
STATS_S = 5.0


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """Where a holder of experts runs and what it has resident. The bytes of memory are 0 where its
    process is gone.
    """

    name: str
    pid: int
    transport: str
    # This is the count of the layer in which it holds most experts.
    experts_per_layer: int
    anonymous_bytes: int
    file_bytes: int
    weight_bytes: int


class LossExplainer:
    """Completes errors of the client with what else the runtime knows. Any thread may call."""

    def __init__(
        self, fleet: Fleet, workers: WorkerKeeper, fallback: HostFallback, events: HolderEvents, is_over: threading.Event
    ) -> None:
        """`is_over` is set once the runtime was closed."""
        self._fleet, self._workers, self._fallback, self._events = fleet, workers, fallback, events
        self._is_over = is_over

    def explained(self, error: WorkerError) -> DflashError:
        """Returns an error of the client with what else is known. Where the runtime was closed
        meanwhile, the error says so instead, because nothing is wrong with the worker.
        """
        if self._is_over.is_set():
            text = f"the runtime was closed before this call was done; take results before close() ({error})"
            return DflashError(text, **{**error.fields(), "code": "closed"})
        if isinstance(error, WorkerLost):
            self._events.bell.ring()
        return explain_loss(error, self._fleet, self.remedy_of)

    def remedy_of(self, worker: str) -> str:
        """Returns a clause that says what is done about a worker that was lost."""
        return f"{self._workers.remedy_of(worker)}{self._fallback.why_not(worker)}"


def explain_loss(error: WorkerError, fleet: Fleet, remedy_of: Callable[[str], str]) -> WorkerError:
    """Returns the error as it is, or for a WorkerLost a new one with the same fields that also says
    what is done about it (`remedy_of`, by the worker's name), and of a worker that the host started
    how its process ended and what it logged last.
    """
    member = fleet.members.get(error.worker or "")
    if not isinstance(error, WorkerLost) or member is None or member.session is None:
        return error
    text = f"{error}; {remedy_of(member.name)}"
    if member.session.started is not None:
        text = f"{text}; {_exit_of(member, member.session.started)}"
    return WorkerLost(text, **error.fields())


def _exit_of(member: Holder, started: StartedWorker) -> str:
    """Says how the process of a lost worker ended, also where another has taken its place by
    now.
    """
    text = started.describe_exit(seconds=0.0 if member.last_exit else EXIT_S)
    return text if started.process.returncode is not None or not member.last_exit else member.last_exit


def count_calls(client: _core.Client, fleet: Fleet, layers: Sequence[int]) -> dict[str, Any]:
    """Sums the client's counters per (worker, layer) into `totals`, `workers` (by name, with each
    worker's state and layers, also those that were removed) and `layers` (by index).
    """
    # The counters are read before the fleet: whoever has been called by then belongs to it, while a
    # worker that joins in between may be called before a list made earlier could name it.
    counted = client.counters()
    everybody = fleet.everybody()
    members = {member.client_index: member for member in everybody.values()}
    reports = {report["name"]: report for report in client.workers()}
    totals = zero_counters()
    by_layer = {layer: zero_counters() for layer in layers}
    workers: dict[str, dict[str, Any]] = {
        name: {**zero_counters(), "transport": member.transport, "layers": {}, **reports.get(name, {})}
        for name, member in everybody.items()
    }
    for name in fleet.former:
        workers[name]["state"] = "gone"
    for (worker, layer), counters in counted.items():
        own = workers[members[worker].name]
        own["layers"][layer] = zero_counters()
        for total in (totals, own, own["layers"][layer], by_layer[layer]):
            add_counters(total, counters)
    return {"totals": totals, "workers": workers, "layers": by_layer}


def ask_workers(fleet: Fleet) -> dict[str, dict[str, int]]:
    """Returns each worker's own counters by its name. Raises WorkerLost and WorkerTimeout, and
    DflashError in a forked child.
    """
    fleet.owner.require_here()
    answers: dict[str, dict[str, int]] = {}
    for member in fleet.members.values():
        if member.local is not None:
            answers[member.name] = member.local.counters()
        elif member.session is not None:
            answers[member.name] = member.session.ask_stats(timeout_s=STATS_S)
    return answers


def list_processes(fleet: Fleet, held: Mapping[str, Sequence[HeldShard]]) -> list[WorkerProcess]:
    """Returns one entry for every holder. The memory of processes that the host started is read
    from /proc, and the other workers are asked for theirs. Raises WorkerLost and WorkerTimeout, and
    DflashError in a forked child.
    """
    fleet.owner.require_here()
    found = []
    for member in fleet.members.values():
        counts: dict[int, int] = {}
        for shard in held.get(member.name, ()):  # a stand-in has none of its own
            counts[shard.layer.index] = counts.get(shard.layer.index, 0) + len(shard.experts)
        pid, weight_bytes, memory = _resident(member)
        most = max(counts.values(), default=0)
        found.append(WorkerProcess(member.name, pid, member.transport, most, *memory, weight_bytes))
    return found


def _resident(member: Holder) -> tuple[int, int, tuple[int, int]]:
    """Returns the pid of a member's process, the bytes of its weights, and its anonymous and
    file-backed resident bytes.
    """
    session = member.session
    if session is None:
        memory = process_memory()
        weight_bytes = member.local.resident_bytes if member.local is not None else 0
        return os.getpid(), weight_bytes, (memory.anonymous_bytes, memory.file_bytes)
    if session.started is not None:
        memory = process_memory(session.pid)
        return session.pid, session.resident_bytes, (memory.anonymous_bytes, memory.file_bytes)
    answer = session.ask_stats(timeout_s=STATS_S)
    return session.pid, session.resident_bytes, (answer.get("anonymous_bytes", 0), answer.get("file_bytes", 0))
