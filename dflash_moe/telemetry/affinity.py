"""Sets the cores that a thread may run on, always those of the thread that asks, which Linux calls
process 0.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dflash_moe.errors import ConfigError


def check_cpus(cpus: Sequence[int], *, name: str) -> None:
    """Raises ConfigError naming the worker where this process may not use one of its cores."""
    usable = os.sched_getaffinity(0)
    if missing := sorted(set(cpus) - usable):
        raise ConfigError(
            f"worker {name}: CPU {missing[0]} of its `cpus` is not one this process may use; it may use "
            f"{', '.join(map(str, sorted(usable)))}"
        )


@contextmanager
def running_on(cpus: Sequence[int]) -> Iterator[None]:
    """Keeps the calling thread, and the threads that it starts meanwhile, on these cores within the
    block. Without any cores nothing changes.
    """
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def pin_to_first(cpus: Sequence[int]) -> None:
    """Keeps the calling thread on the first of these cores for good. Without any cores nothing
    changes.
    """
    if cpus:
        os.sched_setaffinity(0, cpus[:1])
