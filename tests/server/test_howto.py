"""The commands at the ends of docs/howto/serve.md and observe.md do what these say.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]
ROOT = Path(__file__).parents[2]


def said_by(name: str, folder: Path) -> str:
    """What the command at the end of a page says, run in an empty folder."""
    page = (ROOT / "docs" / "howto" / name).read_text()
    (script,) = re.findall(r"<!-- tested -->\n```bash\n(.*?)```", page, re.DOTALL)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = script.replace("8123", str(port)).replace(".venv/bin/dflash-moe", f"{sys.executable} -m dflash_moe")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        ["bash", "-em", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_the_command_at_the_end_completes_a_text(tmp_path):
    said = said_by("serve.md", tmp_path)
    answer = json.loads(said[said.index("{") : said.rindex("}") + 1])
    assert answer["usage"]["completion_tokens"] == 8


def test_the_command_at_the_end_reads_metrics(tmp_path):
    said = said_by("observe.md", tmp_path)
    assert "dflash_moe_ready 1.0\n" in said
    assert "dflash_moe_time_to_first_token_seconds_count 1.0\n" in said
    assert re.search(r'^dflash_moe_worker_up\{worker="[^"]+"\} 1.0$', said, re.MULTILINE)
