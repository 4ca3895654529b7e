"""What an engine counts of its steps and requests: sums and histograms since it was opened, and
percentiles of the latest requests.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from dflash_moe.engine.request import Request

# Times of so many of the latest requests are kept.
_KEPT = 1024
# The upper bounds of the buckets of all histograms, in seconds; what is longer has another one. A
# step of a small model takes a millisecond, and a request of a large one may take an hour.
BOUNDS_S = tuple(digit * 10.0**power for power in range(-3, 4) for digit in (1, 2, 5))
# From submission to the first step and to the first token, between later tokens, from submission to
# the end, and a whole step.
HISTOGRAMS = ("queue_s", "ttft_s", "itl_s", "request_s", "step_s")


class Histogram:
    """How many durations fell into which bucket, and their sum. It is never reset, so that those
    who read it twice see what came between.
    """

    __slots__ = ("_counts", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Counts a duration, `count` times."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += count
        self._sum += seconds * count

    def report(self) -> dict[str, Any]:
        """Returns `counts`, how many took at most each of BOUNDS_S, and the last of all, and their
        `sum` in seconds.
        """
        return {"counts": list(accumulate(self._counts)), "sum": self._sum}


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When a step that was committed began, had its plan, was computed, was sampled and ended, in
    seconds of time.perf_counter; and how many rows and sequences it had.
    """

    began: float
    planned: float
    computed: float
    sampled: float
    ended: float
    num_rows: int
    num_sequences: int


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
    # The latest steps, where somebody wants them, who bounds their number.
    recorded: deque[StepTimes] | None = None
    histograms: dict[str, Histogram] = field(default_factory=lambda: {name: Histogram() for name in HISTOGRAMS})

    def began(self, request: Request, now: float) -> None:
        """Counts a request that is computed for the first time, and notes when."""
        request.times.scheduled = now
        self.queue_s.append(now - request.times.submitted)
        self.histograms["queue_s"].add(self.queue_s[-1])

    def advanced(self, request: Request, num_tokens: int, now: float) -> None:
        """Counts tokens that a request got from a step committed at `now`, and notes when."""
        self.generated_tokens += num_tokens
        times, num_later = request.times, num_tokens
        if not times.scheduled:
            self.began(request, now)
        if not times.first_token:
            times.first_token = times.latest_token = now
            self.ttft_s.append(now - times.submitted)
            self.histograms["ttft_s"].add(self.ttft_s[-1])
            num_later -= 1
        if num_later:
            # Tokens of one step share the time since the one before.
            self.histograms["itl_s"].add((now - times.latest_token) / num_tokens, num_later)
        times.latest_token = now

    def ended(self, request: Request, reason: str, now: float) -> None:
        """Counts a request that has ended."""
        self.finished[reason] += 1
        times = request.times
        self.histograms["request_s"].add(now - times.submitted)
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
        histograms = {name: one.report() for name, one in self.histograms.items()}
        found["histograms"] = {"bounds_s": list(BOUNDS_S), **histograms}
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
