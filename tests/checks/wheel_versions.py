"""Checks that cibuildwheel would build a wheel for each Python version that pyproject.toml names,
on each architecture, and nothing else. No container is needed to ask it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ARCHITECTURES = ("x86_64", "aarch64")
# cibuildwheel itself needs this version.
OLDEST = (3, 11)


def find(root: Path) -> list[str]:
    """Returns a finding for each identifier that is missing or too much."""
    if sys.version_info < OLDEST:
        return []
    versions = re.findall(
        r'"Programming Language :: Python :: 3\.(\d+)"', (root / "pyproject.toml").read_text(encoding="utf-8")
    )
    wanted = {f"cp3{minor}-manylinux_{architecture}" for minor in versions for architecture in ARCHITECTURES}
    command = [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--platform", "linux", str(root)]
    # Its own settings in the environment would answer for somebody else.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CIBW_")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    if done.returncode:
        return [f"pyproject.toml: cibuildwheel refuses it: {done.stderr.strip().splitlines()[-1]}"]
    found = set(done.stdout.split())
    return [
        *(f"pyproject.toml: cibuildwheel would not build {name}, whose Python is named" for name in sorted(wanted - found)),
        *(f"pyproject.toml: cibuildwheel would build {name}, whose Python is not named" for name in sorted(found - wanted)),
    ]
