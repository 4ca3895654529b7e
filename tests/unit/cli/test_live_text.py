"""Text and speed on a terminal at the same time, and lines of speed elsewhere.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import io
import sys
import threading

import pytest
from rich.console import Console

from dflash_moe.cli import live_text
from dflash_moe.cli.live_text import RATE_S, Rate


def test_the_rate_is_that_of_the_last_seconds():
    now = [0.0]
    rate = Rate(lambda: now[0])
    assert rate.add(0) == 0.0
    now[0] = 1.0
    assert rate.add(10) == 10.0
    # A slow beginning, such as a prompt, is forgotten.
    found = []
    for step in range(1, 40):
        now[0] = 1.0 + step * 0.5
        found.append(rate.add(10 + 50 * step))
    assert found[-1] == 100.0
    assert found == sorted(found)
    now[0] += RATE_S
    assert rate.add(10 + 50 * 39) == 0.0


def test_a_line_of_speed_comes_now_and_then_off_a_terminal():
    said: list[str] = []
    enough = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 3:
            enough.set()

    with live_text._lines(lambda: "9 tokens", say, every_s=0.001):
        assert enough.wait(60)
    count = len(said)
    assert set(said) == {"9 tokens"}
    assert not [thread for thread in threading.enumerate() if thread.name == "dflash-moe-progress"]
    assert len(said) == count


@pytest.mark.parametrize("has_lines", [False, True])
def test_off_a_terminal_text_goes_to_stdout_untouched(capsys, has_lines):
    with live_text.live_text(lambda: "9 tokens", has_lines=has_lines) as write:
        write("a\x1b[1mb\n")
        write("c")
    assert capsys.readouterr() == ("a\x1b[1mb\nc", "")


class Screen:
    """A terminal of a few lines, as far as rich moves on one."""

    def __init__(self, height: int, width: int) -> None:
        self.file = io.StringIO()
        self.console = Console(
            file=self.file, force_terminal=True, width=width, height=height, color_system=None, legacy_windows=False,
            _environ={"TERM": "xterm"},
        )  # fmt: skip

    def lines(self) -> list[str]:
        """What stands on it."""
        rows, row, column = [""], 0, 0
        text = self.file.getvalue()
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                end = next(place for place in range(at + 2, len(text)) if text[place].isalpha())
                count, code = text[at + 2 : end], text[end]
                if code == "A":
                    row -= int(count or 1)
                elif code == "K":
                    rows[row] = ""
                at = end + 1
                continue
            if text[at] == "\n":
                row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
            elif text[at] == "\r":
                column = 0
            else:
                rows[row] = rows[row][:column].ljust(column) + text[at] + rows[row][column + 1 :]
                column += 1
            at += 1
        return [line.rstrip() for line in rows]


def test_on_a_terminal_the_speed_is_below_the_text_and_gone_in_the_end(capsys):
    screen = Screen(24, 40)
    shown = live_text._Screen(screen.console, lambda: "9 tokens")
    with shown:
        shown.write("first line\nsec")
        shown._live.refresh()
        assert [line for line in screen.lines() if line] == ["first line", "sec", "9 tokens"]
        shown.write("ond\nthird")
        shown._live.refresh()
        assert [line for line in screen.lines() if line] == ["first line", "second", "third", "9 tokens"]
    assert [line for line in screen.lines() if line] == ["first line", "second"]
    assert capsys.readouterr().out == "third"


def test_a_notice_that_comes_meanwhile_is_above_the_line_that_grows(capsys):
    screen = Screen(24, 40)
    stderr = sys.stderr
    with live_text._Screen(screen.console, lambda: "9 tokens") as shown:
        shown.write("first line\nsec")
        # As a warning does where nobody has set up logging.
        print("worker w0 is lost", file=sys.stderr)
        shown.write("ond")
        shown._live.refresh()
        assert [line for line in screen.lines() if line] == ["first line", "worker w0 is lost", "second", "9 tokens"]
    assert sys.stderr is stderr
    assert capsys.readouterr().out == "second"


def test_a_line_longer_than_the_screen_shows_its_end(capsys):
    screen = Screen(5, 10)
    shown = live_text._Screen(screen.console, lambda: "9 tokens")
    text = "".join(f"{number:>9} " for number in range(50))
    with shown:
        shown.write(text)
        shown._live.refresh()
        drawn = [line.strip() for line in screen.lines() if line]
        assert drawn[-4:] == ["47", "48", "49", "9 tokens"]
        shown.write("\x1b[2Jend")
        shown._live.refresh()
        assert "\x1b[2J" not in screen.file.getvalue(), "what a model writes does not move the drawing"
    assert capsys.readouterr().out == text + "[2Jend", "nor, on a terminal, what stays there"


def test_an_error_leaves_what_came_on_a_line_of_its_own(capsys):
    shown = live_text._Screen(Screen(24, 40).console, lambda: "9 tokens")

    def interrupted() -> None:
        with shown:
            shown.write("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert capsys.readouterr().out == "half\n"
