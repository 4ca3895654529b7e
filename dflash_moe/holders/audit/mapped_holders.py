"""Sees to it that holders which compute from mapped checkpoints hold the same bytes before they
stand in for each other (decision 62).

Nobody has read all of a mapped shard when it is loaded. Where several hold it, they are compared
once their background readers are through, but for workers that map one file.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_moe.errors import CheckpointError, WorkerLost
from dflash_moe.holders.audit.contents import AskChecksum, ReferenceChecksums, await_checksum
from dflash_moe.model.checkpoint_files import SeenFiles
from dflash_moe.protocol.failures import is_passing

if TYPE_CHECKING:
    from dflash_moe.placement.held_shards import HeldShard

log = logging.getLogger(__name__)


class MappedHolders:
    """What may join although its shards are unchecked. Any thread may call."""

    def __init__(
        self,
        model: Path,
        contents: ReferenceChecksums,
        ask: AskChecksum,
        reads_own_files: Callable[[str], bool],
        timeout_s: float,
    ) -> None:
        """Notes how the files of the checkpoint are before any worker reads them. Raises
        CheckpointError where this process lacks descriptors for that.

        `reads_own_files` says of a holder whether it reads those very files, as a worker does that
        this host started. `timeout_s` bounds how long a background reader may make no progress.
        """
        self._model, self._contents, self._ask = model, contents, ask
        self._reads_own_files, self._timeout_s = reads_own_files, timeout_s
        # None where this host has not got them.
        self._files: SeenFiles | None = None
        try:
            self._files = SeenFiles(model)
        except CheckpointError as error:
            if is_passing(error):
                raise
        # Who has served which shard before: holder, layer, shard.
        self._served: set[tuple[str, int, int]] = set()

    def settle(self, holder: str, shards: Sequence[HeldShard], report: Callable[[int], None] = lambda _count: None) -> None:
        """Returns once a holder that has loaded these shards may stand in for their other holders,
        and they for it: at once where all of them read the same unchanged files or have compared
        their bytes while packing, and else when whoever is unchecked has read all. Another holder
        that is lost is left out; it is compared when it comes back. So is the only holder of a
        shard that comes back to files of this host which have changed.

        `report` is called with the number of experts that were settled so far, from the first
        comparison on. Errors: CheckpointError naming the holders that differ and both values, or
        files that have changed of which nobody knows what they were; WorkerLost for `holder`
        itself; WorkerTimeout; those of `are_files_unchanged`.
        """
        are_unchanged: bool | None = None
        num_settled, is_comparing = 0, False
        for held in shards:
            holders, unchecked = self._contents.holders(held)
            is_back = (holder, held.layer.index, held.shard_id) in self._served and self._reads_own_files(holder)
            if unchecked and (len(holders) > 1 or is_back):
                if are_unchanged is None:
                    are_unchanged = self.are_files_unchanged()
                if not are_unchanged or not all(map(self._reads_own_files, holders)):
                    is_comparing = True
                    # The others first, so that a difference is said of the newcomer.
                    for name in sorted(unchecked, key=lambda name: (name == holder, name)):
                        if name == holder and is_back and not are_unchanged:
                            self._require_reference(holder, held)
                        self._compare(name, held, is_newcomer=name == holder)
            self._served.add((holder, held.layer.index, held.shard_id))
            num_settled += len(held.experts)
            if is_comparing:
                report(num_settled)

    def is_as_started(self, holder: str) -> bool:
        """Says whether a holder reads the files of this host, and they are what they were before
        any worker read them. Raises as `are_files_unchanged`.
        """
        return self._reads_own_files(holder) and self.are_files_unchanged()

    def are_files_unchanged(self) -> bool:
        """Says whether this host's files are what they were before any worker read them. Files that
        this host has not got are not. Raises DflashError where the system does not say, which is
        neither answer: it is asked again later.
        """
        return self._files is not None and self._files.are_unchanged()

    def forget(self, holder: str) -> None:
        """Forgets a holder that was removed."""
        self._served = {one for one in list(self._served) if one[0] != holder}

    def _require_reference(self, holder: str, held: HeldShard) -> None:
        """Raises CheckpointError where a holder comes back to files of this host that have changed,
        and nobody has told what they were. Calls may have used other bytes before.
        """
        if self._contents.reference(held) is None:
            raise CheckpointError(
                f"weights of {held.layer.name}, shard {held.shard_id}: the files of checkpoint {self._model} have changed "
                f"since worker {holder} computed from them, and nobody had read all of them before; start the runtime anew"
            )

    def _compare(self, name: str, held: HeldShard, *, is_newcomer: bool) -> None:
        log.info("worker %s: %s, shard %d is compared before it has several holders", name, held.layer.name, held.shard_id)
        try:
            checksum = await_checksum(self._ask, name, held, self._timeout_s, lambda _where, _count, _total: None)
        except WorkerLost:
            if is_newcomer:
                raise
            return
        self._contents.note(held, name, checksum)
