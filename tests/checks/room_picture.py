"""Draws the rooms of the product from its imports and includes, into docs/architecture.md, and
finds where the drawing there is stale. `python -m tests.checks.room_picture` draws it anew.

A room stands above all that it knows. Of its arrows those are drawn that no longer way implies, so
that what is left can be read as a building: who wants to know what a room may rest on follows them
down. An arrow means an import or include that is there, not one that the tables would allow.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.checks import documents, layers
from tests.checks.cycles import python_imports
from tests.checks.sources import project_files

DOCUMENT = "docs/architecture.md"
NAME = "rooms"
# What everything stands on, and what is no room: files directly in the package.
GROUND = {"errors", "named_files", "version", "telemetry", "config", "base"}
GROUND |= {"_core", "_measure", "_simulation", "__init__", "__main__"}
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"/]+)/', re.MULTILINE)


def find(root: Path) -> list[str]:
    """Returns a finding where the document's drawing is not that of the imports."""
    text = (root / DOCUMENT).read_text(encoding="utf-8")
    if documents.block(text, NAME) == render(root):
        return []
    return [f"{DOCUMENT}: the picture of the rooms is stale; run python -m tests.checks.room_picture"]


def render(root: Path) -> str:
    """Returns the picture, a line for each room from the top floor down."""
    parts = [("dflash_moe/", python_rooms(root)), ("csrc/", cpp_rooms(root))]
    width = max(len(room) for _, graph in parts for room in graph)
    lines = []
    for title, graph in parts:
        lines.append(f"    {title}")
        floors = _floors(graph)
        for room in sorted(graph, key=lambda one: (-floors[one], one)):
            below = _without_detours(graph, room)
            lines.append(f"      {room.ljust(width)}  -> {', '.join(below)}" if below else f"      {room}")
        lines.append("")
    return "\n" + "\n".join(lines)


def python_rooms(root: Path) -> dict[str, set[str]]:
    """Returns for each room of the package the rooms from which it imports."""
    graph: dict[str, set[str]] = {}
    for module, targets in python_imports(root).items():
        room = _room(module)
        known = graph.setdefault(room, set())
        known |= {_room(target) for target in targets} - {room}
    return _rooms_only(graph)


def _room(module: str) -> str:
    return layers.room_of(Path(*module.split(".")) / "__init__.py").split("/")[0] if module.count(".") else "__init__"


def cpp_rooms(root: Path) -> dict[str, set[str]]:
    """Returns for each room of the core the rooms from which it includes."""
    csrc = root / "csrc"
    graph: dict[str, set[str]] = {}
    for path in project_files(root, ".h", ".cc", ".cu"):
        if csrc in path.parents:
            room = path.relative_to(csrc).parts[0]
            graph.setdefault(room, set()).update(set(_INCLUDE.findall(path.read_text(encoding="utf-8"))) - {room})
    return _rooms_only({room: known & graph.keys() for room, known in graph.items()})


def _rooms_only(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    return {room: known - GROUND for room, known in graph.items() if room not in GROUND}


def _reached(graph: Mapping[str, set[str]], room: str) -> set[str]:
    return graph[room].union(*(_reached(graph, other) for other in graph[room]))


def _without_detours(graph: Mapping[str, set[str]], room: str) -> list[str]:
    implied = set().union(*(_reached(graph, other) for other in graph[room]))
    return sorted(graph[room] - implied)


def _floors(graph: Mapping[str, set[str]]) -> dict[str, int]:
    floors: dict[str, int] = {}

    def floor(room: str) -> int:
        if room not in floors:
            floors[room] = 1 + max(map(floor, graph[room]), default=0)
        return floors[room]

    for room in graph:
        floor(room)
    return floors


def rewrite(root: Path) -> None:
    """Draws the picture in the document."""
    path = root / DOCUMENT
    path.write_text(documents.with_block(path.read_text(encoding="utf-8"), NAME, render(root)), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(rewrite(Path(__file__).resolve().parents[2]))
