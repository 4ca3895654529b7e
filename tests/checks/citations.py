"""Checks that what comments and docstrings cite is there: files and decisions, and no document that
a reader of this repository does not have.

A comment that says "see rules 7" sends the reader to nothing. It has to carry its reason itself or
name a file that exists.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.checks.comments import comments_of
from tests.checks.sources import project_files

# This finds paths with a suffix of ours. A bare name counts as well, because the file may lie in
# any folder, and `_neon.cc` is the end of a name.
_FILE = re.compile(r"(?<![\w/.{}<>$*-])((?:[\w.-]+/)*[\w-]+\.(?:md|h|cc|cu|cuh|py|pyi|yaml|cmake))\b(?![\w(/])")
_DECISIONS = re.compile(r"\bdecisions?[ /](\d{1,4})((?:(?:, ?| and )\d{1,4})*)")
# This finds chapters of documents: "rules 7", "rules.md 7", "design.md section 6", "style: C.7".
_ELSEWHERE = re.compile(r"\b(?:rules?|design|style|facts)(?:\.md)?:? (?:section )?(?:[0-9]|[A-G]\.[0-9])")
# These are headers of the system and of vendors, and names that stand for any file.
FOREIGN = {"cuda.h", "hip/hip_runtime.h", "unistd.h", "fcntl.h", "poll.h", "Python.h", "room/file.h", "x.h"}
FOREIGN |= {"mmasim/simulator/nv.py"}  # of the project that decision 18 took its layouts from
_FOREIGN_FOLDERS = ("linux/", "sys/", "include/")


def find(root: Path) -> list[str]:
    """Returns a finding for every citation of a file, decision or chapter that does not exist."""
    paths = [path.relative_to(root).as_posix() for path in project_files(root)]
    decisions = {int(Path(name).name[:4]) for name in paths if re.match(r"docs/decisions/\d{4}-", name)}
    findings = []
    for path in project_files(root):
        where = path.relative_to(root)
        if "checks" in where.parts:
            # Checks cite what is missing, to say what they look for.
            continue
        for number, line in _lines_of(path):
            at = f"{where}:{number}"
            findings += [f"{at}: {name} does not exist" for name in _FILE.findall(line) if not _exists(name, path, root, paths)]
            for first, more in _DECISIONS.findall(line):
                missing = {int(text) for text in [first, *re.findall(r"\d+", more)]} - decisions
                findings += [f"{at}: there is no decision {text:04}" for text in sorted(missing)]
            if match := _ELSEWHERE.search(line):
                findings.append(f"{at}: '{match[0]}' is in no document of this repository; say the reason here")
    return findings


def _lines_of(path: Path) -> list[tuple[int, str]]:
    if path.suffix == ".md":
        return [(n, line) for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if "://" not in line]
    if path.suffix in (".json", ".png", ".svg", ".safetensors"):
        return []
    try:
        return list(comments_of(path))
    except UnicodeDecodeError:
        # The file is of a corpus of the fuzzers.
        return []


def _exists(name: str, path: Path, root: Path, paths: list[str]) -> bool:
    if name in FOREIGN or name.startswith(_FOREIGN_FOLDERS):
        return True
    if (root / name).exists() or (path.parent / name).exists():
        return True
    if path.suffix == ".md" and name.endswith(".yaml") and "/" not in name:
        # The reader of the document writes this topology.
        return True
    return any(other.endswith(name if name.startswith("_") else f"/{name}") for other in paths)
