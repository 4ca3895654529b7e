"""Lists the files that belong to the project: what git tracks or would track, so that build outputs
are never looked at.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import subprocess
from pathlib import Path

SKIPPED_FOLDERS = {".git", ".venv", "build", "__pycache__", "dist", ".mypy_cache", ".ruff_cache", ".pytest_cache"}


def project_files(root: Path, *suffixes: str) -> list[Path]:
    """Returns the sorted paths below `root` with these suffixes, or all when none is given. A
    folder without git is walked instead.
    """
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0 and (root / ".git").exists():
        paths = [root / name for name in listed.stdout.decode().split("\0") if name]
    else:
        paths = [path for path in root.rglob("*") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts)]
    return sorted({path for path in paths if path.is_file() and (not suffixes or path.suffix in suffixes)})
