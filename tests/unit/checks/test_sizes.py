"""What the report of sizes counts.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

from tests.checks.sizes import report, size_of, table

CPP = """// What lives here.
// SPDX-License-Identifier: Apache-2.0
#pragma once

/* a note
   of two lines */
inline int f(int n) {
  for (int i = 0; i < n; ++i) g("a;b", ';', 1'000);  // why
  return n;
}
struct S { int x; };
"""
PYTHON = '''"""What lives here.

SPDX-License-Identifier: Apache-2.0
"""

import os  # why


def f():
    """Words."""
    if os:
        return 1
    return 2
'''


def test_statements_and_comments_are_counted_and_literals_are_not(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text(CPP)
    (tmp_path / "a.py").write_text(PYTHON)
    cpp, python = size_of(tmp_path / "a.h"), size_of(tmp_path / "a.py")
    assert (cpp.lines, cpp.statements, cpp.comments) == (11, 4, 4)
    assert (python.lines, python.statements, python.comments) == (13, 5, 3)


def test_rooms_and_parts_have_lines_of_their_own(tmp_path: Path) -> None:
    for name in ("csrc/wire/a.h", "csrc/wire/b.h", "csrc/base/a.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(CPP)
    (tmp_path / "dflash_moe").mkdir()
    (tmp_path / "dflash_moe/config.py").write_text(PYTHON)
    rows = {line.split()[0]: line.split()[1:4] for line in table(tmp_path).splitlines()[1:]}
    assert rows["csrc/wire"] == ["2", "22", "8"]
    assert rows["csrc"] == ["3", "33", "12"]
    assert rows["dflash_moe/*"] == rows["dflash_moe"] == ["1", "13", "5"]
    assert "sizes: csrc: 3 files, 33 lines, 12 statements, 12 lines of comment (36%)" in report(tmp_path)
