"""What the documents tell a reader to type exists: commands and flags, environment variables,
topologies, make targets, files.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import textwrap
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from dflash_moe import config
from dflash_moe.cli.main import run
from dflash_moe.config.settings import CONFIG_VARIABLE
from dflash_moe.topology import Topology
from tests.checks.sources import project_files

ROOT = Path(__file__).resolve().parents[3]
C_HEADER = ROOT / "csrc" / "c_interface" / "dflash_moe.h"
DOCUMENTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in project_files(ROOT, ".md")}


FENCED = re.compile(r"^( *)```\w*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^ {4,}\S.*\n|^\s*\n)+", re.MULTILINE)
# What a reader copies must run as it is copied: a shell ends a here-document at a line that begins
# with the word, and Python refuses indented lines.
NEEDS_FENCE = re.compile(r"<<'?END|^ *(?:import|from) \w", re.MULTILINE)


def _blocks(text: str) -> list[str]:
    """Fenced blocks as they are copied, but for the indentation of the list that they stand in, and
    indented ones.
    """
    fenced = [re.sub(rf"^{one[1]}", "", one[2], flags=re.MULTILINE) for one in FENCED.finditer(text)]
    return fenced + [textwrap.dedent(block) for block in INDENTED.findall(FENCED.sub("", text)) if block.strip()]


def _code_lines(text: str) -> list[str]:
    """Lines of code, continuation lines joined, comments and `$ ` prompts removed."""
    joined = "\n".join(_blocks(text)).replace("\\\n", " ")
    return [re.sub(r"\s#.*$", "", line.strip().removeprefix("$ ")) for line in joined.splitlines()]


def _commands() -> list[tuple[str, str]]:
    found = []
    for name, text in DOCUMENTS.items():
        for line in _code_lines(text):
            match = re.search(r"(?:^|\s|bin/)dflash-moe ([a-z].*)$", line)
            if match:
                found.append((name, match[1]))
    return found


@cache
def _help(words: tuple[str, ...]) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of `--help` behind these words."""
    shown, said = io.StringIO(), io.StringIO()
    with redirect_stdout(shown), redirect_stderr(said), mock.patch.dict(os.environ, {"COLUMNS": "200", "TERM": "dumb"}):
        code = run([*words, "--help"])
    return code, shown.getvalue(), said.getvalue()


@pytest.mark.parametrize(("document", "command"), _commands())
def test_documented_command_has_the_documented_flags(document: str, command: str) -> None:
    words = tuple(re.match(r"[a-z -]*[a-z]", command.split(" --")[0])[0].split()[:3])  # type: ignore[index]
    # The last words may be arguments.
    code, shown, said = next((found for count in (3, 2) if (found := _help(words[:count]))[0] == 0), _help(words[:1]))
    assert code == 0, f"{document}: dflash-moe {' '.join(words)}: {said[-300:]}"
    for flag in re.findall(r"--[a-z-]+", command):
        assert re.search(rf"{flag}\b", shown), f"{document}: dflash-moe {' '.join(words)} has no {flag}"


@pytest.mark.parametrize("document", sorted(DOCUMENTS))
def test_documented_environment_variables_exist(document: str) -> None:
    known = {CONFIG_VARIABLE, *(setting.environment for setting in config.SETTINGS if setting.environment)}
    # The C header has constants that look alike, and the variables by which its library is found.
    known |= set(re.findall(r"\bDFLASH_MOE_[A-Z_]+[A-Z]\b", C_HEADER.read_text(encoding="utf-8")))
    assert set(re.findall(r"\bDFLASH_MOE_[A-Z_]+[A-Z]\b", DOCUMENTS[document])) <= known


def _topologies() -> list[tuple[str, str]]:
    found = []
    for name, text in DOCUMENTS.items():
        found += [(name, block) for block in _blocks(text) if block.lstrip("\n").startswith("version: 1\n")]
    return found


def test_the_readme_shows_a_topology() -> None:
    assert "README.md" in {name for name, _ in _topologies()}


@pytest.mark.parametrize(("document", "text"), _topologies())
def test_documented_topology_parses(document: str, text: str) -> None:
    assert Topology.parse(text, source=document).workers


def test_documented_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for name, text in DOCUMENTS.items():
        for line in _code_lines(text):
            match = re.match(r"make ([a-z -]+)$", line.split("=")[0].rsplit(" ", 1)[0] if "=" in line else line)
            if match:
                assert set(match[1].split()) <= targets, f"{name}: {line}"


def _ends(module: str) -> list[str]:
    """What a module's path ends with: a folder is run by its __main__.py."""
    return ["/__main__.py"] if (ROOT / module.replace(".", "/")).is_dir() else [".py"]


@pytest.mark.parametrize("document", sorted(DOCUMENTS))
def test_files_named_in_the_documents_exist(document: str) -> None:
    named = re.findall(r"`((?:csrc|dflash_moe|tests|configs|docs|bench)/[\w./-]+\.\w+)`", DOCUMENTS[document])
    modules = re.findall(r"python\s+-m\s+(bench(?:\.\w+)+)", DOCUMENTS[document])
    named += [f"{module.replace('.', '/')}{end}" for module in modules for end in _ends(module)]
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("document", sorted(DOCUMENTS))
def test_what_indentation_would_break_is_fenced(document: str) -> None:
    broken = [block for block in INDENTED.findall(FENCED.sub("", DOCUMENTS[document])) if NEEDS_FENCE.search(block)]
    assert broken == []


@pytest.mark.parametrize(
    ("document", "said"), [("README.md", r"\(2, 192\)"), ("docs/howto/python_engine.md", r"True\n'.{10,}'")]
)
def test_the_programs_of_the_documents_run(document: str, said: str) -> None:
    """What stands between the fences is given to a shell, byte by byte."""
    pytest.importorskip("transformers")
    (copied,) = (
        block
        for block in re.findall(r"^ *```bash\n(.*?)^ *```$", DOCUMENTS[document], re.MULTILINE | re.DOTALL)
        if "<<'END'" in block
    )
    # This interpreter need not be the one that `make` installs.
    command = ["bash", "-e", "-c", copied.replace(".venv/bin/python", sys.executable)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr[-1000:]
    assert re.fullmatch(said, ended.stdout.strip()), ended.stdout
