"""The check for circles, on small packages of its own.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checks import cycles

LATE = "def f():\n    from dflash_moe.a import x\n    return x\n"
TYPE_ONLY = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dflash_moe import a\n"
PACKAGE = "from dflash_moe import x\n"


def package(root: Path, **modules: str) -> Path:
    for name, text in {"__init__": "", **modules}.items():
        path = root / "dflash_moe" / (name.replace("__of__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize("back", [LATE, TYPE_ONLY, "import dflash_moe.a\n", "from .a import x\n", "from . import a\n"])
def test_two_modules_that_know_each_other_are_found_however_late(tmp_path: Path, back: str) -> None:
    findings = cycles.find(package(tmp_path, a="from dflash_moe.b import y\n", b=back))
    assert len(findings) == 1
    assert "dflash_moe.a -> dflash_moe.b -> dflash_moe.a" in findings[0]


def test_a_circle_through_the_packages_own_file_is_found(tmp_path: Path) -> None:
    findings = cycles.find(package(tmp_path, __init__="from dflash_moe.a import y\nx = 1\n", a=PACKAGE))
    assert "dflash_moe -> dflash_moe.a -> dflash_moe" in findings[0]


def test_a_longer_circle_is_told_by_its_shortest_way(tmp_path: Path) -> None:
    modules = {"a": "import dflash_moe.b", "b": "import dflash_moe.c", "c": "import dflash_moe.a, dflash_moe.b"}
    assert [line.count("->") for line in cycles.find(package(tmp_path, **modules))] == [2]


def test_a_tree_is_no_circle(tmp_path: Path) -> None:
    modules = {
        "a": "from dflash_moe import b, c\n",
        "b": "import dflash_moe.c\nimport os\n",
        "c": "from dflash_moe import _core\n",
    }
    root = package(tmp_path, **modules)
    (root / "dflash_moe/_core.pyi").write_text("")
    assert cycles.find(root) == []


def test_headers_that_include_each_other_are_found(tmp_path: Path) -> None:
    (tmp_path / "csrc/wire").mkdir(parents=True)
    (tmp_path / "csrc/wire/a.h").write_text('#pragma once\n#include "wire/b.h"\n')
    (tmp_path / "csrc/wire/b.h").write_text('#if X\n#  include "wire/a.h"\n#endif\n#include <vector>\n')
    (tmp_path / "csrc/wire/c.cc").write_text('#include "wire/a.h"\n')
    assert ["wire/a.h -> wire/b.h -> wire/a.h" in line for line in cycles.find(tmp_path)] == [True]
