"""The fault campaign of the server at its least size: it looks into a real server from outside.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.record.steps import ROOT
from dflash_moe.bench.results import read_result

pytestmark = pytest.mark.transformers


def test_callers_that_vanish_leave_nothing(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    program = [sys.executable, "-m", "bench.campaigns.serving_faults", "--parts", "vanish", "--vanishing", "4"]
    done = subprocess.run(
        [*program, "--json", str(out)], cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = read_result(out)["rows"]
    assert (row["callers"], row["blocks"], row["threads"], row["descriptors"]) == (4, 0, 0, 0)
