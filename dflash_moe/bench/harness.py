"""The one harness of every case: it warms up, interleaves the cases in rounds, keeps all samples,
and saves the file after every round.

A case measures itself once in a round, and `run_rounds` does the rest. Whatever ends a bench early
(Ctrl-C, SIGTERM, a lost worker) leaves what was measured in the result and its file, marked
incomplete, and the exception goes on.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dflash_moe.bench.results import BenchResult
from dflash_moe.telemetry.stop_signals import exit_by_signals

# A shell reports this for a process that SIGTERM ended.
EXIT_TERMINATED = 128 + signal.SIGTERM


class Case(Protocol):
    """One line of a table, which measures itself."""

    @property
    def label(self) -> str:
        """The name of the case in reports of progress."""

    @property
    def rounds(self) -> int | None:
        """The number of rounds. None means as many as the bench has; a case whose rounds take
        minutes has fewer.
        """

    def measure(self, *, keep: bool) -> None:
        """Takes the samples of one round. Without `keep`, in warm-up, it measures and forgets."""

    def row(self) -> dict[str, Any] | None:
        """Returns the result row of what is kept so far, None before the first sample."""


class Reporter(Protocol):
    """Takes reports of progress, and shows a bar on a terminal and lines otherwise
    (cli/bench/progress.py).
    """

    def say(self, line: str) -> None:
        """Reports a line that is worth keeping."""

    def advance(self, done: int, total: int, label: str) -> None:
        """`done` of `total` steps lie behind; `label` is what is measured now."""

    def loading(self, holder: str, count: int, total: int) -> None:
        """`holder` has loaded `count` of its `total` experts. Several threads report."""


class Silent:
    """Reports nothing, for benches that are called from Python."""

    def say(self, line: str) -> None:
        """Does nothing."""

    def advance(self, done: int, total: int, label: str) -> None:
        """Does nothing."""

    def loading(self, holder: str, count: int, total: int) -> None:
        """Does nothing."""


@dataclass(slots=True)
class Recorder:
    """The result of one run while it is under way. `begin` comes first, and `recording()` is around
    all measuring.
    """

    path: Path | None = None
    reporter: Reporter = field(default_factory=Silent)
    result: BenchResult | None = None

    def begin(self, case: str, params: dict[str, Any], *, interleaved: bool = True) -> BenchResult:
        """Makes the result that `save` writes. `interleaved` says that the same round of two rows
        is measured in one go.
        """
        self.result = BenchResult(case, params, interleaved=interleaved)
        return self.result

    def save(self) -> None:
        """Writes the file if one was asked for. A reader never sees half of it."""
        if self.path is not None and self.result is not None:
            self.result.write(self.path)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Marks the result complete when the block ends by itself. Otherwise it saves what there is
        as incomplete, says where, and lets the exception go on.
        """
        with _terminating_as_exit():
            try:
                yield
            except BaseException as error:
                self._keep_incomplete(error)
                raise
            if self.result is not None:
                self.result.complete = True
            self.save()

    def _keep_incomplete(self, error: BaseException) -> None:
        if self.result is None:
            return
        self.result.ended_by = _cause(error)
        samples = sum(len(row.get("samples_s", ())) for row in self.result.rows)
        if not samples:
            self.reporter.say(f"bench {self.result.case}: ended by {self.result.ended_by} before anything was measured")
            return
        where = "no --json was given, the table shows"
        if self.path is not None:
            try:
                self.save()
            # A full disk may be what ended the bench. The error that goes on is the first one.
            except OSError as failed:
                self.reporter.say(f"{self.path}: cannot be written ({failed.strerror}); it keeps what was saved before")
                return
            where = f"{self.path} keeps"
        self.reporter.say(
            f"bench {self.result.case}: ended by {self.result.ended_by}; {where} the {samples} samples measured so far, "
            "marked incomplete"
        )


def run_rounds(recorder: Recorder, cases: Sequence[Case], *, rounds: int, warmup: int = 1) -> None:
    """Measures every case once in each round and saves after it. The first `warmup` rounds are not
    kept.

    The order rotates from round to round, so that no case always follows the same neighbour. Rows
    are added to those that the result has.
    """
    result = recorder.result
    if result is None:
        raise ValueError("begin() the result first")
    before = list(result.rows)
    total, done = sum(warmup + min(case.rounds or rounds, rounds) for case in cases), 0
    for round_ in range(1 - warmup, rounds + 1):
        for case in _rotated(cases, round_):
            if round_ > (case.rounds or rounds):
                continue
            kind = f"round {round_} of {rounds}" if round_ > 0 else "warm-up"
            recorder.reporter.advance(done, total, f"{kind}: {case.label}")
            case.measure(keep=round_ > 0)
            done += 1
            result.rows = before + [row for one in cases if (row := one.row()) is not None]
        if round_ > 0:
            recorder.save()
    recorder.reporter.advance(done, total, "done")


def _rotated(cases: Sequence[Case], round_: int) -> list[Case]:
    start = round_ % len(cases) if cases else 0
    return [*cases[start:], *cases[:start]]


def _cause(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "Ctrl-C"
    if isinstance(error, SystemExit) and error.code == EXIT_TERMINATED:
        return "SIGTERM"
    return type(error).__name__


def _terminating_as_exit() -> AbstractContextManager[None]:
    """Has SIGTERM raise SystemExit(143) in the main thread within the block, so that `with` blocks
    close workers.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return exit_by_signals([signal.SIGTERM]) if is_main else nullcontext()
