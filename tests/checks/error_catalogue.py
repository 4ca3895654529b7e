"""Checks that docs/errors.md names every ErrorCode of the core with its Python class, and every
class of dflash_moe/errors.py.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.checks import documents, headers

DOCUMENT = "docs/errors.md"


def find(root: Path) -> list[str]:
    """Returns a finding for each code and class that the catalogue lacks or invents, or to which it
    gives another number, class or exit code.
    """
    path = root / DOCUMENT
    if not path.exists():
        return [f"{DOCUMENT} is missing"]
    text = path.read_text(encoding="utf-8")
    return _code_findings(text, root) + _class_findings(text, root)


def _code_findings(text: str, root: Path) -> list[str]:
    rows = documents.table(text, "codes")
    if rows is None:
        return [f"{DOCUMENT}: no table is marked 'codes'"]
    header = root / "csrc/base/error_code.h"
    classes = classes_of_codes(header)
    expected = {name: (value, classes.get(name)) for name, value in headers.enumerators(header, "ErrorCode").items()}
    found = {row[1]: (documents.number(row[0]), row[2]) for row in rows}
    findings = [f"{DOCUMENT}: {name} of csrc/base/error_code.h is missing" for name in expected if name not in found]
    findings += [f"{DOCUMENT}: {name} is not in csrc/base/error_code.h" for name in found if name not in expected]
    for name in expected.keys() & found.keys():
        if expected[name] != found[name]:
            findings.append(f"{DOCUMENT}: {name} is {found[name]}, csrc/base/error_code.h says {expected[name]}")
    findings += [f"{DOCUMENT}: {row[1]} has no remedy" for row in rows if len(row) < 4 or not row[3]]
    return findings


def classes_of_codes(header: Path) -> dict[str, str]:
    """Returns for each enumerator the Python class that ends the comment beside it."""
    return dict(re.findall(r"^\s+(k\w+) = \d+,\s*//.*?(\w+)$", header.read_text(encoding="utf-8"), re.MULTILINE))


def _class_findings(text: str, root: Path) -> list[str]:
    rows = documents.table(text, "classes")
    if rows is None:
        return [f"{DOCUMENT}: no table is marked 'classes'"]
    expected = exit_codes(root / "dflash_moe/errors.py")
    found = {row[0]: documents.number(row[1]) for row in rows}
    findings = [f"{DOCUMENT}: class {name} of dflash_moe/errors.py is missing" for name in expected if name not in found]
    findings += [f"{DOCUMENT}: class {name} is not in dflash_moe/errors.py" for name in found if name not in expected]
    for name in expected.keys() & found.keys():
        if expected[name] != found[name]:
            findings.append(f"{DOCUMENT}: {name} exits with {found[name]}, dflash_moe/errors.py says {expected[name]}")
    return findings


def exit_codes(path: Path) -> dict[str, int]:
    """Returns the exit code of each class by its name, the inherited one where a class sets
    none.
    """
    codes: dict[str, int] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        inherited = [codes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in codes]
        own = [
            statement.value.value
            for statement in node.body
            if isinstance(statement, ast.Assign)
            and ast.unparse(statement.targets[0]) == "exit_code"
            and isinstance(statement.value, ast.Constant)
        ]
        codes[node.name] = (own or inherited or [1])[0]
    return codes
