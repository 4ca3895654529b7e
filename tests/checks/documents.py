"""Reads marked tables from Markdown. A mark is `<!-- table: NAME -->`, a table follows it, and its
cells come without backticks.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re


def table(text: str, name: str) -> list[list[str]] | None:
    """Returns the rows of the table after the mark without its header, or None when there is no
    such mark.
    """
    match = re.search(rf"<!-- table: {re.escape(name)} -->\s*\n((?:\|.*\n?)+)", text)
    if match is None:
        return None
    lines = match[1].strip().splitlines()
    return [[cell.strip().replace("`", "") for cell in line.strip().strip("|").split("|")] for line in lines[2:]]


def block(text: str, name: str) -> str | None:
    """Returns the text between `<!-- begin NAME -->` and `<!-- end NAME -->`."""
    match = re.search(rf"<!-- begin {re.escape(name)} -->\n(.*?)<!-- end {re.escape(name)} -->", text, re.DOTALL)
    return match[1] if match else None


def with_block(text: str, name: str, content: str) -> str:
    """Returns the text with this between the marks of a block. Raises SystemExit where it has no
    such marks.
    """
    former = block(text, name)
    if former is None:
        raise SystemExit(f"no block is marked '{name}'")
    mark = f"<!-- begin {name} -->\n"
    begin = text.index(mark) + len(mark)
    return text[:begin] + content + text[begin + len(former) :]


def number(cell: str) -> int | None:
    """Returns the integer that is written with thousands separators or in hexadecimal, None for
    anything else.
    """
    digits = cell.replace(",", "").replace("_", "").split(" ")[0]
    try:
        return int(digits, 0)
    except ValueError:
        return None
