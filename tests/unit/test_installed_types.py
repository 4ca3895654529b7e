"""Whoever imports the installed package has its types: a type checker that starts elsewhere finds
them, whether it was installed from the sources, where `make` leaves them editable, or from a wheel.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import subprocess
import sys

import pytest

# What a user writes; a missing package, or one without types, makes every name `Any`.
PROGRAM = """import dflash_moe as dm

topology = dm.Topology.load("two_workers.yaml")
reveal_type(topology.workers[0].name)
dm.SamplingParams(max_tokens="many")
"""
# What the package imports would be read and checked with it, and is nine tenths of the time.
SETTINGS = "[mypy]\n[mypy-torch.*,transformers.*]\nfollow_imports = skip\n"


@pytest.mark.long
def test_type_checker_sees_the_installed_package(tmp_path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy", "--no-incremental", "--cache-dir", str(tmp_path / "cache"), "program.py"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    said = checked.stdout + checked.stderr
    assert "import-not-found" not in said, said
    assert "import-untyped" not in said, said
    assert 'Revealed type is "str"' in said.replace("builtins.", ""), said
    assert 'program.py:5: error: Argument "max_tokens"' in said, said
