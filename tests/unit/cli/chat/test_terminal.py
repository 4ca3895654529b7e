"""The prompt of a chat as keys and terminals have it: pastes, several lines, Ctrl-C, Tab, what was
typed before, and notices that come while somebody types.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import io
import sys
import threading

import pytest

pytest.importorskip("prompt_toolkit")

from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from dflash_moe.cli.chat import terminal as chat_terminal
from dflash_moe.cli.chat.terminal import Terminal, goes_on

ENTER, ALT_ENTER, CTRL_C, CTRL_D, TAB = "\r", "\x1b\r", "\x03", "\x04", "\t"
PASTE, PASTED = "\x1b[200~", "\x1b[201~"


@pytest.fixture
def keys():
    """Keys that are pressed, whenever they are read."""
    with create_pipe_input() as found:
        yield found


def terminal(keys, path=None) -> Terminal:
    return Terminal(path, input=keys, output=DummyOutput())


def read(keys, typed: str, path=None) -> str:
    keys.send_text(typed)
    return terminal(keys, path).read()


def remembered(found: Terminal) -> list[str]:
    """What the arrow up brings, the latest first."""
    return list(found._session.history.load_history_strings())


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        (f"one{ENTER}", "one"),
        (f"one{ALT_ENTER}two{ENTER}", "one\ntwo"),
        (f"one\\{ENTER}two\\{ENTER}{ENTER}", "one\ntwo\n"),
        (f'"""{ENTER}one\\{ENTER}  two{ENTER}"""{ENTER}', '"""\none\\\n  two\n"""'),
        (f'"""one{ENTER}"""{ENTER}', '"""one\n"""'),
        (f"{PASTE}one\ntwo\r\nthree{PASTED}{ENTER}", "one\ntwo\nthree"),
        (f"look:{ALT_ENTER}{PASTE}a \\\nb\n{PASTED}!{ENTER}", "look:\na \\\nb\n!"),
        (f"never{CTRL_C}said{ENTER}", "said"),
    ],
)
def test_what_is_typed_is_one_message(keys, typed, text):
    assert read(keys, typed) == text


def test_enter_within_a_text_sends_all_of_it(keys):
    assert read(keys, f"abc\x1b[D\x1b[D{ENTER}") == "abc"


@pytest.mark.parametrize(
    ("text", "expected"), [("a", False), ("a\\", True), ('"""', True), ('"""a"""', False), ('a"""', False)]
)
def test_a_message_goes_on_behind_a_backslash_and_within_quotes(text, expected):
    assert goes_on(text) is expected


def test_ctrl_c_and_ctrl_d_at_an_empty_prompt_are_told_apart(keys):
    with pytest.raises(KeyboardInterrupt):
        read(keys, CTRL_C)
    with pytest.raises(EOFError):
        read(keys, CTRL_D)


def test_bytes_that_are_no_text_are_replaced(keys):
    keys.send_bytes(b"caf\xe9\r")
    assert terminal(keys).read() == "caf\ufffd"


def test_what_was_typed_comes_back_at_the_next_chat(keys, tmp_path):
    path = tmp_path / "typed"
    path.touch(0o600)
    assert read(keys, f"one{ALT_ENTER}two{ENTER}", path) == "one\ntwo"
    assert read(keys, f"/help{ENTER}", path) == "/help"
    assert remembered(terminal(keys, path)) == ["/help", "one\ntwo"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_without_a_file_it_comes_back_within_this_chat_alone(keys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = terminal(keys)
    keys.send_text(f"one{ENTER}two{ENTER}")
    assert [one.read(), one.read()] == ["one", "two"]
    assert remembered(one) == ["two", "one"]
    assert remembered(terminal(keys)) == []
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_once_and_ends_no_chat(keys, tmp_path, capsys):
    found = terminal(keys, tmp_path)  # a folder, which nobody writes into
    keys.send_text(f"one{ENTER}two{ENTER}")
    assert [found.read(), found.read()] == ["one", "two"]
    assert capsys.readouterr().err.count("what is typed is not kept any more") == 1


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("/re", ["/retry", "/reset"]),
        ("/", None),
        ("/set t", ["temperature", "top_p", "top_k"]),
        ("/set top_p 0.", []),
        ("/file sub", ["dir"]),
        ("/load subdir/", ["a.json", "b.json"]),
        ("/stats s", []),
        ("/xyzzy s", []),
        ("what is /re", []),
        ("re", []),
    ],
)
def test_tab_completes_commands_options_and_paths(tmp_path, monkeypatch, typed, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "subdir").mkdir()
    for name in ("a.json", "b.json"):
        (tmp_path / "subdir" / name).touch()
    found = [one.text for one in chat_terminal._Completer().get_completions(Document(typed), None)]
    assert found == (list(chat_terminal.COMMANDS) if expected is None else expected)


def test_tab_completes_what_is_typed(keys):
    assert read(keys, f"/sta{TAB}{ENTER}") == "/stats"


# -- notices ---------------------------------------------------------------------------------------


class Shown(io.StringIO):
    """A terminal's end of stderr."""

    def isatty(self):
        return True


def test_a_notice_while_somebody_types_is_shown_at_once_and_leaves_what_was_typed(keys, monkeypatch):
    shown, came = Shown(), threading.Event()
    shown.write = lambda text: (io.StringIO.write(shown, text), came.set() if "lost" in text else None)[0]
    monkeypatch.setattr(sys, "stderr", shown)

    def notice() -> None:
        # The prompt stays open until the notice was shown.
        while sys.stderr is shown:
            threading.Event().wait(0.01)
        print("worker w0 is ", end="", file=sys.stderr)
        print("lost", file=sys.stderr)
        assert came.wait(60)
        keys.send_text(f" end{ENTER}")

    keys.send_text("a beginning and")
    thread = threading.Thread(target=notice, daemon=True)
    thread.start()
    assert terminal(keys).read() == "a beginning and end"
    thread.join(60)
    assert shown.getvalue() == "worker w0 is lost\n"
    assert sys.stderr is shown


def test_a_notice_that_comes_as_the_prompt_closes_is_not_lost():
    shown = Shown()
    above = chat_terminal._AbovePrompt(shown)
    above.write("before\n")

    class Loop:
        @staticmethod
        def call_soon_threadsafe(*_arguments, **_options):
            """Never comes to it."""

    above._loop = Loop()
    above.write("while it closes\nand ")
    assert shown.getvalue() == "before\n"
    above.end()
    above.write("after")
    assert shown.getvalue() == "before\nwhile it closes\nand after"


def test_off_a_terminal_stderr_stays_as_it_is(keys, monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    assert read(keys, f"one{ENTER}") == "one"
    assert sys.stderr is log
