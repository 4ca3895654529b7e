"""How long a chat goes on: what Ctrl-C, Ctrl-D and errors mean at a terminal and behind a pipe.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dflash_moe.cli.chat import loop as chat_loop
from dflash_moe.cli.chat.loop import answer_one, converse, piped_message, take_turns
from dflash_moe.errors import ConfigError, WorkerLost
from tests.checks.layers import imports_of
from tests.unit.cli.chat.test_commands import Model, begun, said

ROOT = Path(__file__).parents[4]
HINT = "Ctrl-C again leaves, and so does Ctrl-D\n"


class Typist:
    """In the place of a `Terminal`: types these texts, or presses these keys, and then Ctrl-D."""

    def __init__(self, *typed):
        self.typed = [*typed, EOFError()]

    def read(self):
        following = self.typed.pop(0)
        if isinstance(following, BaseException):
            raise following
        return following


def pipe(monkeypatch, raw: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))


# -- at a terminal ---------------------------------------------------------------------------------


def test_the_first_ctrl_c_says_how_to_leave_and_the_second_leaves(capsys):
    with pytest.raises(KeyboardInterrupt):
        converse(begun(Model()), Typist(KeyboardInterrupt(), KeyboardInterrupt(), "never asked"))
    assert capsys.readouterr().err.endswith(HINT)


@pytest.mark.parametrize("between", ["a", "", "/stats", "/rest"])
def test_whatever_is_typed_in_between_makes_the_next_ctrl_c_the_first_one(capsys, between):
    converse(begun(Model()), Typist(KeyboardInterrupt(), between, KeyboardInterrupt()))
    assert capsys.readouterr().err.count(HINT) == 2


def test_a_stopped_answer_does_not_make_the_next_ctrl_c_leave(capsys):
    model = Model()
    model.error, model.chunks_before_it = KeyboardInterrupt(), 1
    session = begun(model)
    converse(session, Typist("a", KeyboardInterrupt(), "b"))
    assert said(session) == ["a", "half", "b", "2"]
    assert capsys.readouterr().err.endswith(f"stopped\n{HINT}")


@pytest.mark.parametrize("error", [WorkerLost("worker w0 is lost"), ConfigError("too long"), KeyboardInterrupt()])
def test_an_error_is_said_and_the_conversation_goes_on(capsys, error):
    session = begun(Model())
    session.ask("first")
    session.ask = failing_once(session.ask, error)
    converse(session, Typist("a", "b", "c"))
    assert [text for text in said(session) if text.isalpha()] == ["first", "b", "c"]
    assert f"\n{str(error) or 'stopped'}\n" in capsys.readouterr().err


def failing_once(ask, error):
    errors = [error]

    def asked(text):
        if errors:
            raise errors.pop()
        return ask(text)

    return asked


# -- from a pipe -----------------------------------------------------------------------------------


def test_lines_are_turns_until_one_leaves_or_cannot_be_done(monkeypatch):
    session = begun(Model())
    pipe(monkeypatch, b"a\n\nb\xff\n/undo\nc")
    take_turns(session)
    assert said(session) == ["a", "1", "c", "3"]
    pipe(monkeypatch, b"d\n/quit\ne\n")
    take_turns(session)
    assert said(session)[-2:] == ["d", "4"]
    pipe(monkeypatch, b"/load nowhere\nf\n")
    with pytest.raises(ConfigError, match="nowhere"):
        take_turns(session)
    assert said(session)[-2:] == ["d", "4"]


def test_an_answer_to_a_pipe_that_was_stopped_ends_as_an_interrupt():
    model = Model()
    model.error, model.chunks_before_it = KeyboardInterrupt(), 1
    with pytest.raises(KeyboardInterrupt):
        answer_one(begun(model), "a")


def test_a_pipe_is_one_message_with_all_its_lines(monkeypatch):
    pipe(monkeypatch, b"\n  /quit\n\n  b\n\n")
    assert piped_message() == "  /quit\n\n  b"


def test_what_is_no_message_is_refused(monkeypatch):
    monkeypatch.setattr(chat_loop, "MAX_TEXT_BYTES", 1 << 20)
    for raw, words in ((b" \n\n", "there is no message"), (b"x" * ((1 << 20) + 1), "more than 1 MiB")):
        pipe(monkeypatch, raw)
        with pytest.raises(ConfigError, match=words):
            piped_message()
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match="stdin is closed"):
        piped_message()
    with os.fdopen(os.open("/proc/self/mem", os.O_RDONLY), "rb") as unreadable:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(unreadable))
        with pytest.raises(ConfigError, match="stdin cannot be read"):
            piped_message()


# -- what is imported ------------------------------------------------------------------------------


def test_prompt_toolkit_is_imported_for_a_terminal_alone():
    knowing = set()
    for path in (ROOT / "dflash_moe").rglob("*.py"):
        for target, _, at_top in imports_of(path, path.relative_to(ROOT)):
            if target[0] == "prompt_toolkit":
                knowing.add(str(path.relative_to(ROOT)))
            is_terminal = target[:4] == ("dflash_moe", "cli", "chat", "terminal")
            assert not is_terminal or not at_top, f"{path} imports it before a terminal is there"
    assert knowing == {"dflash_moe/cli/chat/terminal.py"}
