"""A worker's installation has neither torch nor transformers: what it imports works when both are
blocked.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKER = """
import importlib.abc, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {'torch', 'transformers', 'tokenizers', 'matplotlib'}:
            raise ImportError(f'{name} is blocked')
sys.meta_path.insert(0, Blocker())
"""


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCKER + code], capture_output=True, text=True, timeout=200, check=False)


def test_the_blocker_blocks() -> None:
    assert "torch is blocked" in _run("import torch").stderr


MODULES = (
    "dflash_moe",
    "dflash_moe.workers",
    "dflash_moe.experts",
    "dflash_moe.holders",
    "dflash_moe.model",
    "dflash_moe.cli.main",
)


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_without_torch(module: str) -> None:
    result = _run(f"import {module}")
    assert result.returncode == 0, result.stderr


def test_a_worker_that_a_host_starts_imports_no_parser_of_command_lines_or_topologies() -> None:
    result = _run("import dflash_moe.workers.process\nprint(*{'typer', 'yaml'} & sys.modules.keys())")
    assert (result.returncode, result.stdout.split()) == (0, []), result.stderr


@pytest.mark.parametrize("command", ["doctor --json", "worker --help", "key --help", "--help"])
def test_command_runs_without_torch(command: str) -> None:
    code = f"sys.argv = ['dflash-moe', *{command.split()!r}]\nfrom dflash_moe.cli.main import run\nraise SystemExit(run())"
    result = _run(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout
