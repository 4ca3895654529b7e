"""Plans which sequences of a packed step torch's attention computes together, and which slots of
the pages their keys lie in. Decode rows of similar length become one padded batch, so that a step
of many sequences makes few calls; the chunk of a prefill is a batch of its own.

The plan is made from the step's books on the processor and reaches the model's device in one copy.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dflash_moe.config import BLOCK_TOKENS

# Sequences with more rows than this, as the chunks of a prefill have, are computed alone: they are
# work enough for a call. A decode row with drafts has fewer.
_MAX_GROUPED_ROWS = 16
# Sequences may share a batch where a quarter of the longest one's keys is padding at most, or few
# enough tokens that a call of its own would cost more.
_MAX_PADDING_SHARE = 4
_MAX_PADDING_TOKENS = 64

# A sequence of a step: its block table, int32 [num_blocks], the position of its first row, and its
# number of rows.
StepSequence = tuple[np.ndarray, int, int]


@dataclass(frozen=True, slots=True)
class _Member:
    """A sequence, its first packed row, and the position of the first key that its rows see."""

    table: np.ndarray
    first: int
    count: int
    row: int
    start: int

    @property
    def num_keys(self) -> int:
        """The number of keys that the rows see together."""
        return self.first + self.count - self.start

    @property
    def blocks(self) -> np.ndarray:
        """The blocks in which these keys lie."""
        return self.table[self.start // BLOCK_TOKENS : -(-(self.first + self.count) // BLOCK_TOKENS)]


class RowGroup:
    """Sequences with equally many rows whose attention is one batch. All tensors are on the model's
    device and belong to the step.
    """

    def __init__(self, members: Sequence[_Member], window: int) -> None:
        self.num_sequences = len(members)
        # The rows of each sequence, and its keys, padded to those of the longest.
        self.num_rows = members[0].count
        self.num_keys = max(member.num_keys for member in members)
        # Every row sees all keys, or all up to its own and none is in front of the first: then no
        # mask is needed.
        is_alike = all(member.num_keys == self.num_keys for member in members)
        self.sees_all = is_alike and self.num_rows == 1
        self.is_causal = is_alike and self.num_rows == self.num_keys and (window == 0 or self.num_rows <= window)
        # The packed rows of all sequences, one sequence after the other.
        self.rows: slice | torch.Tensor = slice(members[0].row, members[0].row + self.num_rows * self.num_sequences)
        self._members, self._window = members, window
        self._mask: torch.Tensor | None = None

    @property
    def has_adjacent_rows(self) -> bool:
        """Whether the packed rows of the sequences lie side by side."""
        return all(a.row + a.count == b.row for a, b in zip(self._members, self._members[1:], strict=False))

    def numbers(self) -> list[np.ndarray]:
        """Returns what `bind` needs on the device: first keys, first rows and last keys by
        sequence, then tables, and the packed rows where they do not lie side by side. All are
        int64.
        """
        members = self._members
        tables = np.zeros((len(members), max(len(member.blocks) for member in members)), np.int64)
        for place, member in enumerate(members):
            tables[place, : len(member.blocks)] = member.blocks
        firsts = [(member.start, member.first, member.first + member.count - 1) for member in members]
        found = [np.array(firsts, np.int64).T.reshape(-1), tables.reshape(-1)]
        if not self.has_adjacent_rows:
            found.append(np.concatenate([np.arange(member.row, member.row + member.count) for member in members]))
        return found

    def bind(self, numbers: torch.Tensor) -> None:
        """Takes `numbers`, joined and on the device."""
        count = self.num_sequences
        starts, firsts, lasts = numbers[: 3 * count].view(3, count, 1)
        num_blocks = max(len(member.blocks) for member in self._members)
        tables = numbers[3 * count : (3 + num_blocks) * count].view(count, num_blocks)
        if not self.has_adjacent_rows:
            self.rows = numbers[(3 + num_blocks) * count :]
        self._firsts = firsts
        self._positions = starts + torch.arange(self.num_keys, device=numbers.device)
        # Padding repeats a sequence's own last key: what other blocks hold can never reach it, not
        # even by a product of zero and a number that is none.
        read = torch.minimum(self._positions, lasts)
        places = torch.div(read, BLOCK_TOKENS, rounding_mode="floor") - torch.div(starts, BLOCK_TOKENS, rounding_mode="floor")
        # The slots of all keys, int64 [num_sequences * num_keys].
        self.slots = (tables.gather(1, places) * BLOCK_TOKENS + read % BLOCK_TOKENS).reshape(-1)

    def mask(self, begin: int, end: int) -> torch.Tensor | None:
        """Returns which keys the rows begin..end - 1 of each sequence see, bool [num_sequences,
        end - begin, num_keys]; None where they see all.
        """
        if self.sees_all:
            return None
        is_whole = (begin, end) == (0, self.num_rows)
        if is_whole and self._mask is not None:
            return self._mask
        queries = (self._firsts + torch.arange(begin, end, device=self._firsts.device))[:, :, None]
        keys = self._positions[:, None, :]
        seen = keys <= queries
        if self._window:
            seen &= keys > queries - self._window
        if is_whole:
            # All layers of the step with this window want it.
            self._mask = seen
        return seen


def plan_groups(sequences: Sequence[StepSequence], window: int, max_keys: int, device: torch.device) -> list[RowGroup]:
    """Returns groups that hold each sequence of a step once, for attention with a window, 0 meaning
    none. A group gathers at most `max_keys` keys, padding included, unless it is one sequence.
    """
    groups = [RowGroup(members, window) for members in _batches(_members(sequences, window), max_keys)]
    parts = [group.numbers() for group in groups]
    sizes = [sum(len(part) for part in numbers) for numbers in parts]
    joined = torch.from_numpy(np.concatenate([part for numbers in parts for part in numbers])).to(device)
    for group, numbers in zip(groups, joined.split(sizes), strict=True):
        group.bind(numbers)
    return groups


def _members(sequences: Sequence[StepSequence], window: int) -> list[_Member]:
    found, row = [], 0
    for table, first, count in sequences:
        found.append(_Member(table, first, count, row, max(0, first - window + 1) if window else 0))
        row += count
    return found


def _batches(members: Sequence[_Member], max_keys: int) -> list[list[_Member]]:
    found = [[member] for member in members if member.count > _MAX_GROUPED_ROWS]
    by_count: dict[int, list[_Member]] = defaultdict(list)
    for member in members:
        if member.count <= _MAX_GROUPED_ROWS:
            by_count[member.count].append(member)
    for alike in by_count.values():
        batch: list[_Member] = []
        for member in sorted(alike, key=lambda member: member.num_keys, reverse=True):
            longest = batch[0].num_keys if batch else 0
            padding = longest - member.num_keys
            is_near = padding <= max(longest // _MAX_PADDING_SHARE, _MAX_PADDING_TOKENS)
            if batch and is_near and (len(batch) + 1) * longest <= max_keys:
                batch.append(member)
            else:
                batch = [member]
                found.append(batch)
    # In the order of the step, the rows of a batch of all sequences lie side by side.
    return [sorted(batch, key=lambda member: member.row) for batch in found]
