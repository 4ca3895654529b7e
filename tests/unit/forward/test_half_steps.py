"""Where a step is cut, and that its halves are its rows.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_moe.forward.blocks import BlockPool
from dflash_moe.forward.half_steps import Cut, choose_cut, halves_of, lengths_of
from dflash_moe.forward.sequence import SequenceBlocks
from dflash_moe.forward.step_blocks import PackedStep, StepBlocks

SEQUENCES = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 90)), min_size=1, max_size=6)


def packed_step(sequences: list[tuple[int, int]]) -> PackedStep:
    """A step of sequences, each with so many tokens stored and so many new ones."""
    pool, step = BlockPool(128), StepBlocks()
    for stored, count in sequences:
        sequence = SequenceBlocks(pool)
        if stored:
            before = StepBlocks()
            assert before.append(sequence, stored)
            before.pack()
            before.commit()
        assert step.append(sequence, count)
    return step.pack()


@pytest.mark.parametrize(
    ("sequences", "cut"),
    [
        ([(0, 256), (0, 256)], Cut(256, False)),
        ([(0, 200), (0, 90), (0, 222)], Cut(290, False)),
        ([(0, 512)], Cut(256, True)),
        # Before a block of the cache: position 112 is row 107.
        ([(5, 200)], Cut(107, True)),
        ([(9, 1), (9, 1), (0, 100)], Cut(50, True)),
        ([(7, 1)] * 4, Cut(2, False)),
        # No block begins within the rows, so that a boundary far from the middle is all there is.
        ([(0, 2), (0, 14)], Cut(2, False)),
        ([(0, 16)], None),
        ([(3, 1)], None),
    ],
)
def test_a_step_is_cut_between_sequences_near_the_middle_else_before_a_block(sequences, cut):
    assert choose_cut(packed_step(sequences)) == cut


@given(SEQUENCES, st.randoms(use_true_random=False))
def test_halves_have_the_rows_of_the_step(sequences, rng):
    step = packed_step(sequences)
    if step.num_rows < 2:
        return
    row = rng.randrange(1, step.num_rows)
    first, second = halves_of(step, row)
    assert (first.num_rows, second.num_rows) == (row, step.num_rows - row)
    for name in ("slots", "positions"):
        assert np.array_equal(np.concatenate((getattr(first, name), getattr(second, name))), getattr(step, name))
    for half in (first, second):
        assert len(half.copy_from) == len(half.copy_to) == 0
        assert half.row_starts.tolist() == np.cumsum([0, *(count for _, _, count in half.sequences)]).tolist()
        positions = [first_position + place for _, first_position, count in half.sequences for place in range(count)]
        assert positions == half.positions.tolist()
        tables = [table[position // 16] for table, start, count in half.sequences for position in range(start, start + count)]
        assert tables == (half.slots // 16).tolist()
    assert len(first.sequences) + len(second.sequences) - len(step.sequences) == (row not in step.row_starts)


@given(SEQUENCES)
def test_a_cut_leaves_no_half_empty_and_no_block_to_both(sequences):
    step = packed_step(sequences)
    cut = choose_cut(step)
    if cut is None:
        return
    first, second = halves_of(step, cut.row)
    assert first.num_rows > 0
    assert second.num_rows > 0
    assert not set((first.slots // 16).tolist()) & set((second.slots // 16).tolist())
    assert cut.is_inside == (cut.row not in step.row_starts)


def test_lengths_are_cut_like_rows():
    lengths = [(100, 0, 4), (50, 7, 1), (80, 3, 5)]
    assert lengths_of(lengths, 0, 10) == lengths
    assert lengths_of(lengths, 0, 4) == [(100, 0, 4)]
    assert lengths_of(lengths, 2, 7) == [(100, 2, 2), (50, 7, 1), (80, 3, 2)]
    assert lengths_of(lengths, 7, 10) == [(80, 5, 3)]
