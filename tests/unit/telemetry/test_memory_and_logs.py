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
from dflash_moe.telemetry.memory import ProcessMemory, process_memory


def test_anonymous_and_file_backed_memory_are_told_apart(tmp_path: Path) -> None:
    before = process_memory()
    held = bytearray(os.urandom(1 << 20) * 32)
    path = tmp_path / "mapped"
    path.write_bytes(bytes(32 << 20))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[::4096]) == 0
        after = process_memory()
    assert after.anonymous_bytes - before.anonymous_bytes > 24 << 20
    assert after.file_bytes - before.file_bytes > 24 << 20
    del held


def test_a_process_that_is_gone_has_no_memory() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert process_memory(child.pid) == ProcessMemory(0, 0, 0)


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
