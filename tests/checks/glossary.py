"""Checks docs/glossary.md: each word has one row, rows are in the order of the alphabet within
their table, and what stands in code font is there.

A word is also the name of a class only where its row says so: a class of another meaning under the
same name leads a reader astray who has learnt the word. A word in brackets tells two meanings
apart, as in "slot (of a token)".
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.checks.sources import project_files

DOCUMENT = "docs/glossary.md"

_CODE = re.compile(r"`([^`]+)`")
_QUALIFIER = re.compile(r"\s*\([^)]*\)")
_CPP_CLASS = re.compile(r"(?m)^(?:class|struct|enum class) (?:\[\[\w+\]\] )?(\w+)(?: final)?\s*(?::[^;{]*)?\{")
_PYTHON_CLASS = re.compile(r"(?m)^class (\w+)")


class _Row(NamedTuple):
    """One row: the line in which it stands, its words, and the texts in code font of its cells."""

    line: int
    words: list[str]
    code: list[str]


def find(root: Path) -> list[str]:
    """Returns a finding for each word that is defined twice or out of order, for each name in code
    font that nothing has, and for each class that takes a word for something else.
    """
    tables = list(_tables((root / DOCUMENT).read_text(encoding="utf-8")))
    rows = [row for table in tables for row in table]
    if not rows:
        return [f"{DOCUMENT}: no row of a word was found; tests/checks/glossary.py reads its form"]
    sources = {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in project_files(root, ".h", ".cc", ".cu", ".py")
        if path.relative_to(root).parts[0] in ("csrc", "dflash_moe")
    }
    findings = [*_defined_twice(rows), *_out_of_order(tables)]
    findings += [finding for row in rows for finding in _missing(row, root, sources)]
    return findings + list(_taken(rows, sources))


def _tables(text: str) -> Iterator[list[_Row]]:
    """Yields the rows of each table, without its head."""
    table: list[_Row] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if not line.startswith("|"):
            if table:
                yield table[2:]
            table = []
            continue
        words = line.strip("|").split("|")[0].split(",")
        table.append(_Row(number, [word.strip() for word in words], _CODE.findall(line)))


def _defined_twice(rows: list[_Row]) -> Iterator[str]:
    first: dict[str, int] = {}
    for row in rows:
        for word in row.words:
            former = first.setdefault(word.casefold(), row.line)
            if former != row.line:
                where = f"{DOCUMENT}:{row.line}"
                yield f"{where}: '{word}' is defined in line {former} already; say both meanings in one row"


def _out_of_order(tables: list[list[_Row]]) -> Iterator[str]:
    for table in tables:
        for former, row in zip(table, table[1:], strict=False):
            if row.words[0].casefold() < former.words[0].casefold():
                yield f"{DOCUMENT}:{row.line}: '{row.words[0]}' comes before '{former.words[0]}' in the alphabet"


def _missing(row: _Row, root: Path, sources: dict[str, str]) -> Iterator[str]:
    for text in row.code:
        if "/" in text or "." in text:
            is_there = (root / _path_of(text)).exists()
        elif text[0].isupper():
            is_there = any(text in _classes(name, source) for name, source in sources.items())
        else:
            whole = re.compile(rf"\b{re.escape(text.removesuffix('()'))}\b")
            is_there = any(map(whole.search, sources.values()))
        if not is_there:
            yield f"{DOCUMENT}:{row.line}: nothing is called `{text}` any more"


def _path_of(text: str) -> str:
    return f"dflash_moe/{text}" if text.endswith(".py") else f"csrc/{text}"


def _taken(rows: list[_Row], sources: dict[str, str]) -> Iterator[str]:
    places: dict[str, set[str]] = {}
    for row in rows:
        for word in row.words:
            places.setdefault(_class_name(word), set()).update(_path_of(text) for text in row.code)
    for name, source in sources.items():
        for found in _classes(name, source):
            if name not in places.get(found, {name}):
                what = f"{name}: the class {found} bears a word of {DOCUMENT}"
                yield f"{what}, whose row names other files; rename it or say so"


def _class_name(word: str) -> str:
    return "".join(part.capitalize() for part in re.split(r"[ -]+", _QUALIFIER.sub("", word)))


def _classes(name: str, source: str) -> list[str]:
    return (_PYTHON_CLASS if name.endswith(".py") else _CPP_CLASS).findall(source)
