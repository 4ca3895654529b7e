"""The check of the glossary finds what it is for, and lets pass what is in order.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checks import glossary

HEAD = "# Glossary\n\n**Who is there**\n\n| word | meaning | where |\n|---|---|---|\n"
CALL = "| call | one `experts()` of one layer | `client/call.h` |\n"
LINK = "| link, way | a worker as `ClientLink` sees it | `client/link.h`, `engine/way.py` |\n"
SOURCES = {
    "csrc/client/call.h": "struct Call {\n};\n",
    "csrc/client/link.h": "class Call;\nclass ClientLink final : public Base {\n};\n",
    "dflash_moe/engine/way.py": "class Way:\n    def experts(self): ...\n",
}


def findings(root: Path, rows: str, sources: dict[str, str] | None = None) -> list[str]:
    for name, text in {glossary.DOCUMENT: HEAD + rows, **SOURCES, **(sources or {})}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return glossary.find(root)


def test_words_in_order_whose_places_exist_pass(tmp_path: Path) -> None:
    head = "\n**What travels**\n\n| word | meaning | where |\n|---|---|---|\n"
    more = f"{head}| call (of a friend) | by day | `client/` |\n"
    assert findings(tmp_path, CALL + LINK + more) == []


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (CALL + LINK + "| way | another | `client/link.h` |\n", "'way' is defined in line 8 already"),
        (LINK + CALL, "'call' comes before 'link' in the alphabet"),
        (
            CALL.replace("`client/call.h`", "`client/call.h`, `client/calls.h`") + LINK,
            "nothing is called `client/calls.h` any more",
        ),
        (CALL + LINK.replace("ClientLink", "HostLink"), "nothing is called `HostLink` any more"),
        (CALL.replace("experts()", "expert()") + LINK, "nothing is called `expert()` any more"),
    ],
)
def test_a_word_twice_out_of_order_or_of_what_is_gone_is_found(tmp_path: Path, rows: str, found: str) -> None:
    (finding,) = findings(tmp_path, rows)
    assert found in finding


@pytest.mark.parametrize("name", ["csrc/simulation/link.cc", "dflash_moe/engine/link.py"])
def test_a_class_that_takes_a_word_for_something_else_is_found(tmp_path: Path, name: str) -> None:
    text = "enum class Link : int {\n};\n" if name.endswith(".cc") else "class Link(Base): ...\n"
    (finding,) = findings(tmp_path, CALL + LINK, {name: text})
    assert finding.startswith(f"{name}: the class Link")


def test_a_glossary_in_which_no_row_can_be_read_is_found(tmp_path: Path) -> None:
    assert len(findings(tmp_path, "")) == 1
