"""Shows on stderr what takes time, and how far it is: by one bar, or a bar for each layer, on a
terminal, and otherwise by a line every two seconds.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from dflash_moe.cli import options
from dflash_moe.config.values import format_bytes

if TYPE_CHECKING:
    from dflash_moe.holders.audit.contents import ContentsReport
    from dflash_moe.holders.fleet import LoadingReport

# A load that takes less time is not worth a line.
LINE_EVERY_S = 2.0
# Whatever takes longer says what it does.
SILENT_S = 0.5
# A thread that shows something ends within milliseconds; nobody waits longer for it.
PATIENCE_S = 2.0
# The names of holders whose loaded weights are compared end so.
COMPARING = "(comparing)"


class Loaded:
    """What the holders of experts have loaded, in bytes. Several threads report. Holders whose name
    ends with COMPARING have loaded all, and read it again.
    """

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def add(self, holder: str, count: int, total: int) -> tuple[str, int, int]:
        """`holder` has done `count` of `total` bytes. Returns what is being done, and the bytes of
        all who do it.
        """
        is_comparing = holder.endswith(COMPARING)
        with self._lock:
            self._counts[holder] = (count, total)
            alike = [one for name, one in self._counts.items() if name.endswith(COMPARING) == is_comparing]
        doing = "comparing experts" if is_comparing else "loading experts"
        return doing, sum(count for count, _ in alike), sum(total for _, total in alike)


class Lines:
    """Reports in plain lines. Several threads report."""

    def __init__(self, say: Callable[[str], None] = options.say, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._began = self._last = clock()
        self._loaded = Loaded()
        self.is_done = False

    def report(self, holder: str, count: int, total: int) -> None:
        """`holder` has loaded `count` of `total` bytes."""
        doing, done, whole = self._loaded.add(holder, count, total)
        self.is_done = done == whole
        now = self._clock()
        if now - self._last < LINE_EVERY_S:
            return
        self._last = now
        left = f", about {(now - self._began) * (whole - done) / done:.0f} s left" if done else ""
        self._say(f"{doing}: {format_bytes(done)} of {format_bytes(whole)}{left}")


class LatestLine:
    """Reports in plain lines about what is done one after another, of which only the latest is of
    interest. `form` is a line of what it is called, how much is done, and of how much.
    """

    def __init__(self, form: str) -> None:
        self._form = form
        self._last = time.monotonic()

    def report(self, name: str, count: int, total: int) -> None:
        """`count` of `total` are done of what `name` is."""
        if time.monotonic() - self._last >= LINE_EVERY_S:
            self._last = time.monotonic()
            options.say(self._form.format(name, count, total))


class Bars:
    """One bar for each thing that is done, shown from its first report to its last."""

    def __init__(self, progress: Any, doing: str = "comparing") -> None:
        self._progress = progress
        self._doing = doing
        self._tasks: dict[str, Any] = {}
        self._lock = threading.Lock()

    def report(self, name: str, count: int, total: int) -> None:
        """`count` of `total` are done of what `name` is."""
        self.update(f"{self._doing} {name}", count, total)

    def update(self, text: str, count: int, total: int) -> None:
        """The bar called `text` has got so far."""
        with self._lock:
            if text not in self._tasks:
                self._tasks[text] = self._progress.add_task(text, total=total)
            self._progress.update(self._tasks[text], completed=count, total=total, visible=count < total)


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
def loading_shown(then: str = "loading attention and all but experts") -> Iterator[LoadingReport]:
    """Gives the block what `ExpertRuntime.start` takes as `on_loading`: one bar of the bytes of all
    holders and the time that is left. `then` is what the block does once experts are loaded, which
    nobody counts. Bars vanish at the block's end.
    """
    if not sys.stderr.isatty():
        lines = Lines()
        with ExitStack() as stack:
            begin = _begin_once(lambda: stack.enter_context(doing_shown(then)) if then else None)

            def say(holder: str, count: int, total: int) -> None:
                lines.report(holder, count, total)
                begin(lines.is_done)

            yield say
        return
    from rich.progress import DownloadColumn

    with _progress(DownloadColumn(binary_units=True)) as progress:
        bars, loaded = Bars(progress), Loaded()
        begin = _begin_once(lambda: progress.add_task(then, total=None) if then else None)

        def report(holder: str, count: int, total: int) -> None:
            doing, done, whole = loaded.add(holder, count, total)
            bars.update(doing, done, whole)
            begin(done == whole)

        yield report


def _begin_once(begin: Callable[[], Any]) -> Callable[[bool], None]:
    """Returns what begins something the first time that it is given True, whichever thread says
    so.
    """
    left = [begin]

    def look(is_time: bool) -> None:
        # Taking the only entry of a list is one step for all threads.
        if is_time:
            with contextlib.suppress(IndexError):
                left.pop()()

    return look


@contextmanager
def comparing_shown() -> Iterator[ContentsReport]:
    """Gives the block what `ExpertRuntime.check_weights` takes as `report`. Bars vanish at its
    end.
    """
    with _shown("comparing", LatestLine("comparing weights: {} {} of {} experts").report) as report:
        yield report


@contextmanager
def copying_shown() -> Iterator[Callable[[int, int], None]]:
    """Gives the block what `write_stub` takes as `report`. The bar vanishes at its end."""
    with _shown("copying", LatestLine("copying: {1:,} of {2:,} {0}").report) as report:
        yield lambda done, total: report("MiB", done >> 20, total >> 20)


@contextmanager
def packing_shown() -> Iterator[Callable[[int, int], None]]:
    """Gives the block what `Warming.write` takes as `report`. The bar vanishes at its end."""
    with _shown("packing", LatestLine("packing: {1:,} of {2:,} {0}").report) as report:
        yield lambda done, total: report("MiB", done >> 20, total >> 20)


@contextmanager
def _shown(doing: str, say: Callable[[str, int, int], None]) -> Iterator[Callable[[str, int, int], None]]:
    """Gives the block `say`, or bars where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield say
        return
    from rich.progress import MofNCompleteColumn

    with _progress(MofNCompleteColumn()) as progress:
        yield Bars(progress, doing).report


@contextmanager
def _progress(counts: Any) -> Iterator[Any]:
    """Gives the block a display of bars, whose `counts` are such a column. Notices, which go to
    stderr too, appear above them.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), counts, TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=True) as progress:
        yield progress
