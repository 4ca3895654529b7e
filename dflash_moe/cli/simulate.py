"""`dflash-moe simulate`: the real client and the real worker loop in virtual time. What breaks is
drawn from a seed (docs/reliability.md).

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_moe import _core
from dflash_moe.bench.results import BenchResult
from dflash_moe.cli import options
from dflash_moe.errors import ConfigError
from dflash_moe.holders.membership import Event, Happening, Life, RestartPolicy

if TYPE_CHECKING:
    from dflash_moe._simulation import Report

_DEFAULT_SEEDS = 100
_PROGRESS_S = 5.0
_SHOWN_VIOLATIONS = 5


def simulate(
    seeds: Annotated[
        int | None, typer.Option(min=1, help=f"How many seeds to run [default: {_DEFAULT_SEEDS}].", show_default=False)
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, max=options.MAX_SEED, help="Replay this seed: its options and last 200 events.", show_default=False
        ),
    ] = None,
    hours: Annotated[
        float | None, typer.Option(min=0.0, help="Run seeds until so much virtual time has passed.", show_default=False)
    ] = None,
    first: Annotated[int, typer.Option(min=0, max=options.MAX_SEED, help="The first seed of several.")] = 1,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=86_400.0, help="Virtual seconds of a seed in which things break.")
    ] = 60.0,
    json_out: Annotated[Path | None, options.json_option("The summary")] = None,
) -> None:
    """Look for wrong numbers, hangs and failed calls in virtual time.

    Each seed draws a host or two that share their workers, one to four workers and what breaks:
    processes die, freeze and come back, networks are cut, messages are damaged. The client, the
    worker's loop and what decides about lost workers are the product's own. Exit code 0 where every
    rule was kept, 1 where one was broken; the seed then replays it.
    """
    if seed is not None:
        if seeds is not None or hours is not None:
            raise ConfigError("--seed replays one seed; leave out --seeds and --hours")
        summary = _replay(seed, seconds)
    else:
        if seeds is not None and hours is not None:
            raise ConfigError("--seeds and --hours both say how long to run; give one of them")
        summary = _run_many(first, _DEFAULT_SEEDS if seeds is None and hours is None else seeds, hours, seconds)
    if json_out is not None:
        options.write_json(json_out, summary.as_result().as_json())
    if summary.failing:
        raise typer.Exit(1)


@dataclass
class Summary:
    """What all seeds of a run did together."""

    first_seed: int
    seconds: float
    num_seeds: int = 0
    virtual_s: float = 0.0
    virtual_s_of_two: float = 0.0  # of the seeds with two hosts
    num_batches_of_two: int = 0  # that the workers of those computed
    num_shared_batches: int = 0  # ... which had rows of both
    cpu_s: float = 0.0
    num_calls: int = 0
    num_succeeded: int = 0
    num_abandoned: int = 0
    num_events: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    event_hash: int = 0
    # By seed: what went wrong.
    failing: dict[int, list[str]] = field(default_factory=dict)

    def add(self, seed: int, report: Report, cpu_s: float) -> None:
        """Adds what one seed did."""
        self.num_seeds += 1
        self.virtual_s += report.virtual_s
        if report.num_hosts > 1:
            self.virtual_s_of_two += report.virtual_s
            self.num_batches_of_two += report.num_batches
            self.num_shared_batches += report.num_shared_batches
        self.cpu_s += cpu_s
        self.num_calls += report.num_calls
        self.num_succeeded += report.num_succeeded
        self.num_abandoned += report.num_abandoned
        self.num_events += report.num_events
        names = {code: name for name, (code, _) in _core.error_codes().items()}
        self.failed.update({names[code]: count for code, count in report.failed.items()})
        self.faults.update(report.faults)
        # The order of seeds counts, so that two runs are compared by one number.
        self.event_hash = ((self.event_hash ^ report.event_hash) * 0x100000001B3) % (1 << 64)
        if report.violations:
            self.failing[seed] = report.violations

    def as_result(self) -> BenchResult:
        """Returns the summary as the other results of this machine and tree are written."""
        params = {"first_seed": self.first_seed, "seeds": self.num_seeds, "seconds_each": self.seconds}
        return BenchResult("simulation", params, rows=[{"name": "all seeds", **self.to_json()}], complete=True)

    def to_json(self) -> dict[str, Any]:
        """Returns the summary with figures per minute of processor time, as plain values."""
        minutes = max(self.cpu_s / 60, 1e-9)
        num_faults = sum(self.faults.values())
        return {
            "seeds": self.num_seeds,
            "virtual_hours": self.virtual_s / 3600,
            "two_hosts": {
                "virtual_hours": self.virtual_s_of_two / 3600,
                "batches": self.num_batches_of_two,
                "shared_batches": self.num_shared_batches,
            },
            "cpu_s": self.cpu_s,
            "calls": self.num_calls,
            "succeeded": self.num_succeeded,
            "abandoned": self.num_abandoned,
            "failed": dict(sorted(self.failed.items())),
            "faults": dict(sorted(self.faults.items())),
            "events": self.num_events,
            "event_hash": f"{self.event_hash:016x}",
            "per_cpu_minute": {
                "virtual_hours": self.virtual_s / 3600 / minutes,
                "calls": self.num_calls / minutes,
                "faults": num_faults / minutes,
            },
            "failing": {str(seed): violations for seed, violations in self.failing.items()},
        }


def _simulate_one(seed: int, seconds: float) -> tuple[Report, float]:
    """Returns what a seed did, and the time of a processor that it took."""
    from dflash_moe import _simulation

    began = time.thread_time()
    report = _simulation.simulate(seed, seconds, SimulatedMembers)
    return report, time.thread_time() - began


def _simulate_all(seeds: Iterable[int], seconds: float) -> Iterator[tuple[int, Report, float]]:
    """Simulates on all processors, and yields in the order of the seeds."""
    num_threads = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(num_threads) as pool:
        pending: deque[tuple[int, Future[tuple[Report, float]]]] = deque()
        try:
            for seed in seeds:
                pending.append((seed, pool.submit(_simulate_one, seed, seconds)))
                if len(pending) > num_threads:
                    first, done = pending.popleft()
                    yield first, *done.result()
            while pending:
                first, done = pending.popleft()
                yield first, *done.result()
        finally:
            for _, unused in pending:
                unused.cancel()


def _replay(seed: int, seconds: float) -> Summary:
    summary = Summary(first_seed=seed, seconds=seconds)
    report, cpu_s = _simulate_one(seed, seconds)
    summary.add(seed, report, cpu_s)
    typer.echo(f"seed {seed}, {seconds:g} s in which things break")
    typer.echo("\n".join(f"  {line}" for line in report.options))
    typer.echo(f"the last {len(report.last_events)} events before " + ("the violation" if report.violations else "the end"))
    typer.echo("\n".join(report.last_events))
    typer.echo(f"event hash {report.event_hash:016x}, {report.num_events:,} events")
    for violation in report.violations:
        typer.echo(f"VIOLATION {violation}")
    return summary


def _run_many(first: int, count: int | None, hours: float | None, seconds: float) -> Summary:
    summary = Summary(first_seed=first, seconds=seconds)
    told = time.monotonic()
    for seed, report, cpu_s in _simulate_all(itertools.count(first) if count is None else range(first, first + count), seconds):
        if hours is not None and summary.virtual_s >= hours * 3600:
            break
        summary.add(seed, report, cpu_s)
        if report.violations:
            _say_failure(seed, seconds, report)
        if time.monotonic() - told > _PROGRESS_S:
            told = time.monotonic()
            options.say(f"{summary.num_seeds} seeds, {summary.virtual_s / 3600:.1f} virtual hours, {summary.num_calls:,} calls")
    _show(summary)
    return summary


def _say_failure(seed: int, seconds: float, report: Report) -> None:
    for violation in report.violations[:_SHOWN_VIOLATIONS]:
        typer.echo(f"seed {seed}: {violation}")
    again = "" if seconds == 60.0 else f" --seconds {seconds:g}"
    typer.echo(f"  replay it: dflash-moe simulate --seed {seed}{again}")


def _show(summary: Summary) -> None:
    plain = summary.to_json()
    rate = plain["per_cpu_minute"]
    table = options.Table("", "in all", "per minute of processor time")
    table.add_row("virtual hours", f"{plain['virtual_hours']:.2f}", f"{rate['virtual_hours']:.1f}")
    table.add_row("calls", f"{summary.num_calls:,}", f"{rate['calls']:,.0f}")
    table.add_row("faults", f"{sum(summary.faults.values()):,}", f"{rate['faults']:,.0f}")
    options.show(table)
    two = plain["two_hosts"]
    typer.echo(
        f"two hosts shared the workers in {two['virtual_hours']:.2f} of the hours: {two['shared_batches']:,} of "
        f"{two['batches']:,} batches had rows of both"
    )
    failed = ", ".join(f"{name} {count}" for name, count in plain["failed"].items()) or "none"
    typer.echo(f"{summary.num_succeeded:,} calls gave the right bits; {summary.num_abandoned} were abandoned; errors: {failed}")
    verdict = f"{len(summary.failing)} of {summary.num_seeds} seeds broke a rule" if summary.failing else "no rule was broken"
    typer.echo(f"{verdict}; event hash {plain['event_hash']}")


class SimulatedMembers:
    """The machines of workers 0 to n - 1. Called with an event of one of them (its index, what
    happened, of which attempt, why, whether it died, and the virtual time in seconds), it returns
    the orders as (task, attempt, until), the state, whether the worker is coming back, and the
    latest attempt.
    """

    def __init__(self, seed: int, are_started_by_host: Sequence[bool], backoff_s: tuple[float, float]) -> None:
        rng, policy = random.Random(seed), RestartPolicy(backoff_s)
        self._members = [Life(f"w{i}", policy, rng, is_ours) for i, is_ours in enumerate(are_started_by_host)]

    def __call__(
        self, worker: int, what: str, attempt: int, reason: str, is_death: bool, now: float
    ) -> tuple[list[tuple[str, int, float]], str, bool, int]:
        member = self._members[worker]
        orders = member.on(Event(Happening(what), attempt, reason, is_death), now)
        told = [(order.task.value, order.attempt, order.until) for order in orders]
        return told, member.state.value, member.is_coming, member.attempt
