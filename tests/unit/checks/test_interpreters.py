"""What `make pythons` makes of the interpreters that a machine has, with invented ones.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.checks import importable, interpreters

NAMED = """classifiers = [
    "Programming Language :: Python :: 3",
    "Programming Language :: Python :: 3.10",
    "Programming Language :: Python :: 3.12",
    "Programming Language :: Python :: 3.13",
]
"""


def invented(path: Path, answer: str, *, status: int = 0, fails_at: str = "") -> Path:
    """Makes a program that says of itself what `answer` says, and fails at one kind of command."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'#!/bin/sh\nif [ "$1" = -I ]; then echo "{answer}"; exit {status}; fi\n'
        f'case "$*" in *"{fails_at or "nothing"}"*) echo "it is broken"; exit 3;; esac\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def environment(tmp_path: Path) -> Mapping[str, str]:
    (tmp_path / "pyproject.toml").write_text(NAMED)
    return {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path)}


def test_interpreters_are_those_of_the_path_and_of_version_managers(tmp_path, environment):
    found = {
        "3.10": invented(tmp_path / "bin/python3.10", "CPython 3.10.1 own"),
        "3.12": invented(tmp_path / ".pyenv/versions/3.12.1/bin/python3", "CPython 3.12.1 own"),
        "3.13": invented(tmp_path / ".local/share/uv/python/cpython-3.13/bin/python3", "CPython 3.13.0 own"),
    }
    invented(tmp_path / ".pyenv/versions/3.9.1/bin/python3", "CPython 3.9.1 own")
    assert interpreters.find(interpreters.declared(tmp_path), environment) == found
    elsewhere = {"PYENV_ROOT": str(tmp_path / "none"), "UV_PYTHON_INSTALL_DIR": str(tmp_path / "none")}
    assert interpreters.find(("3.10", "3.12"), {**environment, **elsewhere}) == {"3.10": found["3.10"]}


def test_what_does_not_answer_is_no_cpython_or_an_environment_is_passed_over(tmp_path, environment):
    invented(tmp_path / "bin/python3", "CPython 3.12.4 environment")
    invented(tmp_path / "bin/python3.12", "pyenv: python3.12: command not found", status=127)
    invented(tmp_path / "bin/python3.13", "PyPy 3.13.0 own")
    (tmp_path / "bin/python3.10").mkdir()
    assert interpreters.find(("3.10", "3.12", "3.13"), environment) == {}
    assert interpreters.main(tmp_path, environment) == 1, "nothing was run"


def test_a_missing_one_is_named_and_a_failing_one_is_a_failure(tmp_path, environment, capsys):
    invented(tmp_path / "bin/python3.10", "CPython 3.10.1 own")
    assert interpreters.main(tmp_path, environment) == 0
    line = "Python: 3.10 passed; 3.12, 3.13 not on this machine, so not run\n"
    assert capsys.readouterr().out.endswith(line)
    assert (tmp_path / "build/pythons.txt").read_text() == line
    for command in ("compileall", "importable", "test_door"):
        invented(tmp_path / "bin/python3.12", "CPython 3.12.4 own", fails_at=command)
        assert interpreters.main(tmp_path, environment) == 1
        said = capsys.readouterr().out
        assert "it is broken" in said
        assert said.endswith("Python: 3.10 passed; 3.12 FAILED; 3.13 not on this machine, so not run\n")


def test_what_only_this_version_cannot_import_is_found(tmp_path, monkeypatch):
    package = tmp_path / "dflash_moe"
    package.mkdir()
    monkeypatch.setattr(importable.dflash_moe, "__path__", [str(package)])
    for name, text in {
        "fine": "import sys",
        "lacks_torch": "import torch_that_is_not_there",
        "lacks_core": "from dflash_moe import _core_that_is_not_there",
        "too_new": "from typing import NotThereYet",
        "wrong": "1 / 0",
    }.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.setattr(importable, "OTHERS", frozenset({"torch_that_is_not_there"}))
    monkeypatch.setattr(importable, "EXTENSIONS", ("_core_that_is_not_there",))
    count, found = importable.findings()
    del sys.modules["dflash_moe.fine"]
    assert count == 1
    assert [line.partition(":")[0] for line in found] == ["dflash_moe.too_new", "dflash_moe.wrong"]
