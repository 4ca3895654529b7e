"""Writes the panels of a model's experts before any worker needs them.

The experts of one file are packed at a time, so that the model may be larger than the memory.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_moe import _core
from dflash_moe.config.values import format_bytes
from dflash_moe.errors import ConfigError, DflashError, UnsupportedError
from dflash_moe.store.panel_file import PanelGroup
from dflash_moe.store.panel_store import PanelStore
from dflash_moe.store.stored_experts import PackedShard, StoredExperts, never

if TYPE_CHECKING:
    from dflash_moe.model.checkpoint import Checkpoint
    from dflash_moe.model.ffn import FfnSpec


@dataclass(frozen=True, slots=True)
class WantedExperts:
    """Experts of one layer, ascending, as a worker would ask for them."""

    ffn: FfnSpec
    experts: tuple[int, ...]
    weight_dtype: str
    numerics: str


class Warming:
    """What of some experts is on disk, and what is still to be written. One thread calls."""

    def __init__(self, store: PanelStore, checkpoint: Checkpoint, wanted: Sequence[WantedExperts], *, isa: str) -> None:
        """Looks for the panels that workers with kernel set `isa` would use. Panels of a checkpoint
        that was moved or touched are compared with it and adopted. Errors: CheckpointError,
        UnsupportedError for a format or class that `isa` does not compute, and where nothing of the
        checkpoint can be kept.
        """
        checkpoint.refuse_stub()
        self._store = store
        self._stored = StoredExperts(store, checkpoint)
        # These shards stay empty: they only say how experts are packed.
        shards = _core.ShardStore(isa=isa, num_threads=1)
        self._left: dict[str, tuple[PackedShard, PanelGroup]] = {}
        self._there: dict[str, PanelGroup] = {}
        for number, one in enumerate(wanted):
            loan = shards.borrow(one.ffn.kernel_spec(), len(one.experts), one.weight_dtype, number, one.numerics)
            shard = PackedShard(loan, isa, one.ffn, one.experts, one.weight_dtype, number, one.numerics)
            missing = {group.key: (shard, group) for group in self._stored.missing(shard)}
            self._left |= missing
            self._there |= {group.key: group for group in self._stored.groups(shard) if group.key not in missing}
        if not self.num_files:
            raise UnsupportedError(
                f"{checkpoint.path}: nothing of it is kept: kernel set {isa} has no panels, or its files were changed a "
                "moment ago; then try again"
            )

    @property
    def num_files(self) -> int:
        """How many files hold all experts."""
        return len(self._there) + len(self._left)

    @property
    def num_bytes(self) -> int:
        """The bytes of panels in all files, about."""
        return sum(map(_bytes_of, self._there.values())) + self.left_bytes

    @property
    def num_left(self) -> int:
        """How many files are still to be written."""
        return len(self._left)

    @property
    def left_bytes(self) -> int:
        """The bytes of panels that are still to be written."""
        return sum(_bytes_of(group) for _, group in self._left.values())

    def require_room(self) -> None:
        """Raises ConfigError where disk or budget lack the room for what is to be written."""
        left, free, budget = self.left_bytes, self._store.folder.free_bytes(), self._store.budget()
        path = self._store.folder.path
        if left > free:
            raise ConfigError(
                f"{path}: {format_bytes(left)} are to be written and {format_bytes(free)} are free there; name another folder "
                "by `cache.path`, or remove models by `dflash-moe store rm`"
            )
        if self.num_bytes > budget:
            raise ConfigError(
                f"{path}: this model takes {format_bytes(self.num_bytes)}, and all models may take {format_bytes(budget)}; "
                "raise `cache.max_bytes`, or name another folder by `cache.path`"
            )

    def write(self, *, threads: int, report: Callable[[int, int], None] = lambda _done, _all: None) -> None:
        """Writes what is missing, with so many threads that pack. `report` is called with the bytes
        written so far, of how many. Raises DflashError where panels cannot be kept, for which the
        log has the reason; CheckpointError where the checkpoint changes meanwhile or cannot be
        read.
        """
        done, whole = 0, self.left_bytes
        for shard, group in list(self._left.values()):
            panels = self._stored.written(shard, group, threads, never)
            if panels is None:
                raise DflashError(
                    f"{self._store.folder.path}: {self.num_left} of {self.num_files} files are not written; the log says why",
                    code="system",
                )
            panels.close()
            done += _bytes_of(group)
            report(done, whole)
            self._there[group.key] = group
            del self._left[group.key]


def _bytes_of(group: PanelGroup) -> int:
    return group.count * group.stride_bytes
