"""`dflash-moe chat` as a user has it: lines from a pipe and from a terminal, Ctrl-C in the midst of
an answer and at the prompt, and checkpoints that are not for conversations.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dflash_moe.cli import demo_model
from dflash_moe.cli.main import run

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


def chat(capsys, monkeypatch, lines, *arguments) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a conversation with these lines from a pipe."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
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


def test_a_conversation_from_a_pipe(capsys, monkeypatch, one_worker):
    lines = "Return a list of\n/stats\n\n and the other\n/stats\n/rest\n/reset\nReturn a list of\n/quit\nnever asked\n"
    given = ("--topology", one_worker, "--max-tokens", 20, "--system", "Read this.")
    code, out, err = chat(capsys, monkeypatch, lines, "--model", MODEL, *given)
    assert code == 0, err
    assert "conversation: 1 turns" in err
    assert "conversation: 2 turns" in err
    assert "conversation: 3 turns" not in err
    first, second = re.findall(r"its prompt: (\d+) tokens, (\d+) of them from the prefix cache(.*)", err)
    assert int(second[0]) > int(first[0]) + 15
    assert int(second[1]) >= 16
    assert second[2] == ""
    assert "/rest is no command; did you mean '/reset'?" in err
    assert "/quit  leaves; so does Ctrl-D" in err
    assert "the conversation is forgotten" in err
    assert re.search(r"^3 answers, \d+ tokens, [\d.]+ tokens/s; 1 worker over shared", err.splitlines()[-1])
    # The third answer is the first one again: nothing of what was between them is left.
    assert any(out.endswith(out[:size]) for size in range(30, len(out) // 2)), out


def test_demo_is_the_shipped_model_and_says_that_it_is_a_toy(capsys, monkeypatch, one_worker):
    monkeypatch.setattr(demo_model, "find_assets", lambda: MODEL.parent)
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
    def never(*_arguments, **_options):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("dflash_moe.engine.llm.LLM", never)
    given = ("--model", copied(tmp_path, template), "--topology", one_worker, "--system", "Be brief.")
    code, out, err = chat(capsys, monkeypatch, "The\n", *given)
    assert (code, out) == (2, "")
    assert words in err.splitlines()[-1]


def test_a_turn_that_cannot_be_computed_ends_a_pipe(capsys, monkeypatch, one_worker):
    code, _, err = chat(capsys, monkeypatch, "word " * 6000 + "\nnext\n", "--model", MODEL, "--topology", one_worker)
    assert code == 2
    assert re.search(
        r"the message alone makes a prompt of 6,0\d\d tokens, .* may have 4,096, .*; shorten it$", err.splitlines()[-1]
    )
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    assert run(["chat", "--model", str(MODEL), "--topology", str(one_worker)]) == 2
    assert "stdin: not UTF-8 text" in capsys.readouterr().err.splitlines()[-1]


def test_an_answer_gets_the_room_that_is_left(capsys, monkeypatch, one_worker):
    # 4,090 of the model's 4,096 positions.
    lines = " list" * 4090 + "\n"
    code, _, err = chat(capsys, monkeypatch, lines, "--model", MODEL, "--topology", one_worker, *ENDLESS)
    assert code == 0, err
    assert re.search(r"the answer ends after [1-6] tokens, which is the limit", err)


def test_the_context_that_is_allowed_bounds_answers_and_leaves_out_the_oldest_turns(capsys, monkeypatch, one_worker):
    lines = "".join(f"word {'again ' * 20}{number}\n" for number in range(6))
    code, _, err = chat(capsys, monkeypatch, lines, "--model", MODEL, "--topology", one_worker, "--max-context", 128, *ENDLESS)
    assert code == 0, err
    assert err.count("the conversation is longer than 128 tokens, which --max-context allows (engine.max_context)") == 1
    assert err.count("the answer ends after") == 6


# -- Ctrl-C ----------------------------------------------------------------------------------------


class Terminal:
    """A `chat` at a terminal of its own."""

    def __init__(self, topology: Path) -> None:
        command = [sys.executable, "-m", "dflash_moe", "chat", "--model", str(MODEL), "--topology", str(topology), *ENDLESS]
        self.master, slave = pty.openpty()
        # The terminal is the child's own, so that Ctrl-C goes to it and to no one else.
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, *command], stdin=slave, stdout=slave, stderr=slave, cwd=ROOT,
            env={**os.environ, "TERM": "xterm"}, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.shown = ""

    def wait_for(self, text: str) -> None:
        """Reads until this text was shown, and forgets it and what was before it."""
        deadline = time.monotonic() + WAIT_S
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} was not shown; the end is {self.shown[-2000:]!r}"
            if select.select([self.master], [], [], 1.0)[0]:
                self.shown += os.read(self.master, 65536).decode("utf-8", "replace")
        self.shown = self.shown[self.shown.index(text) + len(text) :]

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt_at_the_prompt(self) -> None:
        """Presses Ctrl-C where the program waits for a key. A signal that comes after the prompt is
        shown and before `select` waits is kept by Python's readline until the next key.
        """
        self.wait_for("> ")
        deadline, num_asleep = time.monotonic() + WAIT_S, 0
        main_thread = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/stat")
        while num_asleep < 10:
            assert time.monotonic() < deadline, "the program does not come to rest at its prompt"
            is_asleep = main_thread.read_text().rpartition(")")[2].split()[0] == "S"
            num_asleep = num_asleep + 1 if is_asleep else 0
            time.sleep(0.02)
        self.type(INTERRUPT)

    def ended(self) -> int:
        """The exit code, once it has ended."""
        deadline = time.monotonic() + WAIT_S
        while self.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if select.select([self.master], [], [], 0.2)[0]:
                    self.shown += os.read(self.master, 65536).decode("utf-8", "replace")
        return self.process.wait(1)


_TAKE_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
INTERRUPT, END_OF_FILE = "\x03", "\x04"


@pytest.fixture
def terminal(one_worker):
    made = Terminal(one_worker)
    yield made
    with contextlib.suppress(ProcessLookupError):
        os.killpg(made.process.pid, signal.SIGKILL)
    made.process.wait(WAIT_S)
    os.close(made.master)


def test_ctrl_c_stops_an_answer_and_a_second_one_leaves(terminal):
    terminal.wait_for("\n> ")
    terminal.type("Return\n")
    # The line below the text: the answer has begun.
    terminal.wait_for("tokens/s")
    terminal.type(INTERRUPT)
    terminal.wait_for("stopped")
    terminal.wait_for("> ")
    terminal.type("/stats\n")
    terminal.wait_for("conversation: 1 turns")
    terminal.interrupt_at_the_prompt()
    terminal.wait_for("Ctrl-C again leaves")
    terminal.interrupt_at_the_prompt()
    assert terminal.ended() == 130
    assert "Traceback" not in terminal.shown


def test_ctrl_d_leaves_a_terminal(terminal):
    terminal.wait_for("\n> ")
    terminal.type(END_OF_FILE)
    assert terminal.ended() == 0


def test_a_signal_stops_the_answer_to_a_line_of_a_pipe(one_worker):
    command = [sys.executable, "-m", "dflash_moe", "chat", "--model", str(MODEL), "--topology", str(one_worker), *ENDLESS]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
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
