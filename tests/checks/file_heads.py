"""Checks that every source file opens with what it is for, and carries the SPDX line.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path

from tests.checks.sources import project_files

SPDX = "SPDX-License-Identifier: Apache-2.0"
_HEAD_LINES = 50


def find(root: Path) -> list[str]:
    """Returns a finding for each source file without an opening comment or docstring, or without
    the
    SPDX line near its top.
    """
    findings = []
    for path in project_files(root, ".py", ".h", ".cc"):
        where = path.relative_to(root)
        head = path.read_text(encoding="utf-8").splitlines()[:_HEAD_LINES]
        if not any(line.strip() for line in head):
            # An empty __init__.py marks a package.
            continue
        first = next(line for line in head if line.strip() and not line.startswith("#!"))
        if not first.startswith(('"""', 'r"""', "#", "//", "/*")):
            findings.append(f"{where}: opens without a comment that says what the file is for")
        if not any(SPDX in line for line in head):
            findings.append(f"{where}: lacks '{SPDX}' in its first {_HEAD_LINES} lines")
    return findings
