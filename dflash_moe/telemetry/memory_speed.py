"""Measures within a fifth of a second how fast this machine's memory is read, for a guess at the
speed of a model before it is loaded.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import time
from concurrent import futures

import numpy as np

# More than most caches hold, so that it is memory that is read.
READ_BYTES = 256 << 20
# More threads than this do not make memory faster.
MAX_THREADS = 16
NUM_PASSES = 2
# Where a pass takes longer the machine is too busy, or too slow, to say anything of it.
PASS_LIMIT_S = 5.0


def memory_bytes_per_s(threads: int) -> float:
    """Returns how many bytes of memory so many threads read in a second: the best of some passes,
    because other programs only ever take speed away. It is 0 where a pass did not end in time.
    """
    threads = max(1, min(threads, MAX_THREADS))
    with futures.ThreadPoolExecutor(max_workers=threads, thread_name_prefix="memory") as pool:
        try:
            # Each thread writes its part first, because untouched pages take no memory.
            parts = list(pool.map(_written, [READ_BYTES // threads] * threads, timeout=PASS_LIMIT_S))
            best = 0.0
            for _ in range(NUM_PASSES):
                began = time.monotonic()
                # Sums of this kind run without the interpreter's lock.
                list(pool.map(np.bitwise_or.reduce, parts, timeout=PASS_LIMIT_S))
                best = max(best, sum(part.nbytes for part in parts) / max(1e-9, time.monotonic() - began))
        except futures.TimeoutError:
            return 0.0
    return best


def _written(num_bytes: int) -> np.ndarray:
    return np.full(num_bytes // 8, 1, np.uint64)
