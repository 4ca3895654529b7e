"""The run-level rules of tests/conftest.py, seen on runs of their own.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def _run(tmp_path: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    folder = tmp_path / "tests"
    folder.mkdir()
    for name in ("conftest.py", "leaks.py", "markers.py"):
        (folder / name).write_text((ROOT / "tests" / name).read_text())
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "pythonpath=.", "--rootdir", str(tmp_path)]
    command += [str(folder), *options]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)


def test_run_that_skipped_everything_fails(tmp_path: Path) -> None:
    result = _run(tmp_path, "import pytest\n@pytest.mark.skip(reason='no card')\ndef test_a(): pass\n")
    assert result.returncode == 1
    assert "skipped 1: no card" in result.stdout
    assert "nothing was tested" in result.stdout


def test_skip_beside_a_pass_is_counted_and_passes(tmp_path: Path) -> None:
    result = _run(tmp_path, "import pytest\n@pytest.mark.skip(reason='no card')\ndef test_a(): pass\ndef test_b(): pass\n")
    assert result.returncode == 0
    assert "skipped 1: no card" in result.stdout


def test_leaking_test_fails(tmp_path: Path) -> None:
    text = "import os\nfrom tests import leaks\nleaks.GRACE_S = 0.1\ndef test_a():\n    os.memfd_create('left')\n"
    result = _run(tmp_path, text)
    assert result.returncode == 1
    assert "1 more open memfd descriptors than before" in result.stdout
