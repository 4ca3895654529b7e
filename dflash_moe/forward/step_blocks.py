"""`StepBlocks` plans what one packed step does to the paged KV cache: which sequences it writes how
many tokens of, which blocks are copied before, and which slots its rows go to.

A step is a transaction (`commit`, `roll_back`): a sequence has more tokens only after the forward
pass was clean, and a failed one changes nothing.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_moe.errors import EngineError
from dflash_moe.forward.sequence import BlockCopy, SequenceBlocks
from dflash_moe.operators.row_groups import StepSequence


@dataclass(frozen=True, slots=True)
class PackedStep:
    """What a forward pass over packed rows needs to know of the cache. The rows are the tokens of
    one sequence after the other. All arrays are the step's own, but for the block tables: those are
    views, valid until the step ends.
    """

    # Each layer copies block copy_from[i] to copy_to[i], for all i, before any layer writes.
    copy_from: np.ndarray  # int32 [num_copies]
    copy_to: np.ndarray  # int32 [num_copies], no block twice and none of copy_from
    # The keys and values of row r are appended to this slot, block * block_tokens + offset.
    slots: np.ndarray  # int64 [num_rows]
    # The position of row r in its sequence, from 0.
    positions: np.ndarray  # int64 [num_rows]
    # Sequence i has the rows row_starts[i]..row_starts[i + 1] - 1.
    row_starts: np.ndarray  # int64 [num_sequences + 1]
    # Each sequence as `_core.AttentionPlan` takes it: its block table, int32 [num_blocks], the
    # position of its first row, and its number of rows.
    sequences: tuple[tuple[np.ndarray, int, int], ...]

    @property
    def num_rows(self) -> int:
        """The number of packed rows."""
        return len(self.slots)


class StepBlocks:
    """One step, from its plan to its end: `append` per sequence, `pack` once, then the forward
    pass, then `commit` or `roll_back`. Owned by the engine thread; other threads may read what
    `pack` returned.
    """

    def __init__(self) -> None:
        self._rows: dict[SequenceBlocks, int] = {}
        self._is_packed = False
        self._has_ended = False

    @property
    def num_rows(self) -> int:
        """The number of rows that were appended."""
        return sum(self._rows.values())

    def append(self, sequence: SequenceBlocks, count: int) -> bool:
        """Adds the next `count` tokens of a sequence to the step. Returns False, and has changed
        nothing, where the pool has too few free blocks: another sequence has to give up its own.
        """
        self._check_open("append")
        if not sequence.reserve(count):
            return False
        self._rows[sequence] = count
        return True

    def remove(self, sequence: SequenceBlocks) -> None:
        """Takes a sequence out of the step again, before it is packed, such as one that is to be
        preempted. Raises EngineError where it is not in the step.
        """
        self._check_open("remove")
        if sequence not in self._rows:
            raise EngineError("the sequence is not in this step and cannot be removed from it")
        sequence.unreserve()
        del self._rows[sequence]

    def pack(self) -> PackedStep:
        """Returns the plan of the forward pass. No sequence can be appended or removed after
        this, and nothing is packed twice: whoever copies the blocks does so once.
        """
        self._check_open("pack")
        self._is_packed = True
        slots: list[int] = []
        positions: list[int] = []
        row_starts, sequences, copies = [0], [], []
        for sequence in self._rows:
            sequences.append(sequence.append_rows(slots, positions))
            row_starts.append(len(slots))
            if sequence.copy is not None:
                copies.append(sequence.copy)
        return PackedStep(
            copy_from=np.array([copy.copy_from for copy in copies], np.int32),
            copy_to=np.array([copy.copy_to for copy in copies], np.int32),
            slots=np.array(slots, np.int64),
            positions=np.array(positions, np.int64),
            row_starts=np.array(row_starts, np.int64),
            sequences=tuple(sequences),
        )

    def sequences(self) -> tuple[list[StepSequence], list[BlockCopy]]:
        """Does what `pack` does for whoever finds slots and positions by itself: returns each
        sequence as `_core.AttentionPlan` takes it, and the blocks to copy.
        """
        self._check_open("pack")
        self._is_packed = True
        return [one.rows() for one in self._rows], [one.copy for one in self._rows if one.copy is not None]

    def commit(self, kept: Sequence[int] | None = None) -> None:
        """Ends the step after a clean forward pass. Sequence i, in the order of `append`, keeps the
        first `kept[i]` of its rows, by default all; rejected drafts are what is not kept.
        """
        self._check_running("commit")
        counts = list(self._rows.values())
        kept = counts if kept is None else list(kept)
        if len(kept) != len(counts) or not all(0 <= few <= count for few, count in zip(kept, counts, strict=False)):
            raise EngineError(f"the step has {counts} rows of its sequences, and {kept} were to be kept")
        self._has_ended = True
        for sequence, count in zip(self._rows, kept, strict=True):
            sequence.keep(count)

    def roll_back(self) -> None:
        """Ends the step as if it had never been planned, packed or not, and whether or not blocks
        were copied.
        """
        if self._has_ended:
            raise EngineError("roll_back: this step has ended")
        self._has_ended = True
        for sequence in reversed(self._rows):
            sequence.unreserve()

    def _check_open(self, verb: str) -> None:
        if self._is_packed or self._has_ended:
            raise EngineError(f"{verb}: this step is packed already, or has ended; plan another one")

    def _check_running(self, verb: str) -> None:
        if not self._is_packed or self._has_ended:
            raise EngineError(f"{verb}: this step is not packed yet, or has ended")
