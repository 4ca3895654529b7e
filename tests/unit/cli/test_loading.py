"""Progress of loading: bytes and the time that is left, in lines at a bounded rate, or in a bar on
a terminal; and what takes longer than half a second says what it is.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console
from rich.progress import Progress

from dflash_moe.cli import loading
from dflash_moe.cli.loading import LINE_EVERY_S, Bars, Lines, Loaded, doing_shown, loading_shown

MIB = 1 << 20


def test_lines_have_the_bytes_of_all_holders_and_the_time_left_every_two_seconds():
    now = [0.0]
    said: list[str] = []
    lines = Lines(said.append, lambda: now[0])
    lines.report("w0", 0, 64 * MIB)
    lines.report("w1", 3 * MIB, 32 * MIB)
    assert said == []
    now[0] = LINE_EVERY_S
    lines.report("w0", 21 * MIB, 64 * MIB)
    lines.report("w0", 22 * MIB, 64 * MIB)
    assert said == ["loading experts: 24.0 MiB of 96.0 MiB, about 6 s left"]
    assert not lines.is_done
    lines.report("w0", 64 * MIB, 64 * MIB)
    lines.report("w1", 32 * MIB, 32 * MIB)
    assert lines.is_done
    now[0] = 2 * LINE_EVERY_S
    lines.report("w1 (comparing)", MIB, 2 * MIB)
    assert said[1:] == ["comparing experts: 1.0 MiB of 2.0 MiB, about 4 s left"]


def test_there_is_one_bar_for_all_holders():
    with Progress(console=Console(file=io.StringIO())) as progress:
        bars, loaded = Bars(progress), Loaded()
        for holder, count in (("w0", 0), ("w1", 0), ("w0", 5), ("w1", 8)):
            bars.update(*loaded.add(holder, count, 8))
        assert [(task.description, task.completed, task.total) for task in progress.tasks] == [("loading experts", 13, 16)]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_comes_after_the_experts_is_said_too(is_terminal, monkeypatch):
    class Stderr(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    written = Stderr()
    monkeypatch.setattr("sys.stderr", written)
    monkeypatch.setattr(loading, "SILENT_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    is_said = threading.Event()
    write = written.write

    def watched(text: str) -> int:
        if "loading attention" in text:
            is_said.set()
        return write(text)

    monkeypatch.setattr(written, "write", watched)
    with loading_shown() as report:
        for holder in ("w0", "w1"):
            report(holder, 0, MIB)
        report("w0", MIB, MIB)
        assert not is_said.is_set()
        report("w1", MIB, MIB)
        assert is_said.wait(60)
    assert "attention and all but experts" in written.getvalue()


def test_what_takes_longer_than_half_a_second_says_what_it_does(monkeypatch):
    said: list[str] = []
    is_said = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        is_said.set()

    monkeypatch.setattr(loading, "SILENT_S", 60.0)
    with doing_shown("reading a thing", say):
        pass
    assert said == []
    monkeypatch.setattr(loading, "SILENT_S", 0.0)
    with doing_shown("reading a thing", say):
        assert is_said.wait(60)
    assert said == ["reading a thing ..."]
