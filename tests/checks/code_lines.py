"""Counts the lines of code, those that are neither blank nor comment, room by room, so that one
commit can be compared with another.

    python -m tests.checks.code_lines [REVISION [REVISION]]

Without a revision it counts the working tree, which `.` stands for too; of two it shows what has
changed. Docstrings are comments. What only cards need is a part of its own. Revisions are read from
git's objects, without a checkout.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.checks.comments import CPP_PARTS, CPP_SUFFIXES
from tests.checks.sources import project_files

ROOT = Path(__file__).resolve().parents[2]
WORKING_TREE = "."
PRODUCT, CARDS, PROOFS = "product", "cards", "tests and lab"
_PARTS = {"dflash_moe": PRODUCT, "csrc": PRODUCT, "tests": PROOFS, "bench": PROOFS}
_OF_CARDS = ("csrc/cards", "csrc/compute/gpu", "csrc/device_exchange")
_PYTHON_SUFFIXES, _C_SUFFIXES = (".py", ".pyi"), (*CPP_SUFFIXES, ".c")
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_SCOPES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(name: str, text: str) -> int:
    """Counts the lines of a source file that are neither blank nor comment."""
    lines = text.splitlines()
    if name.endswith(_C_SUFFIXES):
        # A comment keeps its line breaks, and whatever stands before or behind it.
        lines = CPP_PARTS.sub(_without_comment, text).splitlines()
        return sum(1 for line in lines if line.strip())
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    taken = {line for token in tokens if token.type not in _NO_CODE for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _SCOPES) and ast.get_docstring(node, clean=False) is not None:
            taken -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return sum(1 for line in taken if lines[line - 1].strip())


def _without_comment(match: re.Match[str]) -> str:
    is_comment = match[1] is not None or match[2] is not None
    return " " + "\n" * match[0].count("\n") if is_comment else match[0]


def room_of(name: str) -> tuple[str, str] | None:
    """Returns the part and the room of a source file, None for a file that does not count."""
    folders = name.split("/")[:-1]
    if not folders or folders[0] not in _PARTS or not name.endswith((*_PYTHON_SUFFIXES, *_C_SUFFIXES)):
        return None
    for room in _OF_CARDS:
        if name.startswith(f"{room}/"):
            return CARDS, room
    return _PARTS[folders[0]], "/".join(folders[:2]) if len(folders) > 1 else f"{folders[0]}/*"


def sources(root: Path, revision: str = WORKING_TREE) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of every source file that counts. Raises CalledProcessError for
    a revision that git does not know.
    """
    if revision == WORKING_TREE:
        for path in project_files(root, *_PYTHON_SUFFIXES, *_C_SUFFIXES):
            if room_of(name := path.relative_to(root).as_posix()):
                yield name, path.read_text(encoding="utf-8")
        return
    listed = _git(root, "ls-tree", "-r", "-z", revision)
    entries = [entry.split("\t", 1) for entry in listed.decode().split("\0") if entry]
    blobs = {name: about.split()[2] for about, name in entries if room_of(name)}
    asked = "".join(f"{blob}\n" for blob in blobs.values()).encode()
    answer = io.BytesIO(_git(root, "cat-file", "--batch", told=asked))
    for name in blobs:
        size = int(answer.readline().split()[2])
        yield name, answer.read(size).decode()
        answer.read(1)  # the line break behind each blob


def _git(root: Path, *arguments: str, told: bytes = b"") -> bytes:
    return subprocess.run(["git", *arguments], cwd=root, input=told, capture_output=True, check=True, timeout=60).stdout


def count(root: Path, revision: str = WORKING_TREE) -> Counter[tuple[str, str]]:
    """Returns the lines of code by part and room."""
    found: Counter[tuple[str, str]] = Counter()
    for name, text in sources(root, revision):
        if room := room_of(name):
            found[room] += code_lines(name, text)
    return found


def table(*counted: Counter[tuple[str, str]]) -> str:
    """Returns a line for each room and one for each part, of one count, or of two their change."""
    lines = []
    for part in (PRODUCT, CARDS, PROOFS):
        rooms = sorted({room for one in counted for of, room in one if of == part})
        rows = [(room, [one[part, room] for one in counted]) for room in rooms]
        totals = [sum(numbers) for numbers in zip(*(numbers for _, numbers in rows), strict=True)] or [0] * len(counted)
        lines += [_row(f"  {room}", numbers) for room, numbers in rows]
        lines.append(_row(part, totals))
    return "\n".join(lines)


def _row(name: str, numbers: list[int]) -> str:
    change = numbers[-1] - numbers[0]
    share = f"{change / numbers[0]:+8.1%}" if numbers[0] else f"{'new':>8}"
    return f"{name:28}" + "".join(f"{number:9,}" for number in numbers) + (f"{change:+9,}{share}" if len(numbers) > 1 else "")


if __name__ == "__main__":
    print(table(*(count(ROOT, revision) for revision in sys.argv[1:3] or [WORKING_TREE])))
