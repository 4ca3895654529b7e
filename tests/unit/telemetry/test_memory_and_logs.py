"""Resident memory as the kernel tells it, and log files without a name.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

from dflash_moe.telemetry.logs import LogFile
from dflash_moe.telemetry.memory import ProcessMemory, huge_page_bytes, process_memory


def test_anonymous_and_file_backed_memory_are_told_apart(tmp_path: Path) -> None:
    before = process_memory()
    # Not from the allocator, which may still have so much that another test has given back.
    held = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held.write(os.urandom(1 << 20) * 32)
    path = tmp_path / "mapped"
    path.write_bytes(bytes(32 << 20))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[::4096]) == 0
        after = process_memory()
    assert after.anonymous_bytes - before.anonymous_bytes > 24 << 20
    assert after.file_bytes - before.file_bytes > 24 << 20
    held.close()


def test_a_process_that_is_gone_has_no_memory() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert process_memory(child.pid) == ProcessMemory(0, 0, 0)
    assert huge_page_bytes(child.pid) is None


def test_what_lies_on_huge_pages_is_a_part_of_what_is_anonymous(monkeypatch, tmp_path: Path) -> None:
    found = huge_page_bytes()
    assert found is None or 0 <= found <= process_memory().anonymous_bytes
    said = tmp_path / "smaps_rollup"
    said.write_text("00400000-7fff [rollup]\nRss:  9 kB\nAnonHugePages:      6144 kB\nShmemPmdMapped: 1 kB\n")
    monkeypatch.setattr("dflash_moe.telemetry.memory.Path", lambda *_parts: said)
    assert huge_page_bytes() == 6144 << 10
    said.write_text("Rss:  9 kB\n")
    assert huge_page_bytes() is None


def test_a_log_has_no_name_and_keeps_its_last_lines() -> None:
    log = LogFile("w0")
    program = "import sys\nfor i in range(5000): print('line', i, flush=True)\nprint('last words', file=sys.stderr)"
    subprocess.run([sys.executable, "-c", program], stdout=log.fileno(), stderr=log.fileno(), check=True)
    assert "last words" in log.tail(3)
    assert len(log.tail().splitlines()) == 8
    assert "memfd:" in os.readlink(f"/proc/self/fd/{log.fileno()}")
    log.close()
    assert "last words" in log.tail(3)  # whoever explains a loss may come after the close
    log.close()
