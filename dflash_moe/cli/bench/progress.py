"""Progress of a bench on stderr: a bar on a terminal, plain lines otherwise.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dflash_moe.cli import loading, options

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from dflash_moe.bench.harness import Reporter


class Lines:
    """Reports in plain lines: one for each step, and one every two seconds while experts load."""

    def __init__(self) -> None:
        self._loading = loading.Lines()

    def say(self, line: str) -> None:
        """Prints the line on stderr."""
        options.say(line)

    def advance(self, done: int, total: int, label: str) -> None:
        """Prints a line such as `[3/12] round 1 of 3: batched bf16`, and nothing at the end."""
        if done < total:
            options.say(f"[{done + 1}/{total}] {label}")

    def loading(self, holder: str, count: int, total: int) -> None:
        """Prints all holders in one line."""
        self._loading.report(holder, count, total)


class Bar:
    """Reports by a bar with the time that is left, and one more for each holder while experts load.
    Lines appear above them.
    """

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._loading = loading.Bars(progress, "loading MiB:")

    def say(self, line: str) -> None:
        """Prints the line above the bar."""
        self._progress.console.print(line, markup=False, highlight=False)

    def advance(self, done: int, total: int, label: str) -> None:
        """Moves the bar and names what is measured now."""
        self._progress.update(self._task, completed=done, total=total, description=label, visible=True)

    def loading(self, holder: str, count: int, total: int) -> None:
        """Moves the bar of this holder, which appears with its first report."""
        self._loading.report(holder, count >> 20, total >> 20)


@contextmanager
def reporting() -> Iterator[Reporter]:
    """Gives the block the reporter that suits this stderr. A bar is gone when the block ends."""
    if not sys.stderr.isatty():
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False
    ) as progress:
        yield Bar(progress, progress.add_task("", total=None, visible=False))
