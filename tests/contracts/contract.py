"""Compares a table of what is used of somebody's package with the source in a wheel of it, which is
not installed: names, parameters in order, and the few places in which a statement matters.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# A file below the package, and a dotted name in it.
Place = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Contract:
    """What is used of one package."""

    package: str
    # Functions -> the names of their parameters, which must be the first ones in this order.
    functions: Mapping[Place, tuple[str, ...]]
    # Functions -> names that must be among their parameters.
    options: Mapping[Place, tuple[str, ...]] = field(default_factory=dict)
    # Classes -> fields, attributes or methods that are read of them.
    fields: Mapping[Place, tuple[str, ...]] = field(default_factory=dict)
    # Functions -> what their source must say, and what breaks where it does not.
    statements: Mapping[Place, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    # Functions that must let errors of what they call pass.
    passing: tuple[Place, ...] = ()

    def places(self) -> set[Place]:
        """Returns all that the tables name."""
        return {*self.functions, *self.options, *self.fields, *self.statements, *self.passing}

    def findings(self, wheel: Path) -> list[str]:
        """Returns what does not hold in the wheel, one line for each."""
        found = []
        with zipfile.ZipFile(wheel) as files:
            sources = {
                path: files.read(f"{self.package}/{path}").decode()
                for path in {path for path, _name in self.places()}
                if f"{self.package}/{path}" in files.namelist()
            }
        for path, name in sorted(self.places()):
            node = _named(ast.parse(sources.get(path, "")), name)
            if node is None:
                found.append(f"{path} has no {name}")
            else:
                found += self._findings_at((path, name), node, sources[path])
        return found

    def _findings_at(self, place: Place, node: ast.AST, source: str) -> Iterator[str]:
        name = place[1]
        if wanted := self.functions.get(place):
            taken = _parameters(node)
            if tuple(taken[: len(wanted)]) != wanted:
                yield f"{name} takes {', '.join(taken)}, not {', '.join(wanted)}"
        for option in self.options.get(place, ()):
            if option not in _parameters(node):
                yield f"{name} takes no {option}"
        known = _fields(node) if place in self.fields else set()
        for one in self.fields.get(place, ()):
            if one not in known:
                yield f"{name} has no {one}"
        for text, broken in self.statements.get(place, ()):
            if text not in (ast.get_source_segment(source, node) or ""):
                yield f"{name}: {broken}"
        if place in self.passing and any(isinstance(one, ast.Try) for one in ast.walk(node)):
            yield f"{name}: an error of what it calls is caught"


def version_of(wheel: Path) -> str:
    """Returns the version in the name of a wheel."""
    match = re.match(r"[A-Za-z0-9_.]+-([^-]+)-", wheel.name)
    if match is None:
        raise SystemExit(f"{wheel.name} is not the name of a wheel")
    return match[1]


def _named(tree: ast.AST, name: str) -> ast.AST | None:
    for part in name.split("."):
        # Of overloads the last definition is the one that counts.
        found = [node for node in getattr(tree, "body", []) if getattr(node, "name", None) == part]
        if not found:
            return None
        tree = found[-1]
    return tree


def _parameters(node: ast.AST) -> Sequence[str]:
    if not isinstance(node, ast.FunctionDef):
        return []
    names = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    is_bound = any(getattr(one, "id", "") == "classmethod" for one in node.decorator_list)
    return names[1:] if is_bound else names


def _fields(node: ast.AST) -> set[str]:
    found = {one.target.id for one in ast.walk(node) if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    found |= {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)}
    return found | {one.name for one in ast.walk(node) if isinstance(one, ast.FunctionDef)}
