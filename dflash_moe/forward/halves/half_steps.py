"""Where a packed step is cut into two halves, and the halves themselves: disjoint rows of one plan,
for two threads. Block copies stay the whole step's, which makes them before.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from dflash_moe.config import BLOCK_TOKENS
from dflash_moe.forward.halves.half_turns import HalfTurns
from dflash_moe.operators.step_clock import StepClock
from dflash_moe.operators.step_context import StepContext, no_order

_Any = TypeVar("_Any")

# A boundary between sequences is preferred, because behind a cut within a sequence the second half
# awaits keys of the first in every layer. It is taken where the larger half has at most this share
# of the rows, 1.2 times those of an even half. Where it would have more, the sequence across the
# middle has more than a fifth of all rows, and is cut if that is nearer to the middle.
_LARGEST_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Cut:
    """The second half begins with packed row `row`. `is_inside` says that it begins within the rows
    of a sequence: then it reads keys that the first half stores.
    """

    row: int
    is_inside: bool


def choose_cut(step: StepContext) -> Cut | None:
    """Returns where to cut a step: between two sequences as near to the middle as can be, else
    within a sequence before a block of the KV cache, so that no block is written by both halves.
    None where a half would be empty.
    """
    num_rows, middle = step.num_rows, step.num_rows / 2
    starts = np.cumsum([count for _, _, count in step.sequences], dtype=np.int64)[:-1]
    if len(starts):
        row = int(starts[np.argmin(np.abs(starts - middle))])
        if max(row, num_rows - row) <= _LARGEST_SHARE * num_rows:
            return Cut(row, False)
    inside = np.flatnonzero(step.positions[1:] % BLOCK_TOKENS == 0) + 1
    inside = np.setdiff1d(inside, starts)
    places = np.concatenate((starts, inside))
    if not len(places):
        return None
    row = int(places[np.argmin(np.abs(places - middle))])
    return Cut(row, row not in starts)


def half_of(step: StepContext, cut: Cut, half: int, turns: HalfTurns) -> StepContext:
    """Returns the rows before the cut, `half` 0, or those from it on, 1, as what a thread computes.
    Arrays and block tables are views of the step's.
    """
    begin, end = ((0, cut.row), (cut.row, step.num_rows))[half]
    return replace(
        step,
        positions=step.positions[begin:end],
        slots=step.slots[begin:end],
        sequences=rows_between(step.sequences, begin, end),
        lengths=rows_between(step.lengths, begin, end),
        half=half,
        clock=StepClock(turns),
        keys_stored=turns.keys_stored if cut.is_inside and half == 0 else no_order,
        await_keys=turns.await_keys if cut.is_inside and half == 1 else no_order,
    )


def rows_between(sequences: Sequence[tuple[_Any, int, int]], begin: int, end: int) -> list[tuple[_Any, int, int]]:
    """Returns the packed rows begin..end - 1 of sequences that are given in packed order, each as
    (anything, position of the first row, number of rows).
    """
    found, at = [], 0
    for anything, first, count in sequences:
        skipped, stop = max(begin - at, 0), min(end - at, count)
        if skipped < stop:
            found.append((anything, first + skipped, stop - skipped))
        at += count
    return found
