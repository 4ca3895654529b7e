"""Help says what each option means, what it takes and what holds without it, in groups; `help
COMMAND` says all of it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re

import pytest

from dflash_moe.cli import help_page, main, root
from dflash_moe.config import SETTINGS
from tests.unit.cli.test_any_value import commands

# Words of which one has to stand in the help of a number.
UNITS = (
    "tokens", "bytes", "elements", "rounds", "seconds", "seed", "number", "experts", "layers", "fraction", "alternations",
    "random", "threads", "probability",
)  # fmt: skip
UNITLESS = {"--temperature"}
# Commands whose everyday options are in the first groups.
EVERYDAY = ("chat", "generate")


def options_of(command):
    return [
        parameter
        for parameter in command.params
        if parameter.param_type_name == "option" and not parameter.hidden and "--help" not in parameter.opts
    ]


def shown(capsys, *words):
    assert main.run(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def long_name(parameter):
    return next(name for name in parameter.opts if name.startswith("--"))


@pytest.mark.parametrize("words", sorted(commands()), ids=" ".join)
def test_every_option_is_explained_with_default_and_unit(words, capsys, monkeypatch):
    command = commands()[words]
    assert command.help
    monkeypatch.setenv("COLUMNS", "100")
    whole = " ".join(shown(capsys, "help", *words).split())
    short = " ".join(shown(capsys, *words, "--help").split())
    for parameter in options_of(command):
        flag = long_name(parameter)
        assert parameter.help, f"{flag}: no help"
        assert f" {flag} " in short, f"{flag} is not in --help"
        text = whole[whole.index(f" {flag} ") :]
        if parameter.is_flag and not parameter.secondary_opts:
            continue
        assert "[default: " in text[: len(parameter.help) + 200] or parameter.required, f"{flag}: no default is shown"
        if re.match(rf" {flag} (?:<?(?:int|float|INTEGER|FLOAT)|N |X (?!Y))", text) and flag not in UNITLESS:
            assert any(word in parameter.help.lower() for word in UNITS), f"{flag}: its number has no unit: {parameter.help}"


@pytest.mark.parametrize("words", sorted(commands()), ids=" ".join)
def test_every_argument_is_explained(words):
    for parameter in commands()[words].params:
        assert getattr(parameter, "help", None) or parameter.hidden


def test_all_commands_fit_a_screen_of_24_lines(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = shown(capsys, "--help").splitlines()
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines)
    assert not any("..." in line for line in lines[1:]), "a text is cut"
    for name in root.NAMES:
        assert any(line.startswith(f"  {name} ") for line in lines)


@pytest.mark.parametrize("command", EVERYDAY)
def test_everyday_options_fit_the_first_screen_and_the_rest_follows_in_groups(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = shown(capsys, command, "--help").splitlines()
    headings = [line.rstrip(":") for line in lines if re.fullmatch(r"[A-Z][a-z]+:", line)]
    assert headings == ["Model", "Sampling", "Placement", "Network", "More"]
    assert lines.index("Placement:") <= 30
    assert len(lines) <= 66
    assert lines[-1] == f"`dflash-moe help {command}` says all of each: values, variables, reasons."


@pytest.mark.parametrize("columns", [60, 80, 132, 160])
def test_help_ends_where_the_terminal_does(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in (("--help",), ("generate", "--help"), ("help", "generate"), ("help", "worker")):
        widest = max(len(line) for line in shown(capsys, *words).splitlines())
        assert widest <= columns
        if words == ("help", "generate"):
            assert widest > columns - 12, "the width of the terminal is not used"


def test_a_setting_has_its_values_and_its_variable_in_the_whole_help_only(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "600")
    whole, short = shown(capsys, "help", "verify"), shown(capsys, "verify", "--help")
    for setting in SETTINGS:
        if setting.flag:
            assert f"{setting.help}. Allowed: {setting.allowed} [default: {setting.default_text}" in whole
            assert setting.flag in short
        if setting.flag and setting.environment:
            assert f"environment {setting.environment}]" in whole
            assert setting.environment not in short


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Tokens at most: per prompt.  [default: 64; x>=1]", "Tokens at most [default: 64]"),
        ("Where to write; a new name [default: nowhere].", "Where to write"),
        ("tcp://HOST:PORT (0: any free port) or unix:///PATH [default: the topology's].",
         "tcp://HOST:PORT (0: any free port) or unix:///PATH [default: the topology's]"),
        ("A GGUF file, or `demo`. Any part of it.  [required]", "A GGUF file, or `demo` [required]"),
        ("TLS: with a key. Allowed: auto, on [default: auto: on beyond loopback; environment X_Y].",
         "TLS [default: auto: on beyond loopback]"),
        ("No facts", "No facts"),
    ],
)  # fmt: skip
def test_the_short_form_has_the_first_clause_and_the_default(text, expected):
    assert help_page.brief(text) == expected


def test_help_of_groups_and_of_their_commands(capsys):
    assert "  compare " in shown(capsys, "help", "bench")
    assert "environment DFLASH_MOE_EXPERT_COMPUTE_IPC_MODE" in " ".join(shown(capsys, "help", "bench", "prefill").split())
    assert shown(capsys, "help") == shown(capsys, "--help")


@pytest.mark.parametrize(
    ("words", "last"),
    [
        (("help", "run"), "No such command 'run': `chat` talks with a model, `generate` completes a prompt"),
        (("help", "generate", "fast"), "`dflash-moe generate` has no commands of its own"),
        (("help", "bench", "prefil"), "No such command 'prefil'; did you mean `prefill`?"),
    ],
)
def test_help_of_what_is_no_command_says_so(words, last, capsys):
    assert main.run(words) == 2
    assert capsys.readouterr().err.splitlines()[-1] == last
