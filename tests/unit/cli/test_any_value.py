"""Every option of every command takes any text, or refuses it in a sentence: no value that a user
can type ends in a traceback or in an error that nobody wrote.

What a command would do with values that are allowed is replaced by a stop, so that only the
handling of its options runs.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import functools

import pytest
import typer.main

from bench.lab import __main__ as lab
from dflash_moe.cli import main, root
from dflash_moe.errors import DflashError

EDGES = (
    "", " ", "-1", "0", "1", "4097", "9" * 30, "1e400", "nan", "x", "x" * 5000, "a,b", ",", "1,2", "-", "\udcff",
    "~nobody-here/x", "/proc/self/mem", "/dev/null/x", "tcp://", "unix://", "tcp://[::1]:99999", "²",
)  # fmt: skip
# What each command would start once its options are read.
STOPS = (
    "dflash_moe.bench.ipc.run_ipc",
    "dflash_moe.bench.prefill.run_prefill",
    "dflash_moe.bench.decode.run_decode",
    "bench.lab.prefill_cards.run_prefill_cards",
    "bench.lab.doorbell.run_doorbell",
    "bench.lab.device_steps.run_device_steps",
    "dflash_moe.bench.experts.run_experts",
    "dflash_moe.bench.streaming.streaming.run_streaming",
    "bench.lab.attention.run_attention",
    "dflash_moe.bench.device_experts.run_device_experts",
    "dflash_moe.experts.expert_runtime.ExpertRuntime.start",
    "dflash_moe.proofs.verify.verify",
    "dflash_moe.workers.process.run_hand_started_worker",
    "dflash_moe.workers.process.run_started_worker",
    "dflash_moe.model.make.make_checkpoint",
    "dflash_moe.cli.doctor.doctor.examine",
    "dflash_moe.cli.simulate._run_many",
    "dflash_moe.cli.simulate._replay",
    "dflash_moe.protocol.control.ask",
    "dflash_moe.protocol.control.find_host",
)
SENTENCE = "stopped by the test"
CODES = {0, 1, 2}
# The kinds of text that found something; the sweep of all of them is long.
TELLING = ("", "-1", "9" * 30, "x" * 5000, "\udcff", "/proc/self/mem")

pytestmark = pytest.mark.transformers


@pytest.fixture
def stopped(monkeypatch, tmp_path):
    """Nothing is started, and files are written into a folder of the test's own."""

    def stop(*_arguments, **_options):
        raise DflashError(SENTENCE)

    for name in STOPS:
        monkeypatch.setattr(name, stop)
    monkeypatch.chdir(tmp_path)
    nobody = f"{{name: w0, address: 'unix://{tmp_path}/none.sock'}}"
    (tmp_path / "good.yaml").write_text(f"version: 1\nworkers: [{nobody}]\n")
    (tmp_path / "model").mkdir()


@functools.cache
def built(build):
    """An application made of its functions, which takes five times as long as to read a line."""
    return typer.main.get_command(build())


@functools.cache
def commands(build=root.build_app):
    """(words, command) of every command of an application that does something."""

    def walk(words, command):
        if not hasattr(command, "list_commands"):
            yield words, command
            return
        for name in command.list_commands(None):
            yield from walk((*words, name), command.get_command(None, name))

    return dict(walk((), built(build)))


# The commands of the package, and those that measure its parts.
PROGRAMS = {words: build for build in (lab.build_app, root.build_app) for words in commands(build)}
GOOD = {"--model": "model", "--topology": "good.yaml", "--name": "w0", "--arch": "mixtral", "--out": "out.png", "--prompt": "x"}


def arguments_of(words, command, flag, value):
    """A command line that is right but for `flag`."""
    given = list(words)
    for parameter in command.params:
        name = next((opt for opt in parameter.opts if opt.startswith("--")), None)
        if name != flag and name in GOOD and (parameter.required or name in ("--topology", "--prompt")):
            given.append(f"{name}={GOOD[name]}")
        elif parameter.param_type_name == "argument":
            given.append(value if flag is None else "model")
    return [*given, f"{flag}={value}"] if flag is not None else given


def options_of(command):
    found = [opt for parameter in command.params for opt in parameter.opts if opt.startswith("--")]
    takes_value = {opt: not getattr(p, "is_flag", False) for p in command.params for opt in p.opts}
    has_argument = any(parameter.param_type_name == "argument" for parameter in command.params)
    return [opt for opt in found if takes_value[opt] and opt != "--help"] + ([None] if has_argument else [])


def check_values(words, capsys, values):
    build = PROGRAMS[words]
    command = commands(build)[words]
    for flag in options_of(command):
        for value in values:
            code = main.run(arguments_of(words, command, flag, value), build=lambda: built(build))
            last = capsys.readouterr().err.splitlines()[-1:]
            assert code in CODES, (flag, value, last)
            assert code == 0 or last, (flag, value)
            assert not any(line.startswith(("unexpected", "Traceback")) for line in last), (flag, value, last)


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize("words", sorted(PROGRAMS), ids=" ".join)
def test_any_value_of_any_option_is_taken_or_refused_in_a_sentence(words, capsys):
    check_values(words, capsys, TELLING)


@pytest.mark.long
@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize("words", sorted(PROGRAMS), ids=" ".join)
def test_every_edge_of_every_option_is_taken_or_refused_in_a_sentence(words, capsys):
    check_values(words, capsys, EDGES)
