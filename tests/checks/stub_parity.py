"""Checks the stubs of the extensions (dflash_moe/_core.pyi, _measure.pyi, _simulation.pyi) against
the built modules: they have the same names, members and parameter names, in both directions.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

MODULES = ("_core", "_measure", "_simulation")
# pybind11 and Python put these names on every class and module.
_IMPLIED = re.compile(r"^__(?!init__$|version__$|enter__$|exit__$)\w+__$|^_pybind11_\w+$")


def find(root: Path) -> list[str]:
    """Returns the differences between the stubs and the modules. One that is not built is a finding
    too.
    """
    findings = []
    for name in MODULES:
        stub = f"dflash_moe/{name}.pyi"
        try:
            module = importlib.import_module(f"dflash_moe.{name}")
        except ImportError as error:
            findings.append(f"dflash_moe.{name} cannot be imported ({error}); run make")
            continue
        findings += [f"{stub}: {finding}" for finding in compare((root / stub).read_text(encoding="utf-8"), module)]
    return findings


def compare(stub_text: str, module: ModuleType | Any) -> list[str]:
    """Returns a line for each name that only one side has, and for each function whose parameters
    differ.
    """
    names, functions, classes = _declared(ast.parse(stub_text).body)
    findings = _name_findings("", names, _public(module))
    for name, node in functions.items():
        if hasattr(module, name):
            findings += _parameter_findings(name, node, getattr(module, name))
    for name, node in classes.items():
        if not hasattr(module, name):
            continue
        cls = getattr(module, name)
        members, methods, _ = _declared(node.body)
        findings += _name_findings(f"{name}.", members - {"__init__"}, _public(cls) - {"__init__"})
        for method, method_node in methods.items():
            if hasattr(cls, method):
                findings += _parameter_findings(f"{name}.{method}", method_node, getattr(cls, method))
    return findings


def _declared(
    body: list[ast.stmt],
) -> tuple[set[str], dict[str, ast.FunctionDef], dict[str, ast.ClassDef]]:
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    values = {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    return {*functions, *classes, *values}, functions, classes


def _public(owner: Any) -> set[str]:
    return {name for name in dir(owner) if not _IMPLIED.match(name)}


def _name_findings(prefix: str, declared: set[str], present: set[str]) -> list[str]:
    findings = [f"{prefix}{name} is declared but not in the module" for name in sorted(declared - present)]
    return findings + [f"{prefix}{name} is in the module but not declared" for name in sorted(present - declared)]


def _parameter_findings(name: str, node: ast.FunctionDef, function: Any) -> list[str]:
    found = parameters_of_docstring(name.rpartition(".")[2], getattr(function, "__doc__", None) or "")
    if found is None:
        return []
    arguments = node.args
    declared = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    if arguments.vararg and all(re.fullmatch(r"self|arg\d+|\*args", item) for item in found):
        # This is a fast path without keyword names, and the comment of the stub says what it takes.
        return []
    declared += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    if [item for item in declared if item != "self"] != [item for item in found if item != "self"]:
        return [f"line {node.lineno}: {name} declares ({', '.join(declared)}), the module takes ({', '.join(found)})"]
    return []


def parameters_of_docstring(name: str, doc: str) -> list[str] | None:
    """Returns the parameter names of the signature that pybind11 writes first, None for overloads
    and anything else.
    """
    match = re.match(rf"^{re.escape(name)}\((.*)\)(?: -> .*)?$", doc.strip().splitlines()[0] if doc.strip() else "")
    if match is None or "Overloaded function" in doc:
        return None
    names, depth, current = [], 0, ""
    for character in match[1] + ",":
        depth += character in "([{"
        depth -= character in ")]}"
        if character == "," and depth == 0:
            names.append(re.split(r"[:=]", current, maxsplit=1)[0].strip())
            current = ""
        else:
            current += character
    return [item for item in names if item and item not in {"*", "/"}]
