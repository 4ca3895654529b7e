"""What every fault campaign is, and what it notes: one JSON line for each event, claims that decide
the verdict, goals that only show how the machine did, and one result file.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_moe.bench.results import BenchResult, percentile, timing_fields


@dataclass(frozen=True, slots=True)
class Campaign:
    """One kind of fault. `size` is how many events a recorded run has (of what, `unit` says),
    `quick` how many a test has. `lacking` returns what the machine lacks, "" where it can run.
    """

    name: str
    what: str
    unit: str
    size: int
    quick: int
    run: Callable[[Run], None]
    lacking: Callable[[], str] = field(default=lambda: "")


@dataclass(slots=True)
class Run:
    """One run of a campaign: how many events, what they are drawn from, a folder of its own for
    files, and what has come of it so far.
    """

    name: str
    size: int
    seed: int
    folder: Path
    drawn: random.Random
    result: BenchResult
    events: list[dict[str, Any]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    # Where each event is written at once, so that an interrupted run keeps what it saw.
    events_file: Path | None = None

    @classmethod
    def begin(cls, campaign: Campaign, *, size: int, seed: int, folder: Path) -> Run:
        """Begins a run; the load of the machine and the own priority stand in its result."""
        params = {"size": size, "unit": campaign.unit, "seed": seed, "nice": os.nice(0), "load_before": os.getloadavg()[0]}
        result = BenchResult(f"fault_{campaign.name}", params)
        return cls(campaign.name, size, seed, folder, random.Random(f"{campaign.name} {seed}"), result)

    def event(self, phase: str, **fields: Any) -> None:
        """Notes one event: its phase, and whatever else is known of it (pid, stall_ms, verdict)."""
        at_s = round(time.monotonic() - self.began, 3)
        self.events.append({"campaign": self.name, "seed": self.seed, "at_s": at_s, "phase": phase, **fields})
        if self.events_file is not None:
            with self.events_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.events[-1]) + "\n")

    def row(self, name: str, samples_s: Sequence[float] = (), **fields: Any) -> None:
        """Adds a row to the result. `samples_s` are what is timed in it."""
        timings = timing_fields(samples_s) if samples_s else {}
        self.result.rows.append({"name": name, **fields, **timings})

    def claim(self, what: str, value: float, *, at_most: float | None = None, at_least: float | None = None) -> None:
        """Notes what must hold whatever the machine does; one that is not met fails the run."""
        self._judge(what, value, at_most, at_least, decides=True)

    def goal(self, what: str, value: float, *, at_most: float) -> None:
        """Notes a time beside its mark. It decides nothing, because it is the machine's."""
        self._judge(what, value, at_most, None, decides=False)

    def _judge(self, what: str, value: float, at_most: float | None, at_least: float | None, *, decides: bool) -> None:
        met = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
        bounds = {"at_most": at_most, "at_least": at_least}
        self.result.summary.append(
            {"what": what, "value": value, **{key: one for key, one in bounds.items() if one is not None}, "met": met,
             "decides": decides}
        )  # fmt: skip

    @property
    def is_clean(self) -> bool:
        """Whether everything that must hold did."""
        return all(one["met"] for one in self.result.summary if one["decides"])

    def write(self, json_file: Path) -> None:
        """Writes the result."""
        self.result.params |= {"load_after": os.getloadavg()[0], "seconds": round(time.monotonic() - self.began, 1)}
        self.result.complete = True
        self.result.write(json_file)


def spread(name: str, samples_s: Sequence[float], *, unit_ms: bool = True) -> dict[str, float]:
    """Returns the p50, p99 and maximum of samples in seconds, as fields `name_p50_ms` ..., or with
    `unit_ms` false as `name_p50_s` ...; nothing where there are none.
    """
    if not samples_s:
        return {}
    scale, unit = (1e3, "ms") if unit_ms else (1.0, "s")
    found = {"p50": percentile(samples_s, 0.5), "p99": percentile(samples_s, 0.99), "max": max(samples_s)}
    return {f"{name}_{key}_{unit}": scale * value for key, value in found.items()}
