"""`--help` of every command says what each option means, what it takes and what holds without it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re

import pytest

from dflash_moe.cli import main
from tests.unit.cli.test_any_value import commands

# Words of which one has to stand in the help of a number.
UNITS = (
    "tokens", "bytes", "elements", "rounds", "seconds", "seed", "number", "experts", "layers", "fraction", "alternations",
    "random", "threads",
)  # fmt: skip
UNITLESS = {"--temperature"}


def options_of(command):
    return [
        parameter
        for parameter in command.params
        if parameter.param_type_name == "option" and not parameter.hidden and "--help" not in parameter.opts
    ]


@pytest.mark.parametrize("words", sorted(commands()), ids=" ".join)
def test_every_option_is_explained_with_default_and_unit(words, capsys, monkeypatch):
    command = commands()[words]
    assert command.help
    monkeypatch.setenv("COLUMNS", "100")
    assert main.run([*words, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for parameter in options_of(command):
        flag = parameter.opts[0]
        assert parameter.help, f"{flag}: no help"
        text = shown[shown.index(f" {flag} ") :]
        if parameter.is_flag and not parameter.secondary_opts:
            continue
        assert "[default: " in text[: len(parameter.help) + 200] or parameter.required, f"{flag}: no default is shown"
        if re.match(rf" {flag} <?(?:int|float|INTEGER|FLOAT)", text) and flag not in UNITLESS:
            assert any(word in parameter.help.lower() for word in UNITS), f"{flag}: its number has no unit: {parameter.help}"


@pytest.mark.parametrize("words", sorted(commands()), ids=" ".join)
def test_every_argument_is_explained(words):
    for parameter in commands()[words].params:
        assert getattr(parameter, "help", None) or parameter.hidden
