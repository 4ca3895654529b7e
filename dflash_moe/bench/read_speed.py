"""Measures how fast threads of this machine read memory, in turn with whatever is held against it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from dflash_moe import _core
from dflash_moe.telemetry.cores import last_cache_bytes
from dflash_moe.telemetry.machine import memory_available

# The buffer is so many times as large as the last cache, so that next to nothing of it is found
# there.
CACHES = 8
# Of a machine that does not tell its caches this is assumed, the share of a core in the largest.
ASSUMED_CACHE_BYTES = 64 << 20
# No thread reads less than this.
LEAST_BYTES = 16 << 20


def read_buffer_bytes(threads: int) -> int:
    """Returns the bytes that each of `threads` reads: CACHES times the last cache, or where memory
    is short its part of that, because threads may also share one cache.
    """
    wanted = CACHES * (last_cache_bytes() or ASSUMED_CACHE_BYTES)
    affordable = memory_available() // (4 * threads)
    return max(LEAST_BYTES, -(-wanted // threads), min(wanted, affordable))


@dataclass(slots=True)
class ReadSpeed:
    """The read speed of a number of threads alone, in every round so far: a `harness.Case`."""

    threads: int
    isa: str = ""
    bytes_per_s: list[float] = field(default_factory=list)
    rounds: int | None = None

    @property
    def label(self) -> str:
        """The name of the case in reports of progress."""
        return f"read speed, {self.threads} threads"

    def measure(self, *, keep: bool) -> None:
        """Reads the buffer a few times. Only this needs what measures; the demo uses the same cases
        without.
        """
        from dflash_moe import _measure

        found = _measure.read_bytes_per_s(self.isa or _core.best_isa(), self.threads, 3, read_buffer_bytes(self.threads))
        if keep:
            self.bytes_per_s += found

    def row(self) -> dict[str, Any] | None:
        """Returns None, because the speed stands in the rows that it bounds."""
        return None

    @property
    def median(self) -> float | None:
        """The median in bytes a second, None before the first round."""
        return statistics.median(self.bytes_per_s) if self.bytes_per_s else None
