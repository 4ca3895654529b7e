"""`dflash-moe chat` as a user has it: what comes from a pipe or is typed at a terminal, Ctrl-C in
the midst of an answer and at the prompt, and checkpoints that are not for conversations.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dflash_moe.cli import model_path
from dflash_moe.cli.main import run
from dflash_moe.engine.chat_history import ChatHistory

pytestmark = pytest.mark.transformers
ROOT = Path(__file__).parents[2]
MODEL = ROOT / "bench" / "demo_model" / "dflash_moe_demo" / "model"
TOPOLOGY = "version: 1\nworkers:\n  - {name: w0, backend: cpu, threads: 1}\n"
WAIT_S = 120.0
# Every token is about as likely as another one, so that an answer goes on for long.
ENDLESS = ("--temperature", "100", "--max-tokens", "4000")


@pytest.fixture
def one_worker(tmp_path):
    path = tmp_path / "one.yaml"
    path.write_text(TOPOLOGY)
    return path


def chat(capsys, monkeypatch, piped, *arguments) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a conversation with what comes from a pipe."""
    raw = piped if isinstance(piped, bytes) else piped.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
    code = run(["chat", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def copied(tmp_path, template: str | None) -> Path:
    """The demo's model with another chat template, or none."""
    made = tmp_path / "model"
    shutil.copytree(MODEL, made)
    (made / "chat_template.jinja").unlink()
    if template is not None:
        (made / "chat_template.jinja").write_text(template)
    return made


def test_lines_of_a_pipe_are_turns_where_that_is_asked_for(capsys, monkeypatch, one_worker, tmp_path):
    lines = "Return a list of\n/stats\n\n and the other\n/stats\n/reset\nReturn a list of\n/save FILE\n/quit\nnever asked\n"
    lines = lines.replace("FILE", str(tmp_path / "talk.json"))
    given = ("--turns", "--topology", one_worker, "--max-tokens", 20, "--system", "Read this.")
    code, out, err = chat(capsys, monkeypatch, lines, "--model", MODEL, *given)
    assert code == 0, err
    assert err.startswith("starting ")
    assert "conversation: 1 turn, " in err
    assert "conversation: 2 turns, " in err
    first, second = re.findall(r"its prompt: (\d+) tokens, (\d+) of them from the prefix cache(.*)", err)
    assert int(second[0]) > int(first[0]) + 15
    assert int(second[1]) >= 16
    assert second[2] == ""
    assert "the conversation is forgotten" in err
    assert re.search(r"^3 answers, \d+ tokens, [\d.]+ tokens/s", err.splitlines()[-1])
    # The third answer is the first one again: nothing of what was between them is left.
    assert any(out.endswith(out[:size]) for size in range(30, len(out) // 2)), out
    saved = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["role"] for message in saved] == ["system", "user", "assistant"]
    assert out.endswith(saved[2]["content"] + "\n")


def test_a_line_that_cannot_be_done_ends_them(capsys, monkeypatch, one_worker):
    given = ("--turns", "--model", MODEL, "--topology", one_worker)
    code, out, err = chat(capsys, monkeypatch, "/rest\nnever asked\n", *given)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == "/rest is no command; did you mean '/reset'?; /help lists them"


def test_all_of_a_pipe_is_one_message(capsys, monkeypatch, one_worker):
    made: list[str] = []
    asked = ChatHistory.ask
    monkeypatch.setattr(ChatHistory, "ask", lambda self, text, *rest: made.append(text) or asked(self, text, *rest))
    given = ("--model", MODEL, "--topology", one_worker, "--max-tokens", 3)
    code, out, err = chat(capsys, monkeypatch, b"\n  Return\n/reset\ncaf\xe9\n", *given)
    assert code == 0, err
    assert made[1:] == ["  Return\n/reset\ncaf\ufffd"]
    assert out.endswith("\n")
    assert "stdin: not UTF-8 text in one place, where \ufffd stands now" in err
    assert re.search(r"^1 answer, 3 tokens", err.splitlines()[-1])


def test_an_empty_pipe_is_refused_before_anything_is_loaded(capsys, monkeypatch, one_worker):
    monkeypatch.setattr("dflash_moe.engine.llm.LLM", never_loaded)
    code, out, err = chat(capsys, monkeypatch, " \n", "--model", MODEL, "--topology", one_worker)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == "stdin: there is no message; pipe a text in, or start `chat` at a terminal"


def never_loaded(*_arguments, **_options):
    raise AssertionError("the model was loaded")


def test_demo_is_the_shipped_model_and_says_that_it_is_a_toy(capsys, monkeypatch, one_worker):
    monkeypatch.setattr(model_path, "find_assets", lambda: MODEL.parent)
    code, out, err = chat(capsys, monkeypatch, "The\n", "--model", "demo", "--topology", one_worker, "--max-tokens", 3)
    assert code == 0, err
    assert out.endswith("\n")
    assert "the demo model is a toy" in err
    assert "the answer ends after 3 tokens, which is the limit" in err


def test_what_the_checkpoint_recommends_is_taken_and_said(capsys, monkeypatch, one_worker, tmp_path):
    made = copied(tmp_path, "{{ messages[-1].content }}")
    (made / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.7, "top_k": 20, "eos_token_id": 0}')
    given = ("--model", made, "--topology", one_worker, "--max-tokens", 2, "--top-k", 5)
    code, _, err = chat(capsys, monkeypatch, "The\n", *given)
    assert code == 0, err
    assert "sampling as the checkpoint recommends: temperature 0.7; options" in err


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "the model has no chat template, so it was not made for conversations; use `dflash-moe generate`"),
        ("{% for a in b %}", "does not compile: line 1: Unexpected end of template"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "over 1 s of processor time"),
        ("{{ 'a' * 10 ** 9 }}", "over 256 MiB of memory"),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}",
            "refuses this conversation: no sys",
        ),
    ],
)
def test_a_template_that_cannot_serve_is_told_before_anything_is_loaded(
    capsys, monkeypatch, one_worker, tmp_path, template, words
):
    monkeypatch.setattr("dflash_moe.engine.llm.LLM", never_loaded)
    given = ("--model", copied(tmp_path, template), "--topology", one_worker, "--system", "Be brief.")
    code, out, err = chat(capsys, monkeypatch, "The\n", *given)
    assert (code, out) == (2, "")
    assert words in err.splitlines()[-1]


def test_a_message_that_is_too_long_says_how_long_it_may_be(capsys, monkeypatch, one_worker):
    code, _, err = chat(capsys, monkeypatch, "word " * 6000 + "\n", "--model", MODEL, "--topology", one_worker)
    assert code == 2
    assert re.search(
        r"the message alone makes a prompt of 6,0\d\d tokens, .* may have 4,096, .*; shorten it$", err.splitlines()[-1]
    )


def test_an_answer_gets_the_room_that_is_left(capsys, monkeypatch, one_worker):
    # 4,090 of the model's 4,096 positions.
    message = " list" * 4090 + "\n"
    code, _, err = chat(capsys, monkeypatch, message, "--model", MODEL, "--topology", one_worker, *ENDLESS)
    assert code == 0, err
    assert re.search(r"the answer ends after [1-6] tokens, which is the limit", err)


def test_the_context_that_is_allowed_bounds_answers_and_leaves_out_the_oldest_turns(capsys, monkeypatch, one_worker):
    lines = "".join(f"word {'again ' * 20}{number}\n" for number in range(6))
    given = ("--turns", "--model", MODEL, "--topology", one_worker, "--max-context", 128, *ENDLESS)
    code, _, err = chat(capsys, monkeypatch, lines, *given)
    assert code == 0, err
    assert err.count("the conversation is longer than 128 tokens, which --max-context allows (engine.max_context)") == 1
    assert err.count("the answer ends after") == 6
    code, _, err = chat(capsys, monkeypatch, lines, *given, "--no-shift")
    assert code == 2
    assert "without --no-shift its oldest turns are left out" in err.splitlines()[-1]


# -- at a terminal ---------------------------------------------------------------------------------


class Terminal:
    """A `chat` at a terminal of its own."""

    def __init__(self, folder: Path, topology: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "dflash_moe", "chat", "--model", str(MODEL), "--topology", str(topology), *arguments]
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        # The terminal is the child's own, so that Ctrl-C goes to it and to no one else.
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, *command], stdin=slave, stdout=slave, stderr=slave, cwd=ROOT,
            env={**os.environ, "TERM": "xterm", "XDG_STATE_HOME": str(folder / "state")}, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.shown = self.shown_so_far = ""

    def _read(self) -> None:
        found = os.read(self.master, 65536).decode("utf-8", "replace")
        self.shown += found
        self.shown_so_far += found

    def wait_for(self, text: str) -> None:
        """Reads until this text was shown, and forgets it and what was before it."""
        deadline = time.monotonic() + WAIT_S
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} was not shown; the end is {self.shown[-2000:]!r}"
            if select.select([self.master], [], [], 1.0)[0]:
                self._read()
        self.shown = self.shown[self.shown.index(text) + len(text) :]

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def workers(self) -> list[int]:
        """The processes that it has started with a name."""
        threads = Path(f"/proc/{self.process.pid}/task").iterdir()
        children = [child for thread in threads for child in (thread / "children").read_text().split()]
        return [int(child) for child in children if b"--name\0" in Path(f"/proc/{child}/cmdline").read_bytes()]

    def ended(self) -> int:
        """The exit code, once it has ended."""
        deadline = time.monotonic() + WAIT_S
        while self.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if select.select([self.master], [], [], 0.2)[0]:
                    self._read()
        return self.process.wait(1)


_TAKE_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
ENTER, INTERRUPT, END_OF_FILE = "\r", "\x03", "\x04"
# A terminal is asked to mark what is pasted as long as a prompt is open.
PROMPT = "\x1b[?2004h"
PASTE, PASTED = "\x1b[200~", "\x1b[201~"


@pytest.fixture
def at_terminal(one_worker, tmp_path):
    made: list[Terminal] = []

    def begin(*arguments: str) -> Terminal:
        made.append(Terminal(tmp_path, one_worker, *arguments))
        return made[-1]

    yield begin
    for one in made:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait(WAIT_S)
        os.close(one.master)


def test_what_is_pasted_is_one_message_and_ctrl_c_stops_clears_and_leaves(at_terminal, tmp_path):
    terminal = at_terminal(*ENDLESS, "--no-history")
    terminal.wait_for("importing torch and transformers")
    terminal.wait_for(PROMPT)
    assert "Loading weights" not in terminal.shown_so_far, "a bar of another library is shown"
    terminal.type(f"{PASTE}Return\na list{PASTED}{ENTER}")
    # The line below the text: the answer has begun.
    terminal.wait_for("tokens/s")
    terminal.type(INTERRUPT)
    terminal.wait_for("stopped")
    terminal.wait_for(PROMPT)
    terminal.type(f"never asked{INTERRUPT}{INTERRUPT}")
    terminal.wait_for("Ctrl-C again leaves")
    terminal.wait_for(PROMPT)
    terminal.type(f"/stats{ENTER}")
    terminal.wait_for("conversation: 1 turn,")
    terminal.wait_for(PROMPT)
    # Whatever was typed in between, the next one is the first again.
    terminal.type(INTERRUPT)
    terminal.wait_for("Ctrl-C again leaves")
    terminal.wait_for(PROMPT)
    terminal.type(INTERRUPT)
    assert terminal.ended() == 130
    assert "Traceback" not in terminal.shown
    assert "error" not in terminal.shown
    assert not (tmp_path / "state").exists()


def test_a_lost_worker_is_told_above_what_is_typed_which_stays(at_terminal, tmp_path):
    terminal = at_terminal("--max-tokens", "3")
    terminal.wait_for(PROMPT)
    terminal.type("Return a")
    terminal.wait_for("Return a")
    (worker,) = terminal.workers()
    os.kill(worker, signal.SIGKILL)
    terminal.wait_for("worker w0")
    # What was typed is drawn again below.
    terminal.wait_for("Return a")
    terminal.type(f" list{ENTER}")
    terminal.wait_for("the answer ends after 3 tokens")
    terminal.wait_for(PROMPT)
    terminal.type(f"/save {tmp_path}/talk.json{ENTER}")
    terminal.wait_for("saved: 1 turn")
    terminal.wait_for(PROMPT)
    terminal.type(END_OF_FILE)
    assert terminal.ended() == 0
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert saved["messages"][0] == {"role": "user", "content": "Return a list"}
    typed = tmp_path / "state" / "dflash-moe" / "chat_history"
    assert "\n+Return a list\n" in typed.read_text()
    assert typed.stat().st_mode & 0o777 == 0o600


def test_a_signal_stops_the_answer_to_a_line_of_a_pipe(one_worker):
    command = [sys.executable, "-m", "dflash_moe", "chat", "--model", str(MODEL), "--topology", str(one_worker), *ENDLESS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*command, "--turns"], cwd=ROOT, **pipes)
    try:
        process.stdin.write(b"Return\n")
        process.stdin.flush()
        assert select.select([process.stdout], [], [], WAIT_S)[0]
        os.read(process.stdout.fileno(), 100)
        process.send_signal(signal.SIGINT)
        said = b""
        while b"stopped" not in said:
            assert select.select([process.stderr], [], [], WAIT_S)[0], said
            said += os.read(process.stderr.fileno(), 4096)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert err.splitlines()[-1] == b"interrupted"
