"""Shows on stderr what takes time, and how far it is: by bars on a terminal, by lines elsewhere.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dflash_moe.cli import options

if TYPE_CHECKING:
    from dflash_moe.runtime.contents import ContentsReport
    from dflash_moe.runtime.fleet import LoadingReport

# A load that takes less time is not worth a line.
LINE_EVERY_S = 2.0
# Whatever takes longer says what it does.
SILENT_S = 0.5
# A thread that shows something ends within milliseconds; nobody waits longer for it.
PATIENCE_S = 2.0


class Lines:
    """Reports in plain lines. Several threads report."""

    def __init__(self, say: Callable[[str], None] = options.say, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._last = clock()
        self._counts: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def report(self, holder: str, count: int, total: int) -> None:
        """`holder` has loaded `count` of `total` experts."""
        now = self._clock()
        with self._lock:
            self._counts[holder] = (count, total)
            if now - self._last < LINE_EVERY_S:
                return
            self._last = now
            shown = ", ".join(f"{name} {done} of {whole}" for name, (done, whole) in self._counts.items())
        self._say(f"loading experts: {shown}")


class LatestLine:
    """Reports in plain lines about layers that come one after another, of which only the latest is
    of interest.
    """

    def __init__(self, say: Callable[[str], None] = options.say, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._last = clock()

    def report(self, layer: str, count: int, total: int) -> None:
        """`count` of the `total` experts of `layer` have been compared."""
        if self._clock() - self._last >= LINE_EVERY_S:
            self._last = self._clock()
            self._say(f"comparing weights: {layer} {count} of {total} experts")


class CopyLine:
    """Reports in plain lines how much of a file is copied, in MiB."""

    def __init__(self, say: Callable[[str], None] = options.say, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._last = clock()

    def report(self, unit: str, count: int, total: int) -> None:
        """`count` of `total` are copied."""
        if self._clock() - self._last >= LINE_EVERY_S:
            self._last = self._clock()
            self._say(f"copying: {count:,} of {total:,} {unit}")


class Bars:
    """One bar per holder or layer, shown from its first report to its last."""

    def __init__(self, progress: Any, doing: str = "loading") -> None:
        self._progress = progress
        self._doing = doing
        self._tasks: dict[str, Any] = {}
        self._lock = threading.Lock()

    def report(self, holder: str, count: int, total: int) -> None:
        """`holder` is through `count` of `total` experts."""
        with self._lock:
            if holder not in self._tasks:
                self._tasks[holder] = self._progress.add_task(f"{self._doing} {holder}", total=total)
            self._progress.update(self._tasks[holder], completed=count, visible=count < total)


@contextmanager
def doing_shown(what: str, say: Callable[[str], None] = options.say) -> Iterator[None]:
    """Says what the block does once that has taken SILENT_S: on a terminal with a sign of life that
    vanishes at its end, and otherwise in one line.
    """
    is_over = threading.Event()

    def show() -> None:
        if is_over.wait(SILENT_S):
            return
        if not sys.stderr.isatty():
            say(f"{what} ...")
            return
        from rich.console import Console

        with Console(stderr=True).status(what):
            while not is_over.wait(PATIENCE_S):
                pass

    shower = threading.Thread(target=show, name="doing", daemon=True)
    shower.start()
    try:
        yield
    finally:
        is_over.set()
        shower.join(timeout=PATIENCE_S)


@contextmanager
def loading_shown() -> Iterator[LoadingReport]:
    """Gives the block what `ExpertRuntime.start` takes as `on_loading`. Bars vanish at its end."""
    with _shown("loading", Lines().report) as report:
        yield report


@contextmanager
def comparing_shown() -> Iterator[ContentsReport]:
    """Gives the block what `ExpertRuntime.check_weights` takes as `report`. Bars vanish at its
    end.
    """
    with _shown("comparing", LatestLine().report) as report:
        yield report


@contextmanager
def copying_shown() -> Iterator[Callable[[int, int], None]]:
    """Gives the block what `write_stub` takes as `report`. The bar vanishes at its end."""
    with _shown("copying", CopyLine().report) as report:
        yield lambda done, total: report("MiB", done >> 20, total >> 20)


@contextmanager
def _shown(doing: str, say: Callable[[str, int, int], None]) -> Iterator[Callable[[str, int, int], None]]:
    """Gives the block `say`, or bars where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as progress:
        yield Bars(progress, doing).report
