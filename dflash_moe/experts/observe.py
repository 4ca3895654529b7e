"""What a runtime tells of itself: the counters of calls, the workers' own counters, the processes
with their memory, what its weights add up to, and what is done about a loss.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_moe import _core
from dflash_moe.errors import DflashError, WorkerError, WorkerLost
from dflash_moe.experts.auto import WorkerForecast, mode_reason, worker_forecasts
from dflash_moe.experts.readiness import unready_reason
from dflash_moe.experts.snapshot import EngineStats, snapshot
from dflash_moe.holders.audit.contents import ContentsReport, compare_with_own_copy, held_checksums
from dflash_moe.holders.fleet import EXIT_S, Fleet
from dflash_moe.holders.holder import Holder
from dflash_moe.holders.launcher import StartedWorker
from dflash_moe.placement.numerics import describe_numerics
from dflash_moe.telemetry.counters import add_counters, zero_counters
from dflash_moe.telemetry.memory import process_memory

if TYPE_CHECKING:
    from dflash_moe.experts.expert_calls import ExpertCalls
    from dflash_moe.holders.events import HolderEvents
    from dflash_moe.holders.holder_lists import HolderLists
    from dflash_moe.holders.host_fallback import HostFallback
    from dflash_moe.holders.placed_experts import PlacedExperts
    from dflash_moe.holders.row_audit import Audit
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


class RuntimeReport:
    """What one runtime says of itself. Any thread may call. What `ExpertRuntime` says of its
    methods holds for those of the same names here.
    """

    def __init__(
        self, client: _core.Client, placed: PlacedExperts, calls: ExpertCalls, *, workers: WorkerKeeper, fallback: HostFallback,
        audit: Audit, holders: HolderLists, events: HolderEvents, is_over: threading.Event,
    ) -> None:  # fmt: skip
        """`is_over` is set once the runtime was closed."""
        self._client, self._placed, self._fleet, self._calls = client, placed, placed.fleet, calls
        self._workers, self._fallback, self._audit, self._holders = workers, fallback, audit, holders
        self._events, self._is_over = events, is_over
        self._last: dict[str, Any] = {}
        # What asks the engine over this runtime, where there is one.
        self._engine: weakref.WeakMethod[EngineStats] | None = None

    def explained(self, error: WorkerError) -> DflashError:
        """Returns an error of the client with what else is known: of a WorkerLost what is done
        about it, and of a worker that the host started how its process ended and what it logged
        last. Where the runtime was closed meanwhile, the error says so instead, because nothing is
        wrong with the worker.
        """
        if self._is_over.is_set():
            text = f"the runtime was closed before this call was done; take results before close() ({error})"
            return DflashError(text, **{**error.fields(), "code": "closed"})
        if not isinstance(error, WorkerLost):
            return error
        self._events.bell.ring()
        member = self._fleet.members.get(error.worker or "")
        if member is None or member.session is None:
            return error
        text = f"{error}; {self._remedy_of(member.name)}"
        if member.session.started is not None:
            text = f"{text}; {_exit_of(member, member.session.started)}"
        return WorkerLost(text, **error.fields())

    def _remedy_of(self, worker: str) -> str:
        """Returns a clause that says what is done about a worker that was lost."""
        return f"{self._workers.remedy_of(worker)}{self._fallback.why_not(worker)}"

    def stats(self) -> dict[str, Any]:
        """As `ExpertRuntime.stats`."""
        if self._is_over.is_set():
            return self._last
        placed, slices = self._placed, self._placed.slices
        counted = count_calls(self._client, self._fleet, [layer.index for layer in placed.spec.layers])
        forecasts = worker_forecasts(self._client.forecasts())
        return {
            **counted["totals"],
            **counted,
            "fallback": self._fallback.describe(counted["workers"]),
            "mode": slices.mode,
            "mode_asked": placed.settings.mode,
            "mode_reason": self._mode_reason(forecasts),
            "auto": {forecast.name: asdict(forecast) for forecast in forecasts},
            "slice_tokens": slices.slice_tokens,
            "window": slices.window,
            "wire_dtypes": placed.wire_dtypes,
            "numerics": describe_numerics(placed.spec.layers, placed.placement, placed.settings.numerics),
            "audit": self._audit.stats(),
            "fabric_strangers": _core.fabric_strangers(),
            "transports": {member.name: member.transport for member in self._fleet.members.values()},
            **self._calls.step_counts(),
        }

    def note_engine(self, stats: EngineStats) -> None:
        """As `ExpertRuntime.note_engine`."""
        self._engine = weakref.WeakMethod(stats)

    def snapshot(self) -> dict[str, Any]:
        """As `ExpertRuntime.snapshot`."""
        placed, engine = self._placed, None if self._engine is None else self._engine()
        forecasts = worker_forecasts(self._client.forecasts())
        found = snapshot(
            placed.spec.path, placed.slices.mode, self._fleet, states=self._workers.states(), counted=self._client.counters(),
            reports=self._client.workers(), forecasts=forecasts, engine=engine,
        )  # fmt: skip
        counted = {row["name"]: row for row in (*found["workers"], *found["others"])}
        return {
            **found,
            "mode_reason": self._mode_reason(forecasts),
            "fallback_calls": self._fallback.describe(counted)["calls"],
            "audit": self._audit.stats()["workers"],
        }

    def _mode_reason(self, forecasts: Sequence[WorkerForecast]) -> str:
        return mode_reason(forecasts) if self._placed.slices.is_measured else "as asked"

    def keep_last(self) -> None:
        """Takes the values that `stats` returns after the end. Raises DflashError in a forked
        child.
        """
        self._last = self.stats()

    def worker_stats(self) -> dict[str, dict[str, int]]:
        """As `ExpertRuntime.worker_stats`."""
        self._fleet.owner.require_here()
        answers: dict[str, dict[str, int]] = {}
        for member in self._fleet.members.values():
            if member.local is not None:
                answers[member.name] = member.local.counters()
            elif member.session is not None:
                answers[member.name] = member.session.ask_stats(timeout_s=STATS_S)
        return answers

    def worker_processes(self) -> list[WorkerProcess]:
        """As `ExpertRuntime.worker_processes`. The memory of processes that the host started is
        read from /proc, and the other workers are asked for theirs.
        """
        self._fleet.owner.require_here()
        found = []
        for member in self._fleet.members.values():
            # A stand-in has no shards of its own.
            counts = Counter(shard.layer.index for shard in self._placed.held.get(member.name, ()) for _ in shard.experts)
            pid, weight_bytes, memory = _resident(member)
            most = max(counts.values(), default=0)
            found.append(WorkerProcess(member.name, pid, member.transport, most, *memory, weight_bytes))
        return found

    def unready_reason(self) -> str:
        """As `ExpertRuntime.unready_reason`."""
        names = {layer.index: layer.name for layer in self._placed.spec.layers}
        reports = self._client.workers()
        return unready_reason(self._holders.everybody(), reports, layer_names=names, remedy_of=self._remedy_of)

    def check_weights(self, report: ContentsReport) -> int:
        """As `ExpertRuntime.check_weights`."""
        placed, ask = self._placed, self._fleet.shards.ask_checksum
        self._fleet.owner.require_here()
        limit_s = placed.settings.start_timeout_s
        return compare_with_own_copy(ask, placed.held, Path(placed.spec.path), timeout_s=limit_s, report=report)

    def content_checksums(self) -> tuple[tuple[int, ...], ...]:
        """As `ExpertRuntime.content_checksums`."""
        placed, ask = self._placed, self._fleet.shards.ask_checksum
        self._fleet.owner.require_here()
        return held_checksums(ask, placed.held, placed.spec.layers, timeout_s=placed.settings.start_timeout_s)


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
