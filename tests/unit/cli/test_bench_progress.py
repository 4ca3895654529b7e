"""Progress of a bench: lines off a terminal, a bar with lines above it on one. SPDX-License-Identifier: Apache-2.0"""

from __future__ import annotations

import os
import pty
import sys

import pytest

from dflash_moe.cli.bench_progress import Bar, Lines, reporting


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


def test_on_a_terminal_a_bar_counts_the_steps(monkeypatch):
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLUMNS", "140")
        with reporting() as reporter:
            assert isinstance(reporter, Bar)
        report_three_steps()
        terminal.flush()
        shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "starting 2 workers" in shown
    assert "2/2" in shown


def test_brackets_of_a_message_are_no_markup(monkeypatch, capsys):
    Lines().say("[bold]w0[/bold]")
    assert "[bold]w0[/bold]" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_the_bar_ends_when_the_bench_does(monkeypatch, error):
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm-256color")
        with pytest.raises(error):
            interrupted_by(error)
        terminal.flush()
        shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert shown.rstrip().endswith("\x1b[2K") or "\x1b[?25h" in shown  # the cursor is back
