"""Writes generated text to stdout as it comes, and shows meanwhile on stderr how fast: below the
text on a terminal, and otherwise by a line every two seconds where the text itself does not tell.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys
import threading
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dflash_moe.cli import options
from dflash_moe.cli.loading import LINE_EVERY_S

# The rate is that of so many last seconds: of one step it would jump, of all it would not move.
RATE_S = 2.0
REFRESHES_PER_S = 10
Write = Callable[[str], None]


class Rate:
    """The tokens per second of the last seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque([(clock(), 0)])

    def add(self, count: int) -> float:
        """Takes how many tokens there are by now, and returns the rate."""
        now = self._clock()
        self._samples.append((now, count))
        while len(self._samples) > 2 and now - self._samples[1][0] >= RATE_S:
            self._samples.popleft()
        first, before = self._samples[0]
        return (count - before) / (now - first) if now > first else 0.0


def write_plain(text: str) -> None:
    """Writes text to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def live_text(progress: Callable[[], str], *, has_lines: bool) -> Iterator[Write]:
    """Gives the block what writes text to stdout. `progress` returns what to show meanwhile, and is
    called by another thread; off a terminal it is shown where `has_lines` is set.
    """
    from rich.console import Console

    console = Console(stderr=True)
    write = _write_visible if sys.stdout.isatty() else write_plain
    if console.is_terminal and not console.is_dumb_terminal:
        if sys.stdout.isatty():
            with _Screen(Console(), progress) as screen:
                yield screen.write
        else:
            with _live(console, lambda: _tail(console, "", progress())):
                yield write
    elif has_lines:
        with _lines(progress):
            yield write
    else:
        yield write


class _Screen:
    """A terminal that shows both the text and what is said about it. Whole lines of text are above
    for good; the line that still grows, and the progress, are drawn anew each time.
    """

    def __init__(self, console: Any, progress: Callable[[], str]) -> None:
        self._console = console
        self._progress = progress
        self._growing = ""
        self._live = _live(console, lambda: _tail(console, self._growing, progress()))

    def write(self, text: str) -> None:
        """Adds text."""
        from rich.text import Text

        *whole, self._growing = (self._growing + _without_controls(text)).split("\n")
        for line in whole:
            self._console.print(Text(line), soft_wrap=True)
        if whole:
            self._live.refresh()

    def __enter__(self) -> _Screen:
        self._live.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.__exit__(*exception)
        # What comes now belongs to this line; after an error its sentence begins a new one.
        write_plain(self._growing + ("\n" if self._growing and exception[0] else ""))


def _without_controls(text: str) -> str:
    """Returns the text without what a terminal obeys: a model may write anything, such as a
    sequence that clears the screen or renames its window.
    """
    return "".join(character for character in text if character in "\n\t" or unicodedata.category(character) != "Cc")


def _write_visible(text: str) -> None:
    write_plain(_without_controls(text))


def _live(console: Any, render: Callable[[], Any]) -> Any:
    """Returns what is drawn anew again and again. Notices, which go to stderr, appear above it."""
    from rich.live import Live

    return Live(
        console=console, get_renderable=render, transient=True, refresh_per_second=REFRESHES_PER_S, redirect_stdout=False,
        redirect_stderr=True,
    )  # fmt: skip


def _tail(console: Any, growing: str, said: str) -> Any:
    """Returns what is drawn: the end of the line that grows, as far as the screen has room, and
    below it the progress.
    """
    from rich.text import Text

    room = max(1, console.height - 2) * console.width
    # A model may write anything; what moves the cursor would spoil the drawing.
    visible = "".join(character if character.isprintable() else " " for character in growing[-room:])
    lines = Text(visible).wrap(console, console.width)[-max(1, console.height - 2) :] if visible else []
    return Text("\n").join([*lines, Text(said, style="dim")])


@contextmanager
def _lines(progress: Callable[[], str], say: Write = options.say, every_s: float = LINE_EVERY_S) -> Iterator[None]:
    """Says the progress now and then, beside the block."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(every_s):
            say(progress())

    thread = threading.Thread(target=run, name="dflash-moe-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(LINE_EVERY_S)
