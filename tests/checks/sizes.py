"""Reports the longest source files. A report and not a rule: a long file asks whether it is two
things.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics
from pathlib import Path

from tests.checks.sources import project_files

LONG_LINES = 400


def report(root: Path) -> str:
    """One line on all source files, then one per file over LONG_LINES lines, longest first."""
    lengths = {
        path.relative_to(root): len(path.read_text(encoding="utf-8").splitlines())
        for path in project_files(root, ".py", ".pyi", ".h", ".cc")
    }
    if not lengths:
        return "sizes: no source files"
    median = statistics.median(lengths.values())
    total, longest = sum(lengths.values()), max(lengths.values())
    lines = [f"sizes: {len(lengths)} files, {total} lines, median {median:.0f}, longest {longest}"]
    for where, length in sorted(lengths.items(), key=lambda item: -item[1]):
        if length > LONG_LINES:
            lines.append(f"  {length:5d} {where}")
    return "\n".join(lines)
