"""Counts files, statements and comments of the code, room by room, so that before and after can be
compared. `python -m tests.checks.sizes [ROOT ...]` prints a table for each tree.

This is a report and not a rule. A file over LONG_LINES asks whether it is two things, and one of
SHORT_LINES or fewer whether it is a thing at all. Statements are semicolons outside of parentheses
in C++, and statements of the syntax tree but docstrings in Python. A line of comment counts where
it says something, behind code too.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.checks.comments import comments_of
from tests.checks.sources import project_files

LONG_LINES = 400
SHORT_LINES = 40
PARTS = ("csrc", "dflash_moe")
_SUFFIXES = (".py", ".pyi", ".h", ".cc", ".cu")
_CPP_NOISE = re.compile(r"\b\d[\d\w']*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|//[^\n]*|/\*.*?\*/", re.DOTALL)
# The columns of the table behind the room have these widths.
_WIDTHS = (6, 7, 10, 9, 8, 7, 6, 6)
_SAYS_SOMETHING = re.compile(r"\w")


@dataclass(frozen=True, slots=True)
class Size:
    """The size of one file."""

    lines: int
    statements: int
    comments: int


def size_of(path: Path) -> Size:
    """Counts the lines, statements and lines of comment of a source file. The SPDX line is none."""
    text = path.read_text(encoding="utf-8")
    said = {line for line, words in comments_of(path) if _SAYS_SOMETHING.search(words) and "SPDX-License" not in words}
    return Size(len(text.splitlines()), _statements(path, text), len(said))


def _statements(path: Path, text: str) -> int:
    if path.suffix in (".py", ".pyi"):
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
        return sum(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in nodes)
    depth, count = 0, 0
    for letter in _CPP_NOISE.sub(" ", text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        count += letter == ";" and depth == 0
    return count


def report(root: Path) -> str:
    """Returns a line for each part, and then one for each of its files over LONG_LINES, the longest
    first.
    """
    lines = []
    for part in PARTS:
        sizes = {path: size_of(path) for path in _files(root, part)}
        lines.append(f"sizes: {part}: {_summary(sizes.values())}")
        long = [(size.lines, path) for path, size in sizes.items() if size.lines > LONG_LINES]
        lines += [f"  {length:5d} {path.relative_to(root)}" for length, path in sorted(long, reverse=True)]
    return "\n".join(lines)


def table(root: Path) -> str:
    """Returns a line for each room and one for each part."""
    rooms: dict[str, list[Size]] = defaultdict(list)
    for part in PARTS:
        for path in _files(root, part):
            inner = path.relative_to(root).parts
            room = "/".join(inner[:2]) if len(inner) > 2 else f"{part}/*"
            rooms[room].append(size_of(path))
            rooms[part].append(rooms[room][-1])
    heads = ("room", "files", "lines", "statements", "comments", "of lines", "median", "<= 40", "> 400")
    head = f"{heads[0]:24} " + " ".join(f"{name:>{width}}" for name, width in zip(heads[1:], _WIDTHS, strict=True))
    lines = [head]
    for room, sizes in sorted(rooms.items()):
        total, comments = sum(size.lines for size in sizes), sum(size.comments for size in sizes)
        lengths = [size.lines for size in sizes]
        lines.append(
            f"{room:24} "
            + " ".join(
                f"{cell:>{width}}"
                for cell, width in zip(
                    (
                        len(sizes),
                        total,
                        sum(size.statements for size in sizes),
                        comments,
                        f"{comments / max(1, total):.1%}",
                        f"{statistics.median(lengths):.0f}",
                        sum(length <= SHORT_LINES for length in lengths),
                        sum(length > LONG_LINES for length in lengths),
                    ),
                    _WIDTHS,
                    strict=True,
                )
            )
        )
    return "\n".join(lines)


def _summary(sizes: Iterable[Size]) -> str:
    found = list(sizes)
    if not found:
        return "no source files"
    lines, comments = sum(size.lines for size in found), sum(size.comments for size in found)
    return (
        f"{len(found)} files, {lines} lines, {sum(size.statements for size in found)} statements, {comments} lines of comment "
        f"({comments / lines:.0%}), median {statistics.median(size.lines for size in found):.0f} lines"
    )


def _files(root: Path, part: str) -> list[Path]:
    return [path for path in project_files(root, *_SUFFIXES) if root / part in path.parents]


if __name__ == "__main__":
    for name in sys.argv[1:] or ["."]:
        print(f"{name}\n{table(Path(name).resolve())}\n")
