"""The shards that this process has resident: borrowed by what names their weights, filled from the
checkpoint where they are new, dropped when their users have given them back.

A worker process has one for the session that it serves, and so has every worker inside the host
process.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dflash_moe import _core
from dflash_moe.errors import DflashError
from dflash_moe.model.expert_loading import load_experts
from dflash_moe.telemetry.affinity import running_on

if TYPE_CHECKING:
    from dflash_moe.model.checkpoint import Checkpoint
    from dflash_moe.model.ffn import FfnSpec


class ExpertStore:
    """Shards on the processor or on one device. Any thread; one loads at a time."""

    def __init__(
        self,
        *,
        isa: str,
        threads: int,
        cpus: tuple[int, ...] = (),
        device: _core.BackendDevice | None = None,
        weights_layout: str = "packed",
        memory_limit: int = 0,
    ) -> None:
        """`device` None: the processor, by kernel set `isa`. `memory_limit`: bytes that weights may
        take, 0 for no limit.
        """
        self._store = _core.ShardStore(
            isa=isa, num_threads=threads, cpus=cpus, device=device, weights_layout=weights_layout, memory_limit=memory_limit
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
        """Lends the shard of `experts` (ascending ids), loaded; `name` is what errors call it.

        `report` gets its experts loaded so far. Errors: ConfigError where the memory limit does not
        allow it, CheckpointError naming tensor and file, UnsupportedError naming format or class.
        """
        try:
            loan = self._store.borrow(ffn.kernel_spec(), len(experts), weight_dtype, weights_fingerprint, numerics)
        except DflashError as error:
            raise type(error)(f"{name}: {error}") from None
        try:
            if not loan.is_complete:
                # memory is local to the node of the core that touches it first
                with running_on(self._cpus):
                    load_experts(loan, checkpoint, ffn, experts, threads=self._threads, report=report)
                checkpoint.drop_pages()  # a packed copy is what calls are computed with
        except BaseException:
            loan.give_back()
            self._store.drop_unborrowed()
            raise
        return loan

    @property
    def resident_bytes(self) -> int:
        """Bytes of loaded weights."""
        return self._store.resident_bytes()

    def drop_unborrowed(self) -> None:
        """Frees what came back."""
        self._store.drop_unborrowed()
