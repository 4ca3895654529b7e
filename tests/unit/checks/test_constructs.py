"""The checks on constructs, names and heads find what they are for.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checks import constructs, file_heads


@pytest.mark.parametrize(
    "text",
    [
        "import pickle\n",
        "from marshal import loads\n",
        "def f():\n    import dill\n",
        "eval('1')\n",
        "import yaml\nyaml.load(text)\n",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)\n",
        "import torch\ntorch.load(path)\n",
        "import numpy\nnumpy.load(path, allow_pickle=True)\n",
        "import subprocess\nsubprocess.run(line, shell=True)\n",
        "model = load(path, trust_remote_code=True)\n",
    ],
)
def test_construct_that_runs_data_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "module.py").write_text(text)
    assert len(constructs.find(tmp_path)) == 1


def test_words_about_forbidden_things_pass(tmp_path: Path) -> None:
    text = '"""No pickle, no eval."""\nimport yaml\nyaml.load(t, Loader=UniqueKeySafeLoader)\nm.eval()\n'
    (tmp_path / "module.py").write_text(text)
    assert constructs.find(tmp_path) == []


@pytest.mark.parametrize("name", ["utils.py", "common.h", "misc/x.py", "loader_v2.py", "cache_manager.py"])
def test_name_that_says_nothing_is_found(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    assert "says nothing" in constructs.find(tmp_path)[0]


def test_trace_of_one_machine_is_found(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("see " + "/ho" + "me/somebody/checkout\n")
    assert "notes.md:1" in constructs.find(tmp_path)[0]


def test_file_without_head_is_found(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text("x = 1\n")
    (tmp_path / "good.h").write_text("// What this is.\n// SPDX-License-Identifier: Apache-2.0\n")
    (tmp_path / "__init__.py").write_text("")
    findings = file_heads.find(tmp_path)
    assert len(findings) == 2
    assert all(finding.startswith("bare.py") for finding in findings)
