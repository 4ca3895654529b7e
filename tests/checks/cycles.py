"""Checks that there are no circles, neither among the modules of the Python package nor among the
headers of the core.

Two modules that import each other can be read, tested and moved only together, however late the
imports run: so imports in functions and under TYPE_CHECKING count. Headers that include each other
compile (`#pragma once` sees to that) and mean something else in each order.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.checks.sources import project_files

PACKAGE = "dflash_moe"
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def find(root: Path) -> list[str]:
    """Returns a line for each circle, with its members in the order in which each knows the
    next.
    """
    return [
        f"circle: {' -> '.join(circle)}; move what both need below them, or what joins them above"
        for graph in (python_imports(root), cpp_includes(root))
        for circle in circles(graph)
    ]


def python_imports(root: Path) -> dict[str, set[str]]:
    """Returns for each module the modules of the package that an import statement in it names, late
    or not.
    """
    # Stubs stand for the extensions, which import nothing of the package.
    found = [path for path in project_files(root, ".py", ".pyi") if root / PACKAGE in path.parents]
    paths = {_module_of(path.relative_to(root)): path for path in found}
    return {module: set(_imported(module, path, paths)) - {module} for module, path in paths.items()}


def _module_of(where: Path) -> str:
    parts = where.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(module: str, path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    is_package = path.name == "__init__.py"
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            inner = {f"{source}.{alias.name}" for alias in node.names}
            yield from inner & known.keys()
            # `from package import name` is about the package's own file, unless all are modules.
            if source in known and not inner <= known.keys():
                yield source


def cpp_includes(root: Path) -> dict[str, set[str]]:
    """Returns for each header the headers of the core that it includes, by their paths from
    csrc/.
    """
    csrc = root / "csrc"
    paths = {str(path.relative_to(csrc)): path for path in project_files(root, ".h", ".cuh") if csrc in path.parents}
    return {
        name: {target for target in _INCLUDE.findall(path.read_text(encoding="utf-8")) if target in paths}
        for name, path in paths.items()
    }


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Returns a shortest circle of every group of nodes that can all reach each other."""
    found = []
    left = set(graph)
    while left:
        node = min(left)
        group = {node} | {other for other in _reachable(graph, node) if node in _reachable(graph, other)}
        left -= group
        if node in graph[node] or len(group) > 1:
            found.append(_shortest_circle(graph, group))
    return found


def _reachable(graph: Mapping[str, Iterable[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for other in graph.get(waiting.pop(), ()):
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return seen


def _shortest_circle(graph: Mapping[str, Iterable[str]], group: set[str]) -> list[str]:
    best: list[str] = []
    for start in sorted(group):
        paths = [[start]]
        seen = {start}
        while paths and (not best or len(paths[0]) < len(best) - 1):
            path = paths.pop(0)
            for other in sorted(set(graph[path[-1]]) & group):
                if other == start:
                    best = [*path, start] if not best or len(path) + 1 < len(best) else best
                elif other not in seen:
                    seen.add(other)
                    paths.append([*path, other])
    return best
