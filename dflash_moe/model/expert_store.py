"""The shards that this process has resident. Users borrow a shard by what names its weights; a new
one is filled from the checkpoint, and one that all users have given back is dropped.

A worker process has a store for the sessions that it serves, and every worker inside the host
process has one.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dflash_moe import _core
from dflash_moe.errors import DflashError
from dflash_moe.model.expert_loading import is_as_packed, load_experts
from dflash_moe.telemetry.affinity import running_on

if TYPE_CHECKING:
    from dflash_moe.model.checkpoint import Checkpoint
    from dflash_moe.model.ffn import FfnSpec

log = logging.getLogger(__name__)


class ExpertStore:
    """Shards on the processor or on one device. Any thread may call, and one loads at a time."""

    def __init__(
        self,
        *,
        isa: str,
        threads: int,
        cpus: tuple[int, ...] = (),
        device: _core.BackendDevice | None = None,
        weights_layout: str = "packed",
        memory_limit: int = 0,
        pool: _core.HostPool | None = None,
    ) -> None:
        """Weights are computed with on `device`, or where that is None on the processor by kernel
        set `isa`. Its threads, which also load, are pinned to `cpus` where there are any; where
        `pool` is given, its threads compute. `memory_limit` bounds the bytes of weights; 0 sets no
        limit.
        """
        self._store = _core.ShardStore(
            isa=isa,
            num_threads=threads,
            cpus=cpus,
            device=device,
            weights_layout=weights_layout,
            memory_limit=memory_limit,
            pool=pool,
        )
        self._threads = threads
        self._cpus = cpus

    def load(
        self,
        checkpoint: Checkpoint,
        ffn: FfnSpec,
        experts: Sequence[int],
        *,
        name: str,
        weight_dtype: str,
        weights_fingerprint: int,
        numerics: str,
        report: Callable[[int], None] = lambda _count: None,
    ) -> _core.ResidentShard:
        """Lends the loaded shard of `experts` (ascending ids). `name` is what errors call it, and
        `report` is called with the number of its experts loaded so far.

        Errors: ConfigError where the memory limit does not allow it, CheckpointError naming tensor
        and file, UnsupportedError naming format or class.
        """

        def borrow() -> _core.ResidentShard:
            try:
                return self._store.borrow(ffn.kernel_spec(), len(experts), weight_dtype, weights_fingerprint, numerics)
            except DflashError as error:
                raise error.reworded(f"{name}: {error}") from None

        loan = borrow()
        try:
            # What a former session left is summed up before anybody computes from it again. That
            # session may have ended because its host saw wrong numbers, which this worker is not
            # told: nothing but the sum tells such an end from a lost connection. It costs one
            # reading of the memory by all threads, a fraction of what loading costs.
            if loan.is_complete and not is_as_packed(loan, len(experts), threads=self._threads):
                log.error("%s: weights that were kept have changed in memory; they are loaded anew", name)
                # The store lends none that came back damaged, and drops what else is kept: where
                # one bit of this memory is wrong, others may be.
                loan.give_back()
                loan = borrow()
            if not loan.is_complete:
                # Memory is local to the node of the core that touches it first.
                with running_on(self._cpus):
                    load_experts(loan, checkpoint, ffn, experts, threads=self._threads, report=report)
                # Calls are computed with the packed copy, so that the pages of the file may go.
                checkpoint.drop_pages()
        except BaseException:
            loan.give_back()
            self._store.drop_unborrowed()
            raise
        return loan

    @property
    def resident_bytes(self) -> int:
        """The bytes of all loaded weights."""
        return self._store.resident_bytes()

    def scrubber(self, period_s: float) -> _core.Scrubber:
        """Returns what sums up the weights of this store again, all of them in `period_s`."""
        return _core.Scrubber(self._store, period_s=period_s)

    def drop_unborrowed(self) -> None:
        """Frees the shards that nobody borrows any more."""
        self._store.drop_unborrowed()
