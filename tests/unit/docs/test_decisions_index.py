"""The index of decisions lists every file by its title, and says which numbers were never used.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "docs" / "decisions"
NEVER_USED = {11, 41, 55, 59}


def test_every_decision_is_listed_by_its_title() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[(.+)\]\((.+)\)$", index, re.MULTILINE)
    titles = [(path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# "), path.name) for path in FOLDER.glob("0*.md")]
    assert sorted(listed) == sorted(titles)


def test_a_number_that_is_missing_is_explained() -> None:
    numbers = {int(path.name[:4]) for path in FOLDER.glob("0*.md")}
    assert set(range(1, max(numbers))) - numbers == NEVER_USED
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    told = re.search(r"Numbers ([\d, and]+) were never used", index)
    assert told is not None
    assert {int(number) for number in re.findall(r"\d+", told[1])} == NEVER_USED
