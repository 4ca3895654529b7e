"""Reads the words of source files: their comments and docstrings, with the line on which they
stand.

The suffix tells the language: `//` and `/* */` in C++, `#` and docstrings in Python, `#` in shell,
make, CMake, YAML and TOML. What a string of the code says is no comment.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

CPP_SUFFIXES = (".h", ".cc", ".cu", ".cuh")
HASH_SUFFIXES = (".yaml", ".toml", ".cmake", ".txt")

# Literals are matched first, so that neither "//" in a string nor the quotes of 1'000 are taken for
# anything else; raw strings are not used with comment marks inside. The groups are what a comment
# says.
CPP_PARTS = re.compile(r'\b\d[\w\']*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//([^\n]*)|/\*(.*?)\*/', re.DOTALL)
_HASH = re.compile(r"(?:^|\s)#(?!!)(.*)$")


def comments_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of every line of comment and docstring in a file, and nothing for other
    kinds of files.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".py", ".pyi"):
        yield from _python(text)
    elif path.suffix in CPP_SUFFIXES:
        yield from _cpp(text)
    elif path.suffix in HASH_SUFFIXES or path.name == "Makefile" or text.startswith("#!"):
        for number, line in enumerate(text.splitlines(), 1):
            if match := _HASH.search(line):
                yield number, match[1]


def _cpp(text: str) -> Iterator[tuple[int, str]]:
    for match in CPP_PARTS.finditer(text):
        body = match[1] if match[1] is not None else match[2]
        if body is not None:
            first = text.count("\n", 0, match.start()) + 1
            for offset, line in enumerate(body.splitlines()):
                yield first + offset, line


def _python(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith("#!"):
            yield token.start[0], token.string[1:]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            first = node.body[0]
            assert isinstance(first, ast.Expr)
            for offset, line in enumerate(ast.get_source_segment(text, first).splitlines()):  # type: ignore[union-attr]
                yield first.lineno + offset, line
