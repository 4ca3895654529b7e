"""Checks that comments in files which no formatter reads (shell, make, CMake, YAML, TOML) end
before column 100.

ruff looks after Python (W505), and clang-format after C++. Drawings and commands, which are
indented by four spaces, may be wider.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.checks.sources import project_files

MAX_COLUMNS = 100
_COMMENT = re.compile(r"^\s*#(?!!)(?! {4})")  # neither a shebang nor an indented drawing or command


def find(root: Path) -> list[str]:
    """Returns a finding for every line of comment in `root` that is wider than MAX_COLUMNS."""
    files = {*project_files(root, ".yaml", ".toml", ".cmake", ".txt"), root / "Makefile"}
    files |= {path for path in (root / ".ci").iterdir() if path.is_file()}
    findings = []
    for path in sorted(files):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if _COMMENT.match(line) and len(line) > MAX_COLUMNS:
                findings.append(
                    f"{path.relative_to(root)}:{number}: a comment of {len(line)} columns; {MAX_COLUMNS} are the limit"
                )
    return findings
