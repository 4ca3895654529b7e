"""Checks the layer contract of the Python package: who may import whom, and where torch may be
imported.

Imports inside functions and under TYPE_CHECKING count, because an arrow means knowledge and not the
order of loading. The table draws the rooms of docs/architecture.md. Why `model` and `protocol` are
rooms of their own is in docs/decisions/0003-model-and-protocol-rooms.md.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.checks.sources import project_files

PACKAGE = "dflash_moe"

_GROUND = {"errors", "named_files", "telemetry"}
_SETTINGS = _GROUND | {"config", "topology"}
_DESCRIPTION = _SETTINGS | {"protocol", "model"}
_SHARDS = _DESCRIPTION | {"placement", "store"}
_CALLS = _SHARDS | {"holders", "experts"}
# What runs a model's own layers, what runs whole models, and the engine that batches requests.
_MODELS = _CALLS | {"operators", "integrations"}
_HOST = _MODELS | {"forward", "engine", "proofs", "handover", "workers"}

# Each room may import these rooms. `_core` is below everything, and `errors` is what it raises.
# `_measure`, the extension that only measures, is for benchmarks. `_simulation`, which simulates
# failures, is for its command. A folder inside a room that has a line here is a room of its own:
# whoever may import the outer one may import it, but the outer one itself must say so.
MAY_IMPORT: dict[str, set[str]] = {
    "version": set(),
    "errors": set(),
    "named_files": set(),
    "telemetry": {"errors"},
    "config": _GROUND,
    "topology": _GROUND | {"config"},
    "protocol": _SETTINGS,
    "model/formats": _SETTINGS,
    "model": _SETTINGS | {"model/formats"},
    # What is kept on disk. Messages and placements are nothing to it.
    "store": _SETTINGS | {"model"},
    "placement": _DESCRIPTION,
    "workers": _DESCRIPTION | {"store"},
    # Whether a holder computes the right numbers; how holders are started is nothing to it.
    "holders/audit": _SHARDS,
    "holders": _SHARDS | {"holders/audit"},
    "experts": _SHARDS | {"holders"},
    "handover": _CALLS,
    # Operators of a host's own model. Workers are nothing to them, and what calls them is above.
    "operators": _DESCRIPTION | {"store"},
    "operators/layers": _DESCRIPTION | {"operators", "store"},
    "integrations": _CALLS | {"operators"},
    # Imported by processes of these engines alone, which have what is imported.
    "integrations/vllm": _CALLS | {"operators", "integrations"},
    "integrations/sglang": _CALLS | {"operators", "integrations"},
    # Has a cluster start workers; neither calls nor models are anything to it.
    "integrations/ray": _SETTINGS | {"protocol", "workers"},
    "forward": _MODELS,
    "engine": _MODELS | {"forward"},
    "proofs": _MODELS | {"forward", "engine"},
    # The front is a process of its own, without torch: it takes what of these has none.
    "server/front": _GROUND | {"config", "integrations", "engine"},
    "server": _MODELS | {"forward", "engine", "server/front"},
    "bench": _HOST | {"testing", "_measure"},
    "testing": _DESCRIPTION,
    "cli": _HOST | {"bench", "server", "_simulation"},
    "__init__": _HOST,
    "__main__": {"cli"},
}
EVERYBODY_MAY_IMPORT = {"_core", "version"}

# What lies beside the package in a checkout measures and proves it, and is in no wheel.
OUTSIDE = {"bench", "tests"}

# Some rooms may import these packages, but always inside a function, because importing ours must
# work without them. What runs models is itself imported inside functions, and may do it at the top.
HEAVY = {"torch", "transformers", "tokenizers", "matplotlib", "vllm", "sglang", "ray"}
HEAVY_AT_TOP = {"operators", "operators/layers", "integrations", "integrations/vllm", "integrations/sglang"}
HEAVY_AT_TOP |= {"forward", "engine", "proofs"}
HEAVY_IN_FUNCTIONS = {"model", "model/formats", "experts", "bench", "cli", "integrations/ray"} | HEAVY_AT_TOP
# Of these packages some rooms may import only one, inside functions.
HEAVY_ONES = {"server/front": {"tokenizers"}}


def find(root: Path) -> list[str]:
    """Returns a finding for every import in `root`/dflash_moe that the tables do not allow."""
    findings: list[str] = []
    package_dir = root / PACKAGE
    for path in project_files(root, ".py"):
        if package_dir in path.parents:
            findings += _findings_of_file(path, root)
    return findings


def _findings_of_file(path: Path, root: Path) -> list[str]:
    where = path.relative_to(root)
    room = room_of(where)
    if room not in MAY_IMPORT:
        return [f"{where}: the room '{room}' is not in the layer table of tests/checks/layers.py; decide where it belongs"]
    findings = []
    allowed = MAY_IMPORT[room] | EVERYBODY_MAY_IMPORT | {room}
    for target, line, at_top in imports_of(path, where):
        top_level = target[0]
        if top_level == PACKAGE:
            other = _room(target[1:]) if len(target) > 1 else "__init__"
            outer = other.split("/")[0]
            is_allowed = other in allowed or (outer in allowed and outer != room)
            if not is_allowed and not (other == "__init__" and room in {"cli", "bench", "__main__"}):
                findings.append(f"{where}:{line}: {room} must not import {other}; the arrows are in tests/checks/layers.py")
        elif top_level in OUTSIDE:
            findings.append(f"{where}:{line}: the package must not import {top_level}/, which no installation has")
        elif top_level in HEAVY:
            if room not in HEAVY_IN_FUNCTIONS and top_level not in HEAVY_ONES.get(room, ()):
                findings.append(f"{where}:{line}: {room} must not import {top_level}: a worker's installation lacks it")
            elif at_top and room not in HEAVY_AT_TOP:
                findings.append(f"{where}:{line}: import {top_level} inside the function that needs it: it is optional")
    return findings


def room_of(where: Path) -> str:
    """Returns the room of a file, whose path is relative to the repository: its folder, or its own
    name directly below the package.
    """
    return _room((*where.parts[1:-1], where.stem))


def _room(parts: tuple[str, ...]) -> str:
    inner = "/".join(parts[:2])
    return inner if inner in MAY_IMPORT else parts[0]


def imports_of(path: Path, where: Path) -> Iterator[tuple[tuple[str, ...], int, bool]]:
    """Yields for every import statement its target split at dots, its line, and whether it runs
    when the module is imported.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    late = _lines_that_run_late(tree)
    package_parts = where.with_suffix("").parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                # The attributes below show what a bare `import dflash_moe` uses.
                if alias.name != PACKAGE:
                    yield tuple(alias.name.split(".")), node.lineno, node.lineno not in late
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == PACKAGE:
            yield (PACKAGE, node.attr), node.lineno, node.lineno not in late
        elif isinstance(node, ast.ImportFrom):
            base = package_parts[: len(package_parts) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            if module == (PACKAGE,):
                for alias in node.names:
                    yield (PACKAGE, alias.name), node.lineno, node.lineno not in late
            else:
                yield module, node.lineno, node.lineno not in late


def _lines_that_run_late(tree: ast.Module) -> set[int]:
    """Returns the lines inside functions or below `if TYPE_CHECKING:`."""
    late: set[int] = set()
    for node in ast.walk(tree):
        is_type_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if is_type_only or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            late.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return late
