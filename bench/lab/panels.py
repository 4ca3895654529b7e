"""Writes the panels of a model for a measurement that begins with all of them on disk, and reads
them past the page cache, as fast as this machine does that.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dflash_moe import _core
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.spec import ModelSpec
from dflash_moe.store.panel_file import in_blocks, read_header
from dflash_moe.store.panel_store import PanelStore
from dflash_moe.store.warming import WantedExperts, Warming

# A checkpoint that was made less than 50 ms ago has no panels yet.
SETTLED_S = 0.1
PATIENCE_S = 1800
HUGE_PAGE = 2 << 20
TRIED_THREADS, TRIED_PARTS, TRIED_LAYERS = (1, 2, 4, 8), (1, 2, 4), 20

# Where an expert lies: a descriptor that reads past the page cache, offset and bytes.
Place = tuple[int, int, int]


def let_panels_be_kept() -> None:
    """Takes back for this process and its children what keeps panels from being written: steps that
    are recorded have them off, and tests have no folder for them.
    """
    os.environ["DFLASH_MOE_CACHE_PANELS"] = "on"
    os.environ.pop("DFLASH_MOE_CACHE_PATH", None)


def write_panels(spec: ModelSpec, cache: Path, threads: int = 2) -> None:
    """Writes what is missing in the folder `cache` of all experts, for this machine's kernels."""
    time.sleep(SETTLED_S)
    wanted = [
        WantedExperts(layer.ffn, tuple(range(layer.num_experts)), layer.weight_dtype, "f32-canonical") for layer in spec.layers
    ]
    store = PanelStore.open(cache, max_bytes=None, allow_network=True)
    try:
        Warming(store, Checkpoint.open(spec.path), wanted, isa=_core.best_isa()).write(threads=threads)
    finally:
        store.close()


def panel_files(cache: Path) -> list[list[tuple[int, Place]]]:
    """Returns for each file of panels its experts, each with its content checksum. The descriptors
    stay open as long as the process runs.
    """
    found = []
    for path in sorted((cache / "panels").glob("*.panels")):
        direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
        descriptor = os.open(path, os.O_RDONLY)
        experts = read_header(descriptor, path).experts
        os.close(descriptor)
        found.append([(one.content_checksum, (direct, one.offset, in_blocks(one.num_bytes))) for one in experts])
    return found


def forget_pages(cache: Path) -> None:
    """Takes the files of panels, which nobody has mapped, out of the page cache."""
    for path in (cache / "panels").glob("*.panels"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the seconds that `run` took, and what it gave."""
    began = time.perf_counter()
    found = run()
    return time.perf_counter() - began, found


class PanelReads:
    """Reads experts past the page cache and computes nothing, each in so many parts by so many
    threads: what this machine does fastest.
    """

    def __init__(self, places: Sequence[Sequence[Place]], threads: int, parts: int) -> None:
        self._places, self._parts = places, parts
        self._pool = ThreadPoolExecutor(threads)
        self._local = threading.local()

    @classmethod
    def fastest(cls, places: Sequence[Sequence[Place]], experts: int = 4) -> tuple[PanelReads, dict[str, int]]:
        """Tries each number of threads and parts in turns, on so many experts of a layer."""
        ways = {(threads, parts): cls(places, threads, parts) for threads in TRIED_THREADS for parts in TRIED_PARTS}
        taken = dict.fromkeys(ways, 0.0)
        drawn = np.random.default_rng(3)
        for _ in range(TRIED_LAYERS):
            for way, disk in ways.items():
                layer = int(drawn.integers(len(places)))
                chosen = drawn.choice(len(places[layer]), experts, replace=False).tolist()
                taken[way] += timed(partial(disk.read, layer, chosen))[0]
        threads, parts = min(taken, key=taken.__getitem__)
        return ways[threads, parts], {"threads": threads, "parts": parts}

    def read_all(self, step: Sequence[Sequence[int]]) -> None:
        for layer, experts in enumerate(step):
            self.read(layer, experts)

    def read(self, layer: int, experts: Sequence[int]) -> None:
        pieces = []
        for descriptor, offset, size in (self._places[layer][one] for one in experts):
            length = -(-size // (4096 * self._parts)) * 4096
            pieces += [(descriptor, offset + at, min(length, size - at)) for at in range(0, size, length)]
        list(self._pool.map(self._read, pieces, timeout=PATIENCE_S))

    def _read(self, piece: Place) -> None:
        descriptor, offset, size = piece
        memory = getattr(self._local, "memory", None)
        if memory is None or len(memory) < size:
            self._local.memory = memory = mmap.mmap(-1, -(-size // HUGE_PAGE) * HUGE_PAGE)
            memory.madvise(mmap.MADV_HUGEPAGE)
        os.preadv(descriptor, [memoryview(memory)[:size]], offset)
