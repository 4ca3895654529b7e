"""The stubs of the extensions (dflash_moe/_core.pyi, _measure.pyi, _simulation.pyi) are what the
built modules say: `make stubs` writes them, and the check compares.

pybind11-stubgen reads names, signatures and docstrings. Rewritten here is what would be looser or
longer than what is meant:

- pybind11 takes any number for an `int` or `float`, and says so with protocols; callers of the
  package pass `int` and `float`.
- A parameter whose default is None takes None, which pybind11 does not say of pointers.
- Names are imported, docstrings keep to the width of comments, and values of constants are left
  out, so that a new version changes no stub.

    python -m tests.checks.stubs    # writes them

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

MODULES = ("_core", "_measure", "_simulation")
# Other versions spell signatures in other ways, which is no finding about this package.
PYBIND11, GENERATOR = "3.1", "3.0.0"
WIDTH = 100
# A program that is started ends within this time, also on a machine that does much else.
LIMIT_S = 300
_SPELLINGS = (
    (r"typing\.SupportsInt \| typing\.SupportsIndex", "int"),
    (r"typing\.SupportsFloat \| typing\.SupportsIndex", "float"),
    (r"\bdflash_moe\._core\.", ""),
    (r"\bnumpy\.typing\.", "npt."),
    (r"\bnumpy\.", "np."),
    (r"\b(?:typing|typing_extensions|collections\.abc)\.(?=[A-Z]|overload)", ""),
)
# Where a name of a signature comes from; ruff sorts and joins them.
_IMPORTS = {
    "Callable": "from collections.abc import Callable",
    "Sequence": "from collections.abc import Sequence",
    "Annotated": "from typing import Annotated",
    "Any": "from typing import Any",
    "overload": "from typing import overload",
    "np": "import numpy as np",
    "npt": "import numpy.typing as npt",
    "Buffer": "from typing_extensions import Buffer",
}


def find(root: Path) -> list[str]:
    """Returns the stubs that are not what the built modules say."""
    if reason := unable(root):
        print(f"stubs: not compared: {reason}")
        return []
    return [
        f"dflash_moe/{name}.pyi differs from the built module; run make stubs"
        for name in MODULES
        if (root / f"dflash_moe/{name}.pyi").read_text(encoding="utf-8") != generate(root, name)
    ]


def unable(root: Path) -> str:
    """Says why stubs cannot be made here, and is empty where they can."""
    for name in MODULES:
        if importlib.util.find_spec(f"dflash_moe.{name}") is None or not list((root / "dflash_moe").glob(f"{name}.*.so")):
            return f"dflash_moe.{name} is not built; run make"
    for package, wanted in (("pybind11", PYBIND11), ("pybind11-stubgen", GENERATOR)):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"{package} is not installed; run make"
        if not f"{found}.".startswith(f"{wanted}."):
            return f"the stubs are of {package} {wanted}, and here is {found}"
    return ""


def generate(root: Path, name: str) -> str:
    """Returns the stub of a built module."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pybind11_stubgen", f"dflash_moe.{name}", "-o", folder, "--exit-code"]
        made = subprocess.run(command, cwd=root, check=False, capture_output=True, text=True, timeout=LIMIT_S)
        if made.returncode:
            raise SystemExit(f"pybind11-stubgen cannot read dflash_moe.{name}:\n{made.stderr}")
        text = (Path(folder) / "dflash_moe" / f"{name}.pyi").read_text(encoding="utf-8")
    text = _ruff(root, name, rewrite(text), "check", "--select", "I", "--fix", "--quiet")
    return _ruff(root, name, text, "format")


def _ruff(root: Path, name: str, text: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "ruff", *arguments, "--stdin-filename", f"dflash_moe/{name}.pyi", "-"]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True, input=text, timeout=LIMIT_S).stdout


def rewrite(text: str) -> str:
    """Returns what pybind11-stubgen wrote with types, imports and docstrings of this package."""
    of_core = sorted(set(re.findall(r"\bdflash_moe\._core\.(\w+)", text)))
    for pattern, spelling in _SPELLINGS:
        text = re.sub(pattern, spelling, text)
    module = ast.parse(text)
    head = _wrapped(f"{ast.get_docstring(module)}\n\n`make stubs` writes this file.", 0)
    body = [_tightened(node, 0) for node in module.body if _is_declared(node)]
    names = {node.id for item in body for node in ast.walk(item) if isinstance(node, ast.Name)}
    imports = [line for name, line in _IMPORTS.items() if name in names]
    imports += [f"from dflash_moe._core import {name}" for name in of_core]
    blocks = ["from __future__ import annotations", "\n".join(imports), *map(ast.unparse, body)]
    return "\n\n".join([f'"""{head}\n"""', *blocks]) + "\n"


def _is_declared(node: ast.stmt) -> bool:
    """Imports, the module's docstring and `__all__`, which names everything, are written anew or
    left out.
    """
    is_names = isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "__all__"
    return not isinstance(node, (ast.Import, ast.ImportFrom, ast.Expr)) and not is_names


def _tightened(node: ast.stmt, depth: int) -> ast.stmt:
    if isinstance(node, ast.AnnAssign):
        node.value = None
    if not isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return node
    if isinstance(node, ast.FunctionDef):
        _tighten_defaults(node.args)
    doc = ast.get_docstring(node)
    items = [item for item in node.body if not isinstance(item, ast.Expr)]
    node.body = [_tightened(item, depth + 1) for item in items]
    if doc:
        node.body.insert(0, ast.Expr(ast.Constant(_docstring(doc, 4 * (depth + 1)))))
    node.body = node.body or [ast.Expr(ast.Constant(...))]
    return node


def _tighten_defaults(arguments: ast.arguments) -> None:
    given = [*zip(arguments.args[::-1], arguments.defaults[::-1], strict=False)]
    given += [*zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    for argument, default in given:
        if isinstance(default, ast.Constant) and argument.arg == "numerics":
            default.value = ...  # a class is named where it is defined (numerics_names.py)
        is_none = isinstance(default, ast.Constant) and default.value is None
        annotation = ast.unparse(argument.annotation) if argument.annotation else "Any"
        if is_none and not re.search(r"\b(None|Any|object)\b", annotation):
            argument.annotation = ast.parse(f"{annotation} | None", mode="eval").body


def _docstring(doc: str, margin: int) -> str:
    """Wraps a docstring: on one line with its quotes where it fits, else with the closing ones on a
    line of their own.
    """
    text = _wrapped(doc, margin)
    if "\n" not in text and margin + len(text) + 6 > WIDTH:
        text = _wrapped(doc, margin, WIDTH - 6)  # ruff would join the quotes to an only line
    return f"{text}\n{' ' * margin}" if "\n" in text else text


def _wrapped(doc: str, margin: int, width: int = WIDTH) -> str:
    """Wraps each line of `doc` for itself. The first follows three quotes."""
    lines: list[str] = []
    for line in doc.split("\n"):
        lead = "" if lines else '"""'
        lines += textwrap.wrap(line, width - margin, break_long_words=False, break_on_hyphens=False, initial_indent=lead) or [
            ""
        ]
    first, *others = lines
    return "\n".join([first.removeprefix('"""'), *(f"{' ' * margin}{line}".rstrip() for line in others)])


if __name__ == "__main__":
    folder = Path(__file__).resolve().parents[2]
    if missing := unable(folder):
        sys.exit(f"stubs: {missing}")
    for module_name in MODULES:
        (folder / f"dflash_moe/{module_name}.pyi").write_text(generate(folder, module_name), encoding="utf-8")
