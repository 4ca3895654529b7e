"""The steps of `make results` that take seconds run with tiny parameters. `make verify-all` runs
every one so, and writes the documents from what they made.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.record.steps import ROOT, STEPS

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

# These take seven of the ten minutes of all, and the shortest of them 16 s.
SLOWEST = {"faults", "timeline", "audit", "earlier-commit", "link", "verify-real"}


@pytest.mark.transformers
def test_every_step_of_seconds_runs() -> None:
    names = [step.name for step in STEPS if step.name not in SLOWEST and not step.lacking()]
    assert len(names) > 20
    assert {step.name for step in STEPS} >= SLOWEST
    done = subprocess.run(
        [sys.executable, "-m", "bench.record", "--quick", "--only", ",".join(names)],
        cwd=ROOT, capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{len(names)} steps measured" in done.stdout
