"""The commands in docs/howto/register.md do what the page says.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
import socket

import pytest

from tests.e2e.page_scripts import run_page


@pytest.mark.transformers
def test_the_commands_of_the_page_register_a_worker_and_generate(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    found = run_page("register.md", tmp_path, {"7170": port})
    assert "wrote the key of worker w0 to w0.key (mode 0600)" in found.stdout
    assert f"worker w0 registers at tcp://127.0.0.1:{port}" in found.stdout
    assert "worker w0 is connected" in found.stderr
    assert re.search(r"\b8 tokens", found.stdout + found.stderr), found.stderr
