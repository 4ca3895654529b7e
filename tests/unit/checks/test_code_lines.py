"""Which lines count as code, and which room they count for.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.checks.code_lines import CARDS, PRODUCT, PROOFS, code_lines, count, table

CPP = """// What lives here.
#pragma once

/* a note
   of two lines */ int a;
inline int f(int n) {  // why
  return g("a;// b", /* c */ 1'000);

}
/* d */
"""
PYTHON = '''"""What lives here.

Two paragraphs.
"""

import os  # why

# a comment


def f():
    """Words."""
    text = """
    # no comment

    """
    return text


class A:
    """Words."""
'''


def test_blank_lines_comments_and_docstrings_do_not_count() -> None:
    assert code_lines("a.cc", CPP) == 5
    assert code_lines("a.py", PYTHON) == 7
    assert code_lines("a.pyi", "def f() -> None: ...\n") == 1
    assert code_lines("a.py", "") == code_lines("a.h", "") == 0


def test_a_revision_is_counted_by_room_and_compared_with_the_working_tree(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, timeout=60)

    names = ("csrc/wire/a.h", "csrc/wire/b/a.cc", "csrc/compute/gpu/a.cc", "tests/unit/a.py", "tests/a.py", "docs/a.py")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(PYTHON if name.endswith(".py") else CPP)
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "a")
    before = count(tmp_path, "HEAD")
    assert before == {
        (PRODUCT, "csrc/wire"): 10, (CARDS, "csrc/compute/gpu"): 5, (PROOFS, "tests/unit"): 7, (PROOFS, "tests/*"): 7,
    }  # fmt: skip
    assert before == count(tmp_path)
    (tmp_path / "csrc/wire/a.h").unlink()
    rows = {
        line.split("  ")[0].strip() or line.split()[0]: line.split()[-4:]
        for line in table(before, count(tmp_path)).splitlines()
    }
    assert rows["csrc/wire"] == rows["product"] == ["10", "5", "-5", "-50.0%"]
    assert rows["tests and lab"] == ["14", "14", "+0", "+0.0%"]
