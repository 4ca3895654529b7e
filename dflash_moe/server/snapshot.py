"""What an engine and its workers have counted, as the front makes metrics and a picture of it. All
of it is at the host already: no worker is asked, and no step pays for it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_moe.engine.llm import LLM

_ENGINE = (
    "steps", "failed_steps", "prompt_tokens", "cached_tokens", "recomputed_tokens", "generated_tokens", "drafted_tokens",
    "accepted_tokens", "plan_s", "forward_s", "sample_s", "commit_s", "deliver_s", "finished", "histograms", "waiting",
    "running", "preemptions", "blocks",
)  # fmt: skip
_WORKER = (
    "transport", "state", "calls", "rows", "request_bytes", "reply_bytes", "floor_bytes", "wait_ns", "worker_compute_ns",
    "worker_queue_ns", "failovers", "hedges", "hedges_won",
)  # fmt: skip
_AUDIT = ("audited_rows", "mismatches")


def snapshot(llm: LLM) -> dict[str, Any]:
    """Returns it in msgpack's types, all counters since the start: `engine` as `EngineStats` and
    `Engine.stats` have it, and `workers` by name, former ones too. Raises DflashError once the
    runtime was closed.
    """
    found = llm.stats()
    engine = {name: found["engine"][name] for name in _ENGINE}
    # Keys of a message are texts.
    engine["batch_sizes"] = list(found["engine"]["batch_sizes"].items())
    stands = {one.name: one for one in llm.runtime.workers()}
    workers = {}
    for name, counters in found["workers"].items():
        own = {key: counters[key] for key in _WORKER if key in counters}
        if name in stands:
            own |= {"state": stands[name].state, "reason": stands[name].reason, "deaths": stands[name].deaths}
        audited = found["audit"]["workers"].get(name)
        if audited is not None:
            own["audit"] = {key: audited[key] for key in _AUDIT}
        own["prediction_errors"] = _prediction_errors(found["auto"].get(name))
        workers[name] = own
    return {
        "engine": engine, "workers": workers, "mode": found["mode"], "mode_reason": found["mode_reason"],
        "fallback_calls": found["fallback"]["calls"], "unready": llm.unready_reason(),
    }  # fmt: skip


def _prediction_errors(forecast: Mapping[str, Any] | None) -> list[tuple[int, float]]:
    """Returns for each class of layers the median deviation of a worker's predictions: layers whose
    experts have one shape, activation and format are a class (experts/auto.py).
    """
    found: dict[int, list[float]] = defaultdict(list)
    for chunk in (forecast or {}).get("chunks", ()):
        if chunk["deviation"] is not None:
            found[chunk["cost_class"]].append(chunk["deviation"])
    return [(cost_class, statistics.median(errors)) for cost_class, errors in sorted(found.items())]
