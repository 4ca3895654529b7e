"""What `doctor` tells of huge pages, on which weights lie where the system gives them
(csrc/compute/cpu/page_buffer.h): whether it does, and what reading without them costs here.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import mmap
import statistics
import time
from pathlib import Path
from typing import Any

from dflash_moe.telemetry.machine import memory_available

SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# Far beyond the caches of a core, and read in some milliseconds.
READ_BYTES = 128 << 20
# Two such blocks are taken only where that leaves others most of the memory.
LEAST_FREE_BYTES = 8 * READ_BYTES
ROUNDS = 5
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def probe_pages(switch: Path = SWITCH) -> dict[str, Any]:
    """Returns `huge_pages`, the chosen word of the system's switch (always, madvise or never), None
    where it has none; and `small_over_huge`, how many times as long this thread takes to read the
    same bytes on small pages, None where there are no huge ones.
    """
    try:
        text = switch.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        text = ""
    chosen = text.partition("[")[2].partition("]")[0] or None
    ratio = _small_over_huge() if chosen in ("always", "madvise") else None
    return {"huge_pages": chosen, "small_over_huge": ratio}


def pages_line(found: dict[str, Any]) -> str:
    """Returns the line of the report."""
    switch, ratio = found["huge_pages"], found["small_over_huge"]
    if switch is None:
        return "pages      this system has no switch for huge pages; weights lie on what it gives"
    if switch == "never":
        return (
            "pages      huge ones are switched off: weights lie on small pages, and reading them takes "
            f"longer; as root, `echo madvise > {SWITCH}` allows them"
        )
    line = f"pages      weights lie on huge pages ({switch})"
    if ratio is None:
        return line
    return f"{line}; on small ones the same bytes take {ratio:.2f} times as long to read (one thread, now)"


def _small_over_huge() -> float | None:
    """Reads two blocks in turns, and returns the median ratio of a turn. None where there is no
    memory for them.
    """
    if memory_available() < LEAST_FREE_BYTES:
        return None
    import numpy as np

    try:
        with mmap.mmap(-1, READ_BYTES, flags=_PRIVATE) as small, mmap.mmap(-1, READ_BYTES, flags=_PRIVATE) as huge:
            small.madvise(mmap.MADV_NOHUGEPAGE)
            huge.madvise(mmap.MADV_HUGEPAGE)
            blocks = [np.frombuffer(block, np.int64) for block in (small, huge)]
            for block in blocks:
                block.fill(1)  # a page that nobody wrote is a page of zeros that all share
            try:
                return statistics.median(_ratio(*blocks) for _ in range(ROUNDS))
            finally:
                del block, blocks  # a mapping with a view cannot be closed
    except (OSError, MemoryError):
        return None


def _ratio(small: Any, huge: Any) -> float:
    times = []
    for block in (small, huge):
        began = time.perf_counter()
        block.sum()
        times.append(time.perf_counter() - began)
    return times[0] / times[1]
