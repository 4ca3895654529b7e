"""Checks that nothing but the table of csrc/compute/numerics.cc names a numerics class: neither by
its text, in C++ or Python, nor, outside of the kernels and their readable twin, by its enumerator.

Comments, docstrings, tests, documents and recorded campaigns (bench/) may say which class they
mean.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.checks.sources import project_files

TABLE = Path("csrc/compute/numerics.cc")
DECLARATION = Path("csrc/compute/numerics.h")
# In these folders an enumerator says whose arithmetic a piece of code is.
ARITHMETIC = (Path("csrc/compute/cpu"), Path("csrc/compute/reference"))

_ROW = re.compile(r'NumericsClass::(k\w+),\s*"([^"]+)"')
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')


def find(root: Path) -> list[str]:
    """Returns a finding for every place that knows a class by name, and for a table in which no
    class can be read.
    """
    classes = dict(_ROW.findall((root / TABLE).read_text(encoding="utf-8")))
    if not classes:
        return [f"{TABLE}: no row of a numerics class was found; tests/checks/numerics_names.py reads its form"]
    findings: list[str] = []
    for path in project_files(root, ".h", ".cc", ".cu"):
        where = path.relative_to(root)
        if where.parts[0] == "csrc" and where not in (TABLE, DECLARATION):
            findings += _findings_of_cpp(path.read_text(encoding="utf-8"), where, classes)
    for path in project_files(root, ".py", ".pyi"):
        where = path.relative_to(root)
        if where.parts[0] == "dflash_moe":
            findings += _findings_of_python(path.read_text(encoding="utf-8"), where, set(classes.values()))
    return findings


def _findings_of_cpp(text: str, where: Path, classes: dict[str, str]) -> list[str]:
    code = _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)
    findings, names = [], set(classes.values())
    for number, line in enumerate(code.splitlines(), 1):
        findings += [_finding(where, number, literal) for literal in _LITERAL.findall(line) if _names(literal, names)]
        if not any(room in where.parents for room in ARITHMETIC):
            findings += [
                _finding(where, number, f"NumericsClass::{name}") for name in classes if f"NumericsClass::{name}" in line
            ]
    return findings


def _findings_of_python(text: str, where: Path, names: set[str]) -> list[str]:
    tree = ast.parse(text, filename=str(where))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        _finding(where, node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        if _names(node.value, names)
    ]


def _names(literal: str, names: set[str]) -> bool:
    """Says whether a literal has the name of a class in it, or is what some of them begin with
    ("bf16-").
    """
    if literal.endswith("-") and any(name.startswith(literal) for name in names):
        return True
    return any(re.search(rf"(?<![\w-]){name}(?![\w-])", literal) for name in names)


def _finding(where: Path, line: int, name: str) -> str:
    return f"{where}:{line}: {name} is named here; what a class is, says its row in {TABLE}"
