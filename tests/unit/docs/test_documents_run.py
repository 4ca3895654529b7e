"""What the documents tell a reader to type exists: commands and flags, environment variables,
topologies, make targets, files.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest

from dflash_moe import config
from dflash_moe.config.settings import CONFIG_VARIABLE
from dflash_moe.topology import Topology
from tests.checks.sources import project_files

ROOT = Path(__file__).resolve().parents[3]
C_HEADER = ROOT / "csrc" / "c_interface" / "dflash_moe.h"
DOCUMENTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in project_files(ROOT, ".md")}


def _code_lines(text: str) -> list[str]:
    """Lines of indented and fenced blocks, continuation lines joined, comments and `$ ` prompts
    removed.
    """
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    fenced = [line for block in blocks for line in block.splitlines()]
    indented = [line for line in text.splitlines() if line.startswith("    ")]
    joined = "\n".join([*fenced, *indented]).replace("\\\n", " ")
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
def _help(words: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dflash_moe", *words, "--help"]
    environment = {**os.environ, "COLUMNS": "200", "TERM": "dumb"}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)


@pytest.mark.parametrize(("document", "command"), _commands())
def test_documented_command_has_the_documented_flags(document: str, command: str) -> None:
    words = tuple(re.match(r"[a-z -]*[a-z]", command.split(" --")[0])[0].split()[:3])  # type: ignore[index]
    # The last words may be arguments.
    shown = next((found for count in (3, 2) if (found := _help(words[:count])).returncode == 0), _help(words[:1]))
    assert shown.returncode == 0, f"{document}: dflash-moe {' '.join(words)}: {shown.stderr[-300:]}"
    for flag in re.findall(r"--[a-z-]+", command):
        assert re.search(rf"{flag}\b", shown.stdout), f"{document}: dflash-moe {' '.join(words)} has no {flag}"


@pytest.mark.parametrize("document", sorted(DOCUMENTS))
def test_documented_environment_variables_exist(document: str) -> None:
    known = {CONFIG_VARIABLE, *(setting.environment for setting in config.SETTINGS if setting.environment)}
    # The C header has constants that look alike, and the variables by which its library is found.
    known |= set(re.findall(r"\bDFLASH_MOE_[A-Z_]+[A-Z]\b", C_HEADER.read_text(encoding="utf-8")))
    assert set(re.findall(r"\bDFLASH_MOE_[A-Z_]+[A-Z]\b", DOCUMENTS[document])) <= known


def _topologies() -> list[tuple[str, str]]:
    found = []
    for name, text in DOCUMENTS.items():
        for block in re.findall(r"(?:^ {4,}\S.*\n|^\s*\n)+", text, re.MULTILINE):
            lines = [line for line in block.splitlines() if line.strip()]
            if lines and lines[0].strip() == "version: 1":
                indent = len(lines[0]) - len(lines[0].lstrip())
                found.append((name, "\n".join(line[indent:] for line in lines) + "\n"))
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


@pytest.mark.parametrize("document", sorted(DOCUMENTS))
def test_files_named_in_the_documents_exist(document: str) -> None:
    named = re.findall(r"`((?:csrc|dflash_moe|tests|configs|docs|bench)/[\w./-]+\.\w+)`", DOCUMENTS[document])
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize(
    ("document", "said"), [("README.md", r"\(2, 192\)"), ("docs/howto/python_engine.md", r"True\n'.{10,}'")]
)
def test_the_programs_of_the_documents_run(document: str, said: str) -> None:
    pytest.importorskip("transformers")
    program = textwrap.dedent(re.split(r"\n *END\n", DOCUMENTS[document].partition("python - <<'END'\n")[2])[0])
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr[-1000:]
    assert re.fullmatch(said, ended.stdout.strip()), ended.stdout
