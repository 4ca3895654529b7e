"""The experts of one checkpoint as this machine's store has them: mapped into a shard where they
are there, handed in where a shard has packed them.

Panels are found by the state of the checkpoint's files. Where the files were moved or touched, the
BLAKE3 of their bytes is compared with what the panels were packed from.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blake3 import blake3

from dflash_moe import _core
from dflash_moe.errors import CheckpointError, DflashError
from dflash_moe.model.checkpoint_files import SeenFiles, are_settled
from dflash_moe.model.expert_tensors import expert_sources
from dflash_moe.store.expert_loading import load_experts
from dflash_moe.store.panel_file import PanelGroup, PanelLayout, PanelShape, StoredExpert, experts_per_file
from dflash_moe.store.panel_store import ExpertPieces
from dflash_moe.store.source_digest import num_experts, source_digest

if TYPE_CHECKING:
    from dflash_moe.model.checkpoint import Checkpoint
    from dflash_moe.model.ffn import FfnSpec
    from dflash_moe.store.panel_store import CheckpointPanels, OpenPanels, PanelStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackedShard:
    """A shard in memory, and what it was loaded from. Whoever has one keeps the shard."""

    loan: _core.ResidentShard
    isa: str
    ffn: FfnSpec
    experts: tuple[int, ...]
    weight_dtype: str
    weights_fingerprint: int
    numerics: str


@dataclass(frozen=True, slots=True)
class MappedPanels:
    """The file from which an expert of a shard was mapped, and its number there, for whoever finds
    it damaged.
    """

    panels: CheckpointPanels
    file: OpenPanels
    number: int


class StoredExperts:
    """What this machine's store has of one checkpoint. Any thread may call."""

    def __init__(self, store: PanelStore, checkpoint: Checkpoint) -> None:
        """Looks at the files of the checkpoint, which the caller has not read yet, or not since
        they changed. Raises CheckpointError where one is missing.
        """
        self._checkpoint = checkpoint
        self._seen = SeenFiles(checkpoint.path)
        self._panels = store.of_checkpoint(self._seen, checkpoint.fingerprint(), checkpoint.path)
        # Whether another change of the files could not be told from their state.
        self._is_unsettled = not are_settled(self._seen.states)

    def groups(self, shard: PackedShard) -> list[PanelGroup]:
        """Returns the groups that hold the shard's experts, none where its panels cannot be shared
        with another process.
        """
        form = shard.loan.panel_form
        total = num_experts(self._checkpoint, shard.ffn)
        if form is None or self._is_unsettled or shard.experts[-1] >= total:
            return []
        layout = PanelLayout(*form)
        ffn = shard.ffn
        shape = PanelShape(ffn.in_size, ffn.intermediate_size, ffn.out_size, 1 if ffn.gate == "none" else 2)
        layer = blake3(json.dumps(ffn.to_wire(), sort_keys=True).encode()).hexdigest()
        size = experts_per_file(layout.piece_bytes, total)
        firsts = sorted({expert // size * size for expert in shard.experts})
        return [PanelGroup(layer, first, min(size, total - first), layout, shape) for first in firsts]

    def map_into(
        self, shard: PackedShard, report: Callable[[int], None], is_over: Callable[[], bool] = lambda: False
    ) -> dict[int, MappedPanels]:
        """Maps those experts of a shard that the store has, and returns the file of each by its
        place in the shard. `report` is called with the number mapped so far. What cannot be mapped
        costs a line in the log.
        """
        mapped: dict[int, MappedPanels] = {}
        try:
            for group in self.groups(shard):
                panels = self._find(shard.ffn, group, is_over)
                if panels is not None:
                    self._map_group(shard, group, panels, mapped)
                    report(len(mapped))
        except DflashError as error:
            log.warning("panels are not used: %s", error)
        return mapped

    def slot_into(
        self, shard: PackedShard, threads: int, report: Callable[[int], None], may_write: Callable[[], bool]
    ) -> dict[int, MappedPanels]:
        """Says to a shard without memory of its own where its experts lie. What is not there yet is
        packed by so many threads and written first, a file at a time as long as `may_write` says
        so. Returns the file of each expert by its place. Fewer than all are there where panels
        cannot be kept.
        """
        slotted: dict[int, MappedPanels] = {}
        for group in self.groups(shard):
            panels = self._find(shard.ffn, group, never)
            if panels is None and may_write():
                panels = self.written(shard, group, threads, never)
            if panels is None:
                break
            file = _core.DirectFile(panels.take(), str(panels.path))
            for place, one in _of_group(shard, group, panels):
                sums = {"content_checksum": one.content_checksum, "panels_sum": one.panels_sum}
                shard.loan.slot_expert(place, file, one.offset, **sums)
                slotted[place] = MappedPanels(self._panels, panels, shard.experts[place] - group.first)
            report(len(slotted))
        return slotted

    def write_group(
        self, shard: PackedShard, group: PanelGroup, is_over: Callable[[], bool],
    ) -> dict[int, MappedPanels]:  # fmt: skip
        """Writes the panels of a group that has experts of the shard, unless somebody else has, and
        lets the shard change over to them. Returns the file of each of its experts there, none
        where the panels are not kept. Raises CheckpointError where the checkpoint has changed or
        cannot be read.
        """
        mapped: dict[int, MappedPanels] = {}
        if (panels := self.written(shard, group, 1, is_over)) is not None:
            self._map_group(shard, group, panels, mapped)
        return mapped

    def _map_group(
        self, shard: PackedShard, group: PanelGroup, panels: OpenPanels, mapped: dict[int, MappedPanels],
    ) -> None:  # fmt: skip
        """Maps the experts of a shard that are in a file, whose descriptor it takes, and notes them
        by their places in the shard. An expert in memory changes over to the file.
        """
        file = _core.MappedFile.of_descriptor(panels.take(), str(panels.path))
        for place, one in _of_group(shard, group, panels):
            sums = {"content_checksum": one.content_checksum, "panels_sum": one.panels_sum}
            shard.loan.map_expert(place, file, one.offset, **sums)
            mapped[place] = MappedPanels(self._panels, panels, shard.experts[place] - group.first)

    def missing(self, shard: PackedShard, is_over: Callable[[], bool] = lambda: False) -> list[PanelGroup]:
        """Returns those groups with experts of a shard that the store does not have."""
        missing = []
        for group in self.groups(shard):
            if (panels := self._find(shard.ffn, group, is_over)) is not None:
                panels.close()
            else:
                missing.append(group)
        return missing

    def written(
        self, shard: PackedShard, group: PanelGroup, threads: int, is_over: Callable[[], bool],
    ) -> OpenPanels | None:  # fmt: skip
        """Writes a group and returns its panels, or those that somebody else has written; None
        where they are not kept. Errors are those of `write_group`.
        """
        held = {
            expert: place
            for place, expert in enumerate(shard.experts)
            if group.first <= expert < group.first + group.count and shard.loan.packed_expert(place)[0]
        }
        # An expert is packed anew where another worker holds it, or where this one has lost it.
        others = [expert for expert in range(group.first, group.first + group.count) if expert not in held]
        spare = _SpareShard(shard, self._checkpoint, others, threads)

        def pieces(expert: int) -> ExpertPieces:
            found = shard.loan.packed_expert(held[expert]) if expert in held else spare.packed(expert)
            views, content, panels_sum = found
            if not views:
                raise CheckpointError(f"expert {expert} was found damaged in memory while its panels were written")
            digest = source_digest(self._checkpoint, shard.ffn, expert, is_over)
            if digest is None:
                raise _Stopped
            return ExpertPieces(views, content, panels_sum, digest)

        self._require_mapped_as_seen()
        try:
            return self._panels.write(group, pieces, is_over=is_over)
        except _Stopped:
            return None
        finally:
            spare.close()

    def _find(self, ffn: FfnSpec, group: PanelGroup, is_over: Callable[[], bool]) -> OpenPanels | None:
        return self._panels.find(group) or self._moved(ffn, group, is_over)

    def _moved(self, ffn: FfnSpec, group: PanelGroup, is_over: Callable[[], bool]) -> OpenPanels | None:
        """Returns panels that were packed from other files, or from these before they were touched,
        whose bytes are those of the files now.
        """
        chosen: OpenPanels | None = None
        for panels in self._panels.candidates(group):
            if chosen is None and self._are_of_these_files(ffn, group, panels, is_over):
                chosen = panels
            else:
                panels.close()
        if chosen is not None:
            self._panels.adopt(group, chosen, is_over=is_over)
        return chosen

    def _are_of_these_files(
        self, ffn: FfnSpec, group: PanelGroup, panels: OpenPanels, is_over: Callable[[], bool],
    ) -> bool:  # fmt: skip
        for number, one in enumerate(panels.header.experts):
            if source_digest(self._checkpoint, ffn, group.first + number, is_over) != one.source:
                return False
        return self._seen.are_unchanged()

    def _require_mapped_as_seen(self) -> None:
        """Raises CheckpointError where a file that was mapped is not the one which was looked at:
        somebody has put another in its place meanwhile.
        """
        for index, path in enumerate(self._checkpoint.files):
            if self._checkpoint.mapped_file(index).state() not in {one[1:] for one in self._seen.states}:
                raise CheckpointError(f"{path}: was changed or exchanged since it was opened; its panels are not kept")


def never() -> bool:
    """Says that nobody wants the end of what is under way."""
    return False


class _Stopped(Exception):
    """Whoever writes was told to end."""


class _SpareShard:
    """Experts of a group that nobody here has in memory, packed beside the shards in use."""

    def __init__(self, like: PackedShard, checkpoint: Checkpoint, experts: Sequence[int], threads: int) -> None:
        self._like, self._checkpoint = like, checkpoint
        self._experts, self._threads = experts, threads
        self._loan: _core.ResidentShard | None = None

    def packed(self, expert: int) -> tuple[list[memoryview], int, int]:
        """Returns the memory of the expert's panels, which holds until `close`, its content
        checksum and the sum of the panels. All experts are packed with the first one. Errors are
        those of loading.
        """
        like = self._like
        if self._loan is None:
            store = _core.ShardStore(isa=like.isa, num_threads=1)
            self._loan = store.borrow(like.ffn.kernel_spec(), len(self._experts), like.weight_dtype, 0, like.numerics)
            if self._threads > 1:
                load_experts(self._loan, self._checkpoint, like.ffn, self._experts, threads=self._threads)
            else:  # on this thread, whose priority is its own
                for place, one in enumerate(self._experts):
                    self._loan.load_expert(place, **expert_sources(self._checkpoint, like.ffn, one))
            self._checkpoint.drop_pages()
        return self._loan.packed_expert(self._experts.index(expert))

    def close(self) -> None:
        """Frees the memory."""
        if self._loan is not None:
            self._loan.give_back()


def _of_group(shard: PackedShard, group: PanelGroup, panels: OpenPanels) -> Iterator[tuple[int, StoredExpert]]:
    """Yields the places of those experts of a shard that a file has, and what it says of each."""
    for place, expert in enumerate(shard.experts):
        if group.first <= expert < group.first + group.count:
            yield place, panels.header.experts[expert - group.first]
