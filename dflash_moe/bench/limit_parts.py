"""The parts of a step of `bench limits`: what each product and operator took, and the larger of two
bounds of it: reading its bytes at the read speed, and its multiply-adds at the peak of its class.

Bounds of products are of weights, keys and values alone, because rows may come from caches. What
has neither has no bound, so that its whole time is beside the products.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dflash_moe import _core
from dflash_moe.bench.experts import operation_peak
from dflash_moe.bench.read_speed import ReadSpeed

if TYPE_CHECKING:
    from dflash_moe.bench.token_reads import ExpertWork, Sides

OUTSIDE, EXPERT_CALL, AT_WORKERS = "outside", "expert call", "experts at workers"
PYTHON = "Python and torch"


@dataclass(slots=True)
class Work:
    """What threads of one side read and multiply; `threads` is None where these are not of this
    machine's processor.
    """

    threads: int | None
    num_bytes: float = 0
    # By numerics class.
    multiply_adds: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Part:
    """One row of a step: `calls` of an operator took `seconds`, of which jobs lost `lost_s` to
    forking and waiting. `works` were done side by side.
    """

    name: str
    calls: float = 0
    seconds: float = 0.0
    lost_s: float = 0.0
    works: list[Work] = field(default_factory=list)


@dataclass(slots=True)
class OperationPeak:
    """The multiply-adds a second of a numerics class on some threads, in every round so far: a
    `harness.Case`.
    """

    numerics: str
    threads: int
    per_s: list[float] = field(default_factory=list)
    rounds: int | None = None

    @property
    def label(self) -> str:
        """The name of the case in reports of progress."""
        return f"peak of {self.numerics}, {self.threads} threads"

    def measure(self, *, keep: bool) -> None:
        """Multiplies and adds from registers."""
        # A multiply-add counts as two operations there.
        found = [value / 2 for value in operation_peak(self.numerics, _core.best_isa(), self.threads)]
        if keep:
            self.per_s += found

    def row(self) -> dict[str, Any] | None:
        """Returns None, because the peak stands in the rows that it bounds."""
        return None


@dataclass(slots=True)
class Limits:
    """The read speeds of this run by threads, and the peaks by class and threads. They are made as
    they are asked for.
    """

    speeds: dict[int, ReadSpeed] = field(default_factory=dict)
    peaks: dict[tuple[str, int], OperationPeak] = field(default_factory=dict)

    def need(self, threads: int | None, numerics: Iterable[str]) -> None:
        """Has the limits of these threads measured, for these classes."""
        if threads is not None:
            self.speeds.setdefault(threads, ReadSpeed(threads))
            for name in numerics:
                self.peaks.setdefault((name, threads), OperationPeak(name, threads))

    def read_s(self, work: Work) -> float | None:
        """Returns the seconds that reading its bytes takes, None where that is not known."""
        if not work.num_bytes:
            return 0.0
        speed = None if work.threads is None else self.speeds.get(work.threads)
        return None if speed is None or speed.median is None else work.num_bytes / speed.median

    def multiply_s(self, work: Work) -> float | None:
        """Returns the seconds that its multiply-adds take, None where that is not known."""
        seconds = 0.0
        for numerics, count in work.multiply_adds.items():
            peak = None if work.threads is None else self.peaks.get((numerics, work.threads))
            if count and (peak is None or not peak.per_s):
                return None
            seconds += count / statistics.median(peak.per_s) if count and peak is not None else 0.0
        return seconds


def parts_of(times: Iterable[Any], names: Mapping[int, str], threads: int | None, steps: int) -> list[Part]:
    """Returns what the core's clock found (`_core.OperatorTimes`) as parts of one of `steps` steps.
    `names` are those of packed matrices by address; matrices of one name are one part.
    """
    found: dict[str, Part] = {}
    for one in times:
        name = names.get(one.subject, one.operator)
        part = found.setdefault(name, Part(name, works=[Work(threads)]))
        part.calls += one.calls / steps
        part.seconds += one.own_ns * 1e-9 / steps
        part.lost_s += one.lost_ns * 1e-9 / steps
        part.works[0].num_bytes += one.bytes / steps
        if one.multiply_adds:
            counts = part.works[0].multiply_adds
            counts[one.numerics] = counts.get(one.numerics, 0) + one.multiply_adds / steps
    return list(found.values())


def worker_part(
    traces: Sequence[Mapping[str, int]],
    sides_of_workers: Sequence[str],
    work: ExpertWork,
    sides: Sides,
    host: str,
    steps: int,
) -> Part | None:
    """Returns the experts at workers as a part of one of `steps` steps, None without any. The time
    of a call is that of the worker that computed longest, from the traces of slices;
    `sides_of_workers` are in the order of their numbers. `work` is of all steps.
    """
    calls: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for trace in traces:
        side = sides_of_workers[trace["worker"]]
        if side != host:
            calls[trace["call_id"]][side] += trace["worker_finished_ns"] - trace["worker_started_ns"]
    if not calls:
        return None
    part = Part(AT_WORKERS, len(calls) / steps, sum(max(one.values()) for one in calls.values()) * 1e-9 / steps)
    for side in sorted({side for one in calls.values() for side in one}):
        counts = {numerics: count / steps for (of, numerics), count in work.multiply_adds.items() if of == side}
        part.works.append(Work(sides.threads[side], work.num_bytes[side] / steps, counts))
    return part


def split_call(parts: list[Part], at_workers: Part) -> list[Part]:
    """Takes the workers' time off the part of the call, which waits for them. What is left is its
    way: routing, messages, wake-ups and sums. Where the host computes meanwhile it waits less.
    """
    for part in parts:
        if part.name == EXPERT_CALL:
            at_workers.seconds = min(at_workers.seconds, part.seconds)
            part.seconds -= at_workers.seconds
    return [*parts, at_workers]


def step_fields(parts: Sequence[Part], whole_s: float, limits: Limits) -> dict[str, Any]:
    """Returns the fields of a step of `whole_s` seconds: `parts`, the slowest first, and of the
    whole `fork_wait_s`, which is in the parts' times, `python_s`, `rest_s`, which is in no part,
    `bound_s`, the larger bounds of all parts added, and `share`, that divided by the time. Bounds
    are None where a limit is not known.
    """
    rows = [_row(part, limits) for part in sorted(parts, key=lambda part: -part.seconds)]
    bounds = [row["bound_s"] for row in rows]
    bound = None if None in bounds else sum(bounds)
    return {
        "parts": rows,
        "fork_wait_s": sum(part.lost_s for part in parts),
        "python_s": sum(part.seconds for part in parts if part.name == OUTSIDE),
        "rest_s": whole_s - sum(part.seconds for part in parts),
        "num_bytes": sum(row["num_bytes"] for row in rows),
        "multiply_adds": sum(row["multiply_adds"] for row in rows),
        "bound_s": bound,
        "share": None if bound is None else bound / whole_s,
    }


def _row(part: Part, limits: Limits) -> dict[str, Any]:
    reads = [limits.read_s(work) for work in part.works]
    multiplies = [limits.multiply_s(work) for work in part.works]
    read = None if None in reads else max((one for one in reads if one is not None), default=0.0)
    multiply = None if None in multiplies else max((one for one in multiplies if one is not None), default=0.0)
    bound = None if read is None or multiply is None else max(read, multiply)
    classes = sorted({name for work in part.works for name in work.multiply_adds})
    return {
        "part": PYTHON if part.name == OUTSIDE else part.name,
        "calls": part.calls,
        "seconds": part.seconds,
        "fork_wait_s": part.lost_s,
        "num_bytes": sum(work.num_bytes for work in part.works),
        "multiply_adds": sum(count for work in part.works for count in work.multiply_adds.values()),
        "numerics": ", ".join(classes),
        "read_s": read,
        "multiply_s": multiply,
        "bound_s": bound,
        "bound_by": None if not bound else "bytes" if bound == read else "instructions",
        "share": bound / part.seconds if bound and part.seconds else None,
    }
