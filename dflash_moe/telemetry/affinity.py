"""The cores a thread may run on: set for the thread that asks, which is what Linux means by process
0.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dflash_moe.errors import ConfigError


def check_cpus(cpus: Sequence[int], *, name: str) -> None:
    """ConfigError naming the worker where one of its cores is not this process's to use."""
    usable = os.sched_getaffinity(0)
    if missing := sorted(set(cpus) - usable):
        raise ConfigError(
            f"worker {name}: CPU {missing[0]} of its `cpus` is not one this process may use; it may use "
            f"{', '.join(map(str, sorted(usable)))}"
        )


@contextmanager
def running_on(cpus: Sequence[int]) -> Iterator[None]:
    """Keeps the calling thread, and the threads it starts meanwhile, on these cores; on all as
    before where there are none.
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
    """Keeps the calling thread on the first of these cores, for good; nothing where there are
    none.
    """
    if cpus:
        os.sched_setaffinity(0, cpus[:1])
