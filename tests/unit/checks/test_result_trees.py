"""Results name the trees of git that they were measured with: what is missing, changed or lost.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench.record.steps import STEPS, Step
from bench.record.trees import is_of_head, moved_on, paths_of, tree_ids, with_trees
from tests.checks import result_trees

# Of a step that depends on csrc/base and csrc/compute.
STEP = Step("experts", ("any",), 1, lambda _place: [])
BOTH = {"csrc/base": "a", "csrc/compute": "a"}


def git(root: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    return subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def commit(root: Path, **texts: str) -> str:
    for path, text in texts.items():
        file = root / path / "file"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    git(root, "add", "-A")
    git(root, "commit", "-qm", "some")
    return git(root, "rev-parse", "HEAD")


def record(root: Path, result: dict[str, object]) -> None:
    file = root / "bench/results/any.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    return tmp_path


def test_a_result_names_the_trees_of_its_commit_and_not_those_of_now(root: Path) -> None:
    first = commit(root, **BOTH)
    commit(root, **{"csrc/base": "b"})
    result = with_trees({"schema": 1, "commit": first, "rows": []}, STEP, root)
    assert list(result) == ["schema", "commit", "trees", "rows"]
    assert result["trees"] == {path: git(root, "rev-parse", f"{first}:{path}") for path in BOTH}
    assert moved_on(root, result) == ["csrc/base"]


def test_a_path_that_a_commit_lacks_has_no_id(root: Path) -> None:
    assert tree_ids(root, commit(root, csrc="a"), ["csrc", "dflash_moe"])["dflash_moe"] is None


def test_a_result_without_ids_is_a_finding_that_says_how_they_are_added(root: Path) -> None:
    record(root, {"commit": commit(root, csrc="a"), "rows": []})
    assert result_trees.find(root) == [
        "bench/results/any.json: no ids of trees; `python -m bench.record.trees` adds them where its commit is known, "
        "else `make results` measures it again"
    ]


def test_a_lost_commit_is_named_and_no_finding_and_its_trees_are_still_compared(root: Path) -> None:
    result = with_trees({"commit": commit(root, **BOTH), "rows": []}, STEP, root)
    git(root, "checkout", "-q", "--orphan", "squashed")
    commit(root, **{"csrc/base": "b"})
    git(root, "branch", "-qD", next(iter(set(git(root, "branch", "--format=%(refname:short)").split()) - {"squashed"})))
    git(root, "reflog", "expire", "--expire=now", "--all")
    git(root, "gc", "-q", "--prune=now")
    record(root, result)
    assert result_trees.find(root) == []
    assert result_trees.report(root).splitlines() == [
        "recorded results: 0 of 1 were measured with the trees of HEAD",
        "  other csrc/base: any",
        "  at commits that this history lacks: any",
    ]


def test_a_result_is_of_head_while_nothing_that_its_step_depends_on_has_changed(root: Path) -> None:
    result = {"commit": commit(root, **BOTH), "rows": []}
    commit(root, docs="a", **{"csrc/wire": "a"})
    assert is_of_head(root, result, STEP)
    recorded = with_trees(result, STEP, root) | {"commit": "f" * 40}
    assert is_of_head(root, recorded, STEP)
    commit(root, **{"csrc/compute": "b"})
    assert not is_of_head(root, result, STEP)
    assert not is_of_head(root, recorded, STEP)
    assert not is_of_head(root, {"commit": "f" * 40, "rows": []}, STEP)


def test_a_result_of_an_unknown_commit_stays_without_ids(root: Path) -> None:
    commit(root, csrc="a")
    assert with_trees({"commit": "f" * 40, "rows": []}, STEP, root) == {"commit": "f" * 40, "rows": []}


def test_what_a_step_depends_on_is_there() -> None:
    top = Path(__file__).resolve().parents[3]
    assert [path for step in STEPS for path in paths_of(step) if not (top / path).exists()] == []
