"""Runs the commands of a page in docs/howto as the page has them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_page(page: str, folder: Path, changed: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the script below the mark `tested` of a page in `folder`, with some texts `changed`
    before, and returns what it wrote. It must succeed.
    """
    text = (ROOT / "docs" / "howto" / page).read_text()
    (script,) = re.findall(r"<!-- tested -->\n```bash\n(.*?)```", text, re.DOTALL)
    for was, now in {".venv/bin/dflash-moe": f"{sys.executable} -m dflash_moe", **(changed or {})}.items():
        script = script.replace(was, now)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = ["bash", "-e", "-c", script]
    found = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return found
