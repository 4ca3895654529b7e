"""Progress of a bench: lines off a terminal, a bar with lines above it on one.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from dflash_moe.cli.bench.progress import Bar, Lines, reporting

CURSOR_HIDDEN, CURSOR_SHOWN = "\x1b[?25l", "\x1b[?25h"


def report_three_steps() -> None:
    with reporting() as reporter:
        reporter.say("starting 2 workers")
        for done, label in enumerate(("warm-up: batched bf16", "round 1 of 1: batched bf16")):
            reporter.advance(done, 2, label)
        reporter.advance(2, 2, "done")


def interrupted_by(error: type[BaseException]) -> None:
    with reporting() as reporter:
        reporter.advance(0, 2, "warm-up")
        raise error


def test_off_a_terminal_every_step_is_a_line(capsys):
    report_three_steps()
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines() == [
        "starting 2 workers", "[1/2] warm-up: batched bf16", "[2/2] round 1 of 1: batched bf16",
    ]  # fmt: skip


@contextmanager
def terminal_as_stderr(monkeypatch) -> Iterator[list[str]]:
    """A pseudo-terminal in the place of stderr; the list has what it was sent when the block has
    ended.
    """
    ours, theirs = pty.openpty()
    shown: list[str] = []
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("COLUMNS", "140")
        yield shown
    with suppress(OSError):  # EIO: everything was read, and the other side is closed
        while part := os.read(ours, 1 << 16):
            shown.append(part.decode())
    os.close(ours)


def test_on_a_terminal_a_bar_counts_the_steps(monkeypatch):
    with terminal_as_stderr(monkeypatch) as shown:
        with reporting() as reporter:
            assert isinstance(reporter, Bar)
        report_three_steps()
    assert "starting 2 workers" in "".join(shown)
    assert "2/2" in "".join(shown)


def test_brackets_of_a_message_are_no_markup(capsys):
    Lines().say("[bold]w0[/bold]")
    assert "[bold]w0[/bold]" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_the_bar_ends_when_the_bench_does(monkeypatch, error):
    with terminal_as_stderr(monkeypatch) as shown, pytest.raises(error):
        interrupted_by(error)
    assert "".join(shown).rindex(CURSOR_SHOWN) > "".join(shown).rindex(CURSOR_HIDDEN)
