"""Loads the shards of the holders of one runtime, and knows what they have loaded: equal bytes by
their content checksums, and right numbers by golden rows.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_moe.errors import WorkerLost
from dflash_moe.holders.audit.contents import ReferenceChecksums
from dflash_moe.holders.audit.contents_learner import ContentsLearner
from dflash_moe.holders.audit.golden import GoldenRows
from dflash_moe.holders.audit.host_twin import HostTwin
from dflash_moe.holders.audit.mapped_holders import MappedHolders
from dflash_moe.holders.audit.row_questions import RowQuestion
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.placement.held_shards import HeldShard
from dflash_moe.protocol.messages import LoadShard, compress_experts

if TYPE_CHECKING:
    from dflash_moe.config import Settings
    from dflash_moe.holders.holder import Holder


class LoadedShards:
    """Any thread may call. `close` frees what the golden rows have mapped."""

    def __init__(self, model: Path, settings: Settings, isa: str, find: Callable[[str], Holder]) -> None:
        """`find` returns a holder by its name, and raises WorkerLost for one that was removed."""
        self._model, self._settings, self._find = model, settings, find
        self._contents = ReferenceChecksums()
        self._mapped = MappedHolders(model, self._contents, self.ask_checksum, self._reads_own_files, settings.start_timeout_s)
        self.golden = GoldenRows(HostTwin(model, isa), self.ask_row)
        self._learner: ContentsLearner | None = None

    def load(self, member: Holder, shards: Sequence[HeldShard], report: Callable[[int], None] = lambda _count: None) -> None:
        """Loads shards at a holder, one after the other, and has it compute golden rows where it is
        another process. `report` is called with the number of experts that are loaded. Errors:
        those with which the holder refuses; CheckpointError where it has not loaded the bytes that
        others hold, or that it held before; WorkerUnfit where it computes other numbers than it
        must; WorkerLost and WorkerTimeout.
        """
        if member.local is not None:
            checkpoint = Checkpoint.open(self._model)
            before = 0
            for held in shards:
                checksum = member.local.load(
                    checkpoint, held.layer.ffn, layer=held.layer.index, shard=held.shard_id, experts=held.experts,
                    weight_dtype=held.weight_dtype, weights_fingerprint=held.weights_fingerprint, numerics=held.numerics,
                    report=partial(_report_after, before, report),
                )  # fmt: skip
                self._contents.note(held, member.name, checksum)
                before += len(held.experts)
            return
        for held in shards:
            message = LoadShard(
                layer=held.layer.index,
                shard=held.shard_id,
                name=held.layer.name,
                ffn=held.layer.ffn.to_wire(),
                weight_dtype=held.weight_dtype,
                expert_ranges=compress_experts(held.experts),
                weights_fingerprint=held.weights_fingerprint,
                numerics=held.numerics,
            )
            checksum = member.require_session().load(message, timeout_s=self._settings.start_timeout_s, report=report)
            self._contents.note(held, member.name, checksum)
        self.golden.check(member.name, shards, is_thorough=member.life.num_outvoted > 0)

    def settle(self, member: Holder, shards: Sequence[HeldShard], report: Callable[[int], None] = lambda _count: None) -> None:
        """Returns once what a holder has loaded may stand in for the other holders of these shards
        (`MappedHolders.settle`).
        """
        self._mapped.settle(member.name, shards, report)

    def learn(self, held: Mapping[str, Sequence[HeldShard]]) -> None:
        """Has a thread learn what mapped weights add up to, as soon as their holders have read
        them. `call_off` ends it.
        """
        self._learner = ContentsLearner(self._contents, self.ask_checksum, self._mapped.is_as_started, held)
        self._learner.start()

    def call_off(self) -> None:
        """From now on nothing is learned; never raises."""
        if self._learner is not None:
            self._learner.call_off()

    def ask_row(self, holder: str, held: HeldShard, question: RowQuestion) -> bytes | None:
        """Has a holder in another process compute a row beside its calls. Returns its reply, or
        None where it cannot be asked. Errors: WorkerLost, WorkerTimeout, ProtocolError; those with
        which it refuses.
        """
        session = self._find(holder).session
        if session is None:
            return None
        return session.compute_row(question.as_message(held), timeout_s=self._settings.call_timeout_s)

    def ask_checksum(self, holder: str, held: HeldShard) -> tuple[int | None, int]:
        """Asks a holder for the content checksum of one of its shards. Returns it, or None as long
        as the shard is unchecked, and how many of its experts have been read. Errors are those of
        `HostSession.ask_checksum`.
        """
        member = self._find(holder)
        if member.local is not None:
            return member.local.ask_checksum(held.layer.index, held.shard_id)
        session = member.require_session()
        return session.ask_checksum(held.layer.index, held.shard_id, timeout_s=self._settings.call_timeout_s)

    def reference_checksum(self, held: HeldShard) -> int | None:
        """Returns the content checksum that every holder of a shard must have, None where no holder
        has read all of it.
        """
        return self._contents.reference(held)

    def unchecked_holders(self, held: HeldShard) -> frozenset[str]:
        """Returns the holders of a shard that had not read all of it when they were asked last."""
        return self._contents.holders(held)[1]

    def are_files_unchanged(self) -> bool:
        """Says whether this host's files of the checkpoint are what they were before any worker
        loaded them. Raises DflashError where the system does not say.
        """
        return self._mapped.are_files_unchanged()

    def forget(self, holder: str) -> None:
        """Forgets a holder that was removed."""
        self._contents.forget(holder)
        self._mapped.forget(holder)

    def close(self) -> None:
        """Frees what the golden rows have mapped; never raises. It was called off before."""
        if self._learner is not None:
            self._learner.close()
        self.golden.close()

    def _reads_own_files(self, holder: str) -> bool:
        """Whether a holder reads the files that this host has: it runs here, and by its order."""
        try:
            member = self._find(holder)
        except WorkerLost:
            return False
        return member.local is not None or member.address.is_started_by_host


def _report_after(before: int, report: Callable[[int], None], count: int) -> None:
    report(before + count)
