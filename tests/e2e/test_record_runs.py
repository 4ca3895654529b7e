"""Every step of `make results` runs with tiny parameters, and the documents can be written from
what it made.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.documents.markup import DOCUMENTS, written
from bench.record.steps import ROOT, STEPS

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.mark.transformers
def test_every_step_runs_and_its_tables_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    # This tree is compared with itself.
    monkeypatch.setenv("EARLIER_BUILD", str(ROOT))
    lacking = [step.name for step in STEPS if step.lacking()]
    done = subprocess.run(
        [sys.executable, "-m", "bench.record", "--quick"], cwd=ROOT, capture_output=True, text=True, timeout=1150, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{len(STEPS) - len(lacking)} steps measured" in done.stdout
    if not lacking:
        for name in DOCUMENTS:
            assert written((ROOT / name).read_text(encoding="utf-8"), Path(ROOT / "build/results_quick"))
