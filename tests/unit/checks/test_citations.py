"""The check of what comments cite, on small repositories of its own.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checks import citations
from tests.checks.comments import comments_of


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.cc", "// as in ring/gone.h\n", "ring/gone.h does not exist"),
        ("a.h", "int a;  /* two\n * lines, gone.cc */\n", "a.h:2: gone.cc does not exist"),
        ("a.py", '"""See docs/gone.md."""\n', "docs/gone.md does not exist"),
        ("a.py", "x = 1  # see rules 7\n", "'rules 7' is in no document"),
        (
            "a.py",
            "def f():\n    '''One.\n\n    The reason is in design.md section 6.\n    '''\n",
            "a.py:4: 'design.md section 6'",
        ),
        ("Makefile", "# style: C.7\nall:\n", "'style: C.7' is in no document"),
        ("a.cc", "// (docs/decisions/0002, 0001)\n", "there is no decision 0002"),
        ("a.cc", "// decisions 1 and 3\n", "there is no decision 0003"),
    ],
)
def test_a_citation_of_nothing_is_found(tmp_path: Path, name: str, text: str, found: str) -> None:
    (tmp_path / "docs/decisions").mkdir(parents=True)
    (tmp_path / "docs/decisions/0001-first.md").write_text("# 1\n")
    (tmp_path / name).write_text(text)
    findings = citations.find(tmp_path)
    assert [found in line for line in findings if "0001" not in line].count(True) == 1, findings


def test_what_exists_and_what_is_code_is_no_finding(tmp_path: Path) -> None:
    (tmp_path / "ring").mkdir()
    (tmp_path / "ring/layout.h").write_text("// the rules of the ring: 7 of them; by decision of the peer\n")
    (tmp_path / "a.cc").write_text('const char* name = "gone.h";  // layout.h, ring/layout.h, linux/futex.h\n')
    (tmp_path / "b.py").write_text('"""See a.cc."""\nNAME = "gone.py"  # of a string\n')
    assert citations.find(tmp_path) == []


def test_comments_are_told_from_strings(tmp_path: Path) -> None:
    (tmp_path / "a.cc").write_text("auto a = \"// no\"; auto b = '\"' + 1'0;  // it's\n/* and\n this */\n")
    (tmp_path / "a.py").write_text('"""Head."""\nTEXT = "# no"  # yes\n\n\ndef f():\n    """Words."""\n')
    assert [(n, text.strip()) for n, text in comments_of(tmp_path / "a.cc")] == [(1, "it's"), (2, "and"), (3, "this")]
    assert sorted((n, text.strip('" ')) for n, text in comments_of(tmp_path / "a.py")) == [
        (1, "Head."),
        (2, "yes"),
        (6, "Words."),
    ]
