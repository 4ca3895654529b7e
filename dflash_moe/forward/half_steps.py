"""Where a packed step is cut into two halves, and the halves themselves: two steps over disjoint
rows of one plan, for two threads. Block copies stay the whole step's, which makes them before.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_moe.config import BLOCK_TOKENS
from dflash_moe.forward.step_blocks import PackedStep

# A boundary between sequences is taken where the larger half has at most this share of the rows.
# Otherwise one prompt is most of the step, and is cut.
_LARGEST_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Cut:
    """The second half begins with packed row `row`. `is_inside` says that it begins within the rows
    of a sequence: then it reads keys that the first half stores.
    """

    row: int
    is_inside: bool


def choose_cut(step: PackedStep) -> Cut | None:
    """Returns where to cut a step: between two sequences as near to the middle as can be, else
    within a sequence before a block of the KV cache, so that no block is written by both halves.
    None where a half would be empty.
    """
    num_rows, middle = step.num_rows, step.num_rows / 2
    starts = step.row_starts[1:-1]
    if len(starts):
        row = int(starts[np.argmin(np.abs(starts - middle))])
        if max(row, num_rows - row) <= _LARGEST_SHARE * num_rows:
            return Cut(row, False)
    inside = np.flatnonzero(step.positions[1:] % BLOCK_TOKENS == 0) + 1
    inside = np.setdiff1d(inside, step.row_starts)
    places = np.concatenate((starts, inside))
    if not len(places):
        return None
    row = int(places[np.argmin(np.abs(places - middle))])
    return Cut(row, row not in starts)


def halves_of(step: PackedStep, row: int) -> tuple[PackedStep, PackedStep]:
    """Returns the rows before `row` and those from it on as steps without copies. Arrays and block
    tables are views of the step's.
    """
    return _part(step, 0, row), _part(step, row, step.num_rows)


def lengths_of(lengths: Sequence[tuple[int, int, int]], begin: int, end: int) -> list[tuple[int, int, int]]:
    """Returns the packed rows begin..end - 1 of sequences that are given in packed order, each as
    (anything, position of the first row, number of rows).
    """
    found, at = [], 0
    for anything, first, count in lengths:
        skipped, stop = max(begin - at, 0), min(end - at, count)
        if skipped < stop:
            found.append((anything, first + skipped, stop - skipped))
        at += count
    return found


def _part(step: PackedStep, begin: int, end: int) -> PackedStep:
    tables = [(place, first, count) for place, (_, first, count) in enumerate(step.sequences)]
    parts = lengths_of(tables, begin, end)
    none = np.empty(0, np.int32)
    return PackedStep(
        copy_from=none,
        copy_to=none,
        slots=step.slots[begin:end],
        positions=step.positions[begin:end],
        row_starts=np.cumsum([0, *(count for _, _, count in parts)], dtype=np.int64),
        sequences=tuple((step.sequences[place][0], first, count) for place, first, count in parts),
    )
