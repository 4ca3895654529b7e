"""Loads experts from a checkpoint into a resident shard, as many at a time as its worker has
threads.

Reading and packing run in C++ without the GIL. Memory bounds them, and one thread alone does not
reach its bandwidth.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from dflash_moe.errors import CheckpointError
from dflash_moe.model.expert_tensors import expert_sources

if TYPE_CHECKING:
    from dflash_moe import _core
    from dflash_moe.model.checkpoint import Checkpoint
    from dflash_moe.model.ffn import FfnSpec, TensorPattern

# A disk that gives nothing for so long is gone. Where a host waits for a worker, the limit of the
# host (start_timeout_s without progress) is shorter.
STANDSTILL_S = 600.0

# The core names the matrix that is wrong in this way.
_MATRIX = re.compile(r"\b(gate|up|down): ")


def load_experts(
    shard: _core.ResidentShard,
    checkpoint: Checkpoint,
    ffn: FfnSpec,
    experts: Sequence[int],
    *,
    threads: int,
    places: Sequence[int] | None = None,
    report: Callable[[int], None] = lambda _count: None,
) -> None:
    """Fills a new shard with `experts` (ascending ids), or with those at `places` of them. `report`
    is called on the caller's thread with the number loaded so far.

    Errors: CheckpointError naming file and tensor, UnsupportedError naming the format. The first
    one ends the loading.
    """
    checkpoint.refuse_stub()
    for index in range(len(checkpoint.files)):
        # Each file is mapped here, because the threads below would map it twice.
        checkpoint.mapped_file(index)

    def load(place: int) -> None:
        expert = experts[place]
        try:
            shard.load_expert(place, **expert_sources(checkpoint, ffn, expert))
        except CheckpointError as error:
            raise CheckpointError(f"{_where(checkpoint, ffn, expert, str(error))}{error}") from None

    pool = ThreadPoolExecutor(max_workers=max(1, threads), thread_name_prefix="load")
    pending = {pool.submit(load, place) for place in (range(len(experts)) if places is None else places)}
    try:
        count = 0
        while pending:
            done, pending = wait(pending, timeout=STANDSTILL_S, return_when=FIRST_COMPLETED)
            if not done:
                raise CheckpointError(
                    f"checkpoint {checkpoint.path}: no expert could be read in {STANDSTILL_S:.0f} s; is its disk still there?"
                )
            for one in done:
                one.result(timeout=0)
                count += 1
                report(count)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        # Loads under way write into the worker's memory and must end first. Those that were
        # cancelled never end.
        wait([one for one in pending if not one.cancelled()], timeout=STANDSTILL_S)


def is_as_packed(shard: _core.ResidentShard, num_experts: int, *, threads: int) -> bool:
    """Sums up a loaded shard's packed weights again, in as many parts as its worker has threads,
    and returns whether they are what was loaded. Where they are not, the shard is damaged.
    """
    num_parts = max(1, min(threads, num_experts))
    bounds = [part * num_experts // num_parts for part in range(num_parts + 1)]
    if num_parts == 1:
        return shard.are_packed_as_loaded(0, num_experts)
    # The parts are bounded by the speed of the memory alone, so that they end.
    with ThreadPoolExecutor(max_workers=num_parts, thread_name_prefix="sum") as pool:
        return all(list(pool.map(shard.are_packed_as_loaded, bounds, bounds[1:], timeout=STANDSTILL_S)))


def _where(checkpoint: Checkpoint, ffn: FfnSpec, expert: int, text: str) -> str:
    """Returns file and tensor of a matrix that the core calls wrong, or an empty text where the
    error has them already.
    """
    found = _MATRIX.search(text)
    patterns: dict[str, TensorPattern | None] = {"gate": ffn.gate_tensor, "up": ffn.up_tensor, "down": ffn.down_tensor}
    pattern = patterns[found[1]] if found else None
    if pattern is None:
        return ""
    name = pattern.tensor_name(expert)
    return f"{checkpoint.files[checkpoint.tensors[name].file]}: tensor {name!r}, expert {expert}: "
