"""What somebody who watches a running host sees of it: its counters by worker, made without asking
a worker. `dflash-moe top` gets a bounded part (the order `stats`); a server makes metrics of all.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dflash_moe.experts.auto import WorkerForecast
from dflash_moe.telemetry.memory import process_memory

if TYPE_CHECKING:
    from dflash_moe.holders.fleet import Fleet
    from dflash_moe.holders.holder import Holder, WorkerState

# The counters of a worker that are shown. Those of each layer are not: 94 layers of 64 workers
# would be some megabytes.
COUNTED = (
    "calls", "rows", "request_bytes", "reply_bytes", "floor_bytes", "wait_ns", "worker_compute_ns", "worker_queue_ns",
    "failovers", "hedges", "hedges_won",
)  # fmt: skip
# What of a snapshot answers the order `stats`, beside its engine. Workers that were removed may be
# any number, and so may classes of layers; neither is among it.
SENT = ("time_ns", "pid", "model", "mode", "memory_bytes", "workers")
# What an engine counts, without its histograms.
ENGINE_COUNTED = (
    "steps", "failed_steps", "prompt_tokens", "cached_tokens", "generated_tokens", "waiting", "running", "preemptions",
)  # fmt: skip
# A reason may quote 4 KiB of a worker's log; all of those would not fit an answer.
MAX_REASON = 200

EngineStats = Callable[[], Mapping[str, Any]]


def snapshot(
    model: str, mode: str, fleet: Fleet, *, states: Iterable[WorkerState], counted: Mapping[tuple[int, int], Mapping[str, int]],
    reports: Iterable[Mapping[str, Any]], forecasts: Sequence[WorkerForecast], engine: EngineStats | None,
) -> dict[str, Any]:  # fmt: skip
    """Returns plain values: the host's process, `workers`, one entry for each holder in `states`,
    and `others`, those whom the client knows beside them. They are being added, or were removed and
    keep what was counted. `engine` is what that counts, None where there is none. `counted` is what
    the client counts per (worker, layer), and `reports` how it sees each worker. Counters are
    cumulative and times in nanoseconds, so that rates are those between two snapshots; `time_ns` is
    CLOCK_MONOTONIC.

    `memory_bytes` is what a process has resident, and None for a worker that would have to be
    asked. `model_error` is the median deviation of the cost model's predictions, None before there
    are any, and `prediction_errors` has it by worker and class of layers.
    """
    by_class = {one.name: _prediction_errors(one) for one in forecasts}
    errors = {one.name: _model_error(one) for one in forecasts}
    sums = _sums(counted)
    rows = []
    for state in states:
        member = fleet.members.get(state.name)
        if member is None:  # it is gone by now
            continue
        rows.append(
            {
                **asdict(state),
                "transport": member.transport,
                "memory_bytes": _memory(member),
                "model_error": errors.get(state.name),
                **sums[member.client_index],
            }
        )
    # Everybody is listed after the counters were read and the rows made, so that whoever left or
    # joined meanwhile is among the others.
    shown, seen = {row["name"] for row in rows}, {report["name"]: report["state"] for report in reports}
    others = [
        {
            "name": name,
            "state": "gone" if name in fleet.former else seen.get(name),
            "reason": "",
            "deaths": member.life.num_deaths,
            "transport": member.transport,
            **sums[member.client_index],
        }
        for name, member in fleet.everybody().items()
        if name not in shown
    ]
    return {
        "time_ns": time.monotonic_ns(),
        "pid": os.getpid(),
        "model": model,
        "mode": mode,
        "memory_bytes": _resident(None),
        "workers": rows,
        "others": others,
        "prediction_errors": by_class,
        "engine": None if engine is None else engine(),
    }


def brief(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a snapshot that another process is sent (`dflash-moe top`). It is bounded
    for any number of layers and requests, as a line of control.MAX_LINE_BYTES must be.
    """
    workers = [{**row, "reason": row["reason"][:MAX_REASON]} for row in found["workers"]]
    return {**{key: found[key] for key in SENT}, "workers": workers, "engine": _engine(found["engine"])}


def _sums(counted: Mapping[tuple[int, int], Mapping[str, int]]) -> Mapping[int, Mapping[str, int]]:
    """Returns the counters of each worker over its layers; zeros for one that was not called."""
    sums: dict[int, dict[str, int]] = defaultdict(lambda: dict.fromkeys(COUNTED, 0))
    for (worker, _), counters in counted.items():
        own = sums[worker]
        for key in COUNTED:
            own[key] += counters[key]
    return sums


def _engine(stats: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if stats is None:
        return None
    blocks = stats["blocks"]
    return {**{key: stats[key] for key in ENGINE_COUNTED}, "blocks": {key: blocks[key] for key in ("total", "free", "cached")}}


def _model_error(forecast: WorkerForecast) -> float | None:
    found = [chunk.deviation for chunk in forecast.chunks if chunk.deviation is not None]
    return statistics.median(found) if found else None


def _prediction_errors(forecast: WorkerForecast) -> list[tuple[int, float]]:
    """Returns for each class of layers the median deviation of a worker's predictions: layers whose
    experts have one shape, activation and format are a class (experts/auto.py).
    """
    found: dict[int, list[float]] = defaultdict(list)
    for chunk in forecast.chunks:
        if chunk.deviation is not None:
            found[chunk.cost_class].append(chunk.deviation)
    return [(cost_class, statistics.median(errors)) for cost_class, errors in sorted(found.items())]


def _memory(member: Holder) -> int | None:
    session = member.session
    if session is None or session.started is None:  # the host's own process, or one elsewhere
        return None
    return _resident(session.pid)


def _resident(pid: int | None) -> int:
    memory = process_memory(pid)
    return memory.anonymous_bytes + memory.file_bytes + memory.shared_bytes
