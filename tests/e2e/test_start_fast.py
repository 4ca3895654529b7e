"""The commands in docs/howto/start_fast.md do what the page says.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re

import pytest

from tests.e2e.page_scripts import run_page


@pytest.mark.transformers
def test_the_commands_of_the_page_write_run_and_remove(tmp_path):
    found = run_page("start_fast.md", tmp_path)
    folder = re.escape(f"{tmp_path}/packed")
    for said in (
        rf"^{folder}: wrote 4 files, 5\.\d MiB in ",
        rf"^{folder}: 5\.\d MiB of ",
        r"^4 files, 5\.\d MiB: all as they were written$",
        r"^removed 0 files, 0 bytes; 5\.\d MiB are left$",
        r"^removed \d files, 5\.\d MiB; 0 bytes are left$",
    ):
        assert re.search(said, found.stdout + found.stderr, re.MULTILINE), (said, found.stdout)
    # What `warm` wrote was mapped, so that the workers had nothing to write.
    assert "packed experts are written" not in found.stderr
