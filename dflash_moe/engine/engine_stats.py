"""What an engine counts of its steps and requests.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from dflash_moe.engine.request import Request

# Times of so many of the latest requests are kept.
_KEPT = 1024


@dataclass(slots=True)
class EngineStats:
    """Counters of the engine thread; others read them. Times are in seconds."""

    steps: int = 0
    failed_steps: int = 0
    # The number of sequences of a step, and how often it was so.
    batch_sizes: Counter[int] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    # Of all steps together: what the engine itself takes, and the forward passes and sampling.
    plan_s: float = 0.0
    commit_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    # Handing tokens to their callers.
    deliver_s: float = 0.0
    queue_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    ttft_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    tpot_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def ended(self, request: Request, reason: str) -> None:
        """Counts a request that has ended."""
        self.finished[reason] += 1
        times = request.times
        if times.scheduled:
            self.queue_s.append(times.scheduled - times.submitted)
        if times.first_token:
            self.ttft_s.append(times.first_token - times.submitted)
        if request.num_generated > 1:
            self.tpot_s.append((times.latest_token - times.first_token) / (request.num_generated - 1))

    def report(self) -> dict[str, Any]:
        """Returns all of it as plain values."""
        found: dict[str, Any] = {
            name: value
            for name in self.__dataclass_fields__
            if isinstance(value := getattr(self, name), int | float) and not isinstance(value, bool)
        }
        found["batch_sizes"] = dict(sorted(self.batch_sizes.copy().items()))
        found["finished"] = dict(self.finished.copy())
        for name in ("queue_s", "ttft_s", "tpot_s"):
            found[name] = _percentiles(list(getattr(self, name)))
        return found


def _percentiles(samples: list[float]) -> dict[str, float] | None:
    if not samples:
        return None
    ordered = sorted(samples)
    last = len(ordered) - 1
    return {
        "p50": statistics.median(ordered),
        "p95": ordered[round(0.95 * last)],
        "p99": ordered[round(0.99 * last)],
        "mean": statistics.fmean(ordered),
    }
