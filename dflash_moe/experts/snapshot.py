"""What somebody who watches a running host sees of it: a bounded part of its counters, made without
asking a worker (`dflash-moe top`, the order `stats`).

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dflash_moe.experts.auto import WorkerForecast
from dflash_moe.telemetry.memory import process_memory

if TYPE_CHECKING:
    from dflash_moe.holders.fleet import Fleet
    from dflash_moe.holders.holder import Holder, WorkerState

# The counters of a worker that travel. Those of each layer stay here: 94 layers of 64 workers would
# be some megabytes.
COUNTED = (
    "calls", "rows", "request_bytes", "reply_bytes", "wait_ns", "worker_compute_ns", "worker_queue_ns", "failovers", "hedges",
)  # fmt: skip
# What an engine counts, without its histograms.
ENGINE_COUNTED = (
    "steps", "failed_steps", "prompt_tokens", "cached_tokens", "generated_tokens", "waiting", "running", "preemptions",
)  # fmt: skip
# A reason may quote 4 KiB of a worker's log; all of those would not fit an answer.
MAX_REASON = 200

EngineStats = Callable[[], Mapping[str, Any]]


def snapshot(
    model: str, mode: str, fleet: Fleet, *, states: Iterable[WorkerState], counted: Mapping[tuple[int, int], Mapping[str, int]],
    forecasts: Iterable[WorkerForecast], engine: EngineStats | None,
) -> dict[str, Any]:  # fmt: skip
    """Returns plain values: the host's process, `workers`, one entry for each holder in `states`,
    and `engine`, None where there is none. `counted` is what the client counts per (worker, layer).
    Counters are cumulative and times in nanoseconds, so that rates are those between two snapshots;
    `time_ns` is CLOCK_MONOTONIC.

    `memory_bytes` is what a process has resident, and None for a worker that would have to be
    asked. `model_error` is the median deviation of the cost model's predictions, None before there
    are any.
    """
    errors = {one.name: _model_error(one) for one in forecasts}
    sums: dict[int, dict[str, int]] = {}
    for (worker, _), counters in counted.items():
        own = sums.setdefault(worker, dict.fromkeys(COUNTED, 0))
        for key in COUNTED:
            own[key] += counters[key]
    rows = []
    for state in states:
        member = fleet.members.get(state.name)
        if member is None:  # it is gone by now
            continue
        rows.append(
            {
                **asdict(state),
                "reason": state.reason[:MAX_REASON],
                "transport": member.transport,
                "memory_bytes": _memory(member),
                "model_error": errors.get(state.name),
                **sums.get(member.client_index, dict.fromkeys(COUNTED, 0)),
            }
        )
    return {
        "time_ns": time.monotonic_ns(),
        "pid": os.getpid(),
        "model": model,
        "mode": mode,
        "memory_bytes": _resident(None),
        "workers": rows,
        "engine": None if engine is None else _engine(engine()),
    }


def _engine(stats: Mapping[str, Any]) -> dict[str, Any]:
    blocks = stats["blocks"]
    return {**{key: stats[key] for key in ENGINE_COUNTED}, "blocks": {key: blocks[key] for key in ("total", "free", "cached")}}


def _model_error(forecast: WorkerForecast) -> float | None:
    found = [chunk.deviation for chunk in forecast.chunks if chunk.deviation is not None]
    return statistics.median(found) if found else None


def _memory(member: Holder) -> int | None:
    session = member.session
    if session is None or session.started is None:  # the host's own process, or one elsewhere
        return None
    return _resident(session.pid)


def _resident(pid: int | None) -> int:
    memory = process_memory(pid)
    return memory.anonymous_bytes + memory.file_bytes + memory.shared_bytes
