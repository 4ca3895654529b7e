"""Says by which trees of git a recorded result was measured: the ids of the paths that it depends
on, beside its commit. They outlive a squash, a rebase and a shallow clone, in which the commit is
gone, and tell whether what was measured is still what is here.

    python -m bench.record.trees    adds them to results that lack them and whose commit is known

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.record.steps import ROOT, STEPS, Step
from dflash_moe.bench.results import read_result, text_of

RESULTS = ROOT / "bench" / "results"
# What calls of experts pass through on both sides.
_CALLS = (
    "csrc",
    *(
        f"dflash_moe/{room}"
        for room in ("config", "experts", "holders", "model", "placement", "protocol", "topology", "workers")
    ),
)
_FORWARD = (*_CALLS, *(f"dflash_moe/{room}" for room in ("forward", "integrations", "operators")))
# A step that stands in no line below runs models, and depends on all that these do. Command line,
# proofs and server change nothing of what it measures, unless it measures the server.
_MODELS = (*_FORWARD, "dflash_moe/engine")
# `verify` compares forwards, and imports nothing of the engine.
_PROOFS = (*_FORWARD, "dflash_moe/proofs")
_EXPERTS = ("csrc/base", "csrc/compute")
_GGUF = ("csrc/compute/formats", "dflash_moe/model")
_OF_STEP: Mapping[str, tuple[str, ...]] = {
    "ipc": ("csrc/base", "csrc/client", "csrc/transport", "csrc/wire", "csrc/worker"),
    "experts": _EXPERTS,
    "experts-bf16": _EXPERTS,
    "gemm": _EXPERTS,
    "peers": _EXPERTS,
    "class-errors": _EXPERTS,
    "weight-errors": _EXPERTS,
    "loading": (*_EXPERTS, "csrc/store", "csrc/worker"),
    "mapped": (*_EXPERTS, "csrc/store", "csrc/worker"),
    "link": ("dflash_moe/topology", "csrc/transport"),
    "simulation": ("csrc/base", "csrc/client", "csrc/simulation", "csrc/transport", "csrc/wire", "csrc/worker"),
    "gguf-architectures": _GGUF,
    "attention": (*_EXPERTS, "dflash_moe/operators"),
    "vllm-workers": _FORWARD,
    **dict.fromkeys(("parity", "odd-settings", "verify-real"), _PROOFS),
    **dict.fromkeys(("serving-peers", "serving-interference", "serving-faults"), (*_MODELS, "dflash_moe/server")),
    **dict.fromkeys(
        ("overlap", "worker-kills", "rolling-restarts", "audit", "faults", "fallback-kills", "device-step-faults",
         "earlier-commit", "skewed-routing", "several-hosts", "cluster-kills"),
        _CALLS,
    ),
}  # fmt: skip


def paths_of(step: Step) -> tuple[str, ...]:
    """Returns the paths, relative to the root, that decide what this step measures."""
    return _OF_STEP.get(step.name, _MODELS)


def tree_ids(root: Path, commit: str, paths: Iterable[str]) -> dict[str, str | None] | None:
    """Returns path -> id of its tree (or file) in `commit`, None for a path that the commit lacks.
    Returns None where this history does not have the commit.
    """
    if _revision(root, f"{commit}^{{commit}}") is None:
        return None
    return {path: _revision(root, f"{commit}:{path}") for path in paths}


def with_trees(result: dict[str, Any], step: Step, root: Path = ROOT) -> dict[str, Any]:
    """Returns `result` with the ids of what `step` depends on, at the commit that it names, and
    unchanged where that commit is unknown.
    """
    ids = tree_ids(root, result["commit"], paths_of(step))
    if ids is None:
        return result
    placed: dict[str, Any] = {}
    for key, value in result.items():
        placed[key] = value
        if key == "commit":
            placed["trees"] = ids
    return placed


def is_of_head(root: Path, result: Mapping[str, Any], step: Step) -> bool:
    """Says whether what `step` depends on is in HEAD as it was where `result` was measured."""
    paths = paths_of(step)
    measured = tree_ids(root, result["commit"], paths) or result.get("trees")
    return measured is not None and measured == tree_ids(root, "HEAD", paths)


def moved_on(root: Path, result: Mapping[str, Any]) -> list[str]:
    """Returns the paths of a result that have another id in this checkout's HEAD."""
    now = tree_ids(root, "HEAD", result["trees"]) or {}
    return [path for path, recorded in result["trees"].items() if now.get(path) != recorded]


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Writes a result as `dflash_moe.bench.results` does."""
    path.write_text(text_of(result), encoding="utf-8")


def _revision(root: Path, name: str) -> str | None:
    done = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", name], cwd=root, capture_output=True, text=True, check=False, timeout=10
    )
    return done.stdout.strip() if done.returncode == 0 else None


def main() -> int:
    """Adds what is missing, names what cannot be added, and returns 1 if there is any."""
    unknown = []
    for step in STEPS:
        for name in step.results:
            path = RESULTS / f"{name}.json"
            result = read_result(path) if path.is_file() else None
            if result is None or "trees" in result:
                continue
            found = with_trees(result, step)
            if "trees" in found:
                write(path, found)
            else:
                unknown.append(name)
                print(f"{name}: commit {result['commit'][:10]} is not in this history; measure it again", file=sys.stderr)
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
