"""`.ci/compile` says how far a build is, and hides nothing that a compiler says.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[3] / ".ci" / "compile"
# As CMake writes it: a rule that looks for new sources and then renews the configuration, which a
# dry run takes for out of date.
BUILD = """rule compile
  command = echo "a warning of $out"; $does
  description = Building CXX object $out

rule verify
  command = true
  restat = 1
rule renew
  command = touch build.ninja
  generator = 1

build always: phony
build globs: verify always
build build.ninja: renew globs
  pool = console

build a.o: compile
  does = touch a.o
build b.o: compile
  does = {does}
build program: phony a.o b.o
"""


def compiled(folder: Path, does: str) -> subprocess.CompletedProcess[str]:
    (folder / "globs").touch()
    (folder / "build.ninja").write_text(BUILD.replace("{does}", does))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if shutil.which("ninja", path=path) is None:
        pytest.skip("needs ninja")
    environment = {**os.environ, "PATH": path, "NINJA_STATUS": "another one"}
    command = [sys.executable, str(PROGRAM), str(folder), "2", "program"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


def test_a_build_says_what_it_compiled_and_a_second_one_nothing(tmp_path) -> None:
    first = compiled(tmp_path, "touch b.o")
    assert first.returncode == 0, first.stderr
    assert "    compiled 2 files in 0:" in first.stdout
    assert "a warning of a.o" in first.stdout
    assert "Building CXX" not in first.stdout
    assert compiled(tmp_path, "touch b.o").stdout == ""


def test_a_failure_shows_what_the_compiler_said_and_has_its_status(tmp_path) -> None:
    failed = compiled(tmp_path, "echo what is wrong; exit 1")
    assert failed.returncode == 1
    assert "FAILED: " in failed.stdout
    assert "what is wrong" in failed.stdout
    assert "compiled 2 files" not in failed.stdout


def test_the_time_left_follows_the_speed_of_what_was_compiled(monkeypatch) -> None:
    loader = importlib.machinery.SourceFileLoader("compile_program", str(PROGRAM))
    program = importlib.util.module_from_spec(importlib.util.spec_from_loader("compile_program", loader))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(program)
    now = 100.0
    monkeypatch.setattr(program.time, "monotonic", lambda: now)
    kernels = [f"x/compute/cpu/kernels/kernels_{n}.cc.o" for n in range(20)]
    progress = program.Progress([*kernels, *(f"x/client/{n}.cc.o" for n in range(100))], 2)
    expected = 20 * program.expected_s(kernels[0]) + 100 * program.expected_s("x/client/0.cc.o")
    assert progress.left_s() == pytest.approx(expected / 2)  # two at a time, at the expected speed
    now += 4 * expected / 2 * 0.5  # half of it took four times as long
    for name in [*kernels[:10], *(f"x/client/{n}.cc.o" for n in range(50))]:
        progress.done(name)
    assert progress.left_s() == pytest.approx(4 * expected / 2 * 0.5, rel=0.35)
    now += 10
    assert progress.left_s() == pytest.approx(4 * expected / 2 * 0.5 - 10, rel=0.35)
