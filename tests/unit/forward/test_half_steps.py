"""Where a step is cut, and that its halves are its rows.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_moe.forward.blocks import BlockPool
from dflash_moe.forward.halves.half_steps import Cut, choose_cut, half_of, rows_between
from dflash_moe.forward.halves.half_turns import HalfTurns
from dflash_moe.forward.sequence import SequenceBlocks
from dflash_moe.forward.step_blocks import StepBlocks
from dflash_moe.operators.step_context import StepContext, no_order

SEQUENCES = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 90)), min_size=1, max_size=6)


def step_of(sequences: list[tuple[int, int]]) -> StepContext:
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
    packed = step.pack()
    lengths = [(stored + count, stored, count) for stored, count in sequences]
    return StepContext(packed.positions, torch.from_numpy(packed.slots), packed.sequences, lengths)


def halves_of(step: StepContext, cut: Cut) -> tuple[StepContext, StepContext]:
    turns = HalfTurns(1.0)
    return half_of(step, cut, 0, turns), half_of(step, cut, 1, turns)


def starts_of(step: StepContext) -> list[int]:
    return np.cumsum([0, *(count for _, _, count in step.sequences)]).tolist()


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
    assert choose_cut(step_of(sequences)) == cut


@given(SEQUENCES, st.randoms(use_true_random=False))
def test_halves_have_the_rows_of_the_step(sequences, rng):
    step = step_of(sequences)
    if step.num_rows < 2:
        return
    row = rng.randrange(1, step.num_rows)
    first, second = halves_of(step, Cut(row, row not in starts_of(step)))
    assert (first.num_rows, second.num_rows) == (row, step.num_rows - row)
    for name in ("slots", "positions"):
        assert np.array_equal(np.concatenate((getattr(first, name), getattr(second, name))), getattr(step, name))
    for half in (first, second):
        assert [entry[1:] for entry in half.lengths] == [entry[1:] for entry in half.sequences]
        positions = [first_position + place for _, first_position, count in half.sequences for place in range(count)]
        assert positions == half.positions.tolist()
        tables = [table[position // 16] for table, start, count in half.sequences for position in range(start, start + count)]
        assert tables == (half.slots // 16).tolist()
    assert len(first.sequences) + len(second.sequences) - len(step.sequences) == (row not in starts_of(step))


@given(SEQUENCES)
def test_a_cut_leaves_no_half_empty_and_no_block_to_both(sequences):
    step = step_of(sequences)
    cut = choose_cut(step)
    if cut is None:
        return
    first, second = halves_of(step, cut)
    assert first.num_rows > 0
    assert second.num_rows > 0
    assert (first.keys_stored is no_order) == (second.await_keys is no_order) == (not cut.is_inside)
    assert not set((first.slots // 16).tolist()) & set((second.slots // 16).tolist())
    assert cut.is_inside == (cut.row not in starts_of(step))


def test_lengths_are_cut_like_rows():
    lengths = [(100, 0, 4), (50, 7, 1), (80, 3, 5)]
    assert rows_between(lengths, 0, 10) == lengths
    assert rows_between(lengths, 0, 4) == [(100, 0, 4)]
    assert rows_between(lengths, 2, 7) == [(100, 2, 2), (50, 7, 1), (80, 3, 2)]
    assert rows_between(lengths, 7, 10) == [(80, 5, 3)]
