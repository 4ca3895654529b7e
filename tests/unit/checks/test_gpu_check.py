"""`.ci/gpu_check` runs on a machine that has little: its tests must be found there too, without
conftest.py and its plug-ins.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = (ROOT / ".ci" / "gpu_check").read_text(encoding="utf-8")


def line_after(start: str) -> str:
    (found,) = (line.removeprefix(start) for line in SCRIPT.splitlines() if line.startswith(start))
    return found


def test_the_tests_of_gpu_check_are_found_without_conftest():
    files = line_after("tests=(").rstrip(")").split()
    command = shlex.split(line_after("run tests "))[2:]  # without its two limits
    assert command[0] == "$python"
    assert command[-1] == "${tests[@]}"
    done = subprocess.run(
        [sys.executable, *command[1:-1], "-p", "no:hypothesispytest", "--collect-only", *files],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for file in files:
        assert f"{file}:" in done.stdout, "as many lines as files, each with tests"
