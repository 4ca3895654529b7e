"""Every recorded result names git's ids of the trees that it depends on (bench/record/trees.py).

One without them is a finding. Names are told of those whose trees have changed since, and of those
whose commit this history lacks (a squash, a rebase, a shallow clone): neither is a fault.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.record.trees import moved_on, tree_ids


def find(root: Path) -> list[str]:
    """Returns the results that lack the ids."""
    return [
        f"bench/results/{name}.json: no ids of trees; `python -m bench.record.trees` adds them where its commit is known, "
        "else `make results` measures it again"
        for name, result in _results(root).items()
        if not result.get("trees")
    ]


def report(root: Path) -> str:
    """Returns a few lines: which results were measured with other trees, or at a lost commit."""
    results = {name: result for name, result in _results(root).items() if result.get("trees")}
    changed: dict[tuple[str, ...], list[str]] = {}
    for name, result in results.items():
        if paths := tuple(moved_on(root, result)):
            changed.setdefault(paths, []).append(name)
    lost = [name for name, result in results.items() if tree_ids(root, result["commit"], ()) is None]
    same = len(results) - sum(map(len, changed.values()))
    lines = [f"recorded results: {same} of {len(results)} were measured with the trees of HEAD"]
    lines += [f"  other {', '.join(paths)}: {', '.join(names)}" for paths, names in changed.items()]
    lines += [f"  at commits that this history lacks: {', '.join(lost)}"] if lost else []
    return "\n".join(lines)


def _results(root: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted((root / "bench/results").glob("*.json"))}
