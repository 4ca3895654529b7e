"""Steps over the paged KV cache as transactions, with a model that writes tokens into slots.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dflash_moe.errors import EngineError
from dflash_moe.forward.block_hashes import BlockHashes
from dflash_moe.forward.blocks import BlockPool
from dflash_moe.forward.sequence import SequenceBlocks, releasable
from dflash_moe.forward.step_blocks import PackedStep, StepBlocks


def stored(pool: BlockPool, num_tokens: int) -> SequenceBlocks:
    sequence = SequenceBlocks(pool)
    step = StepBlocks()
    assert step.append(sequence, num_tokens)
    step.pack()
    step.commit()
    return sequence


def test_a_step_packs_the_rows_of_its_sequences_one_after_the_other():
    pool = BlockPool(16)
    decode, prefill = stored(pool, 20), SequenceBlocks(pool)
    step = StepBlocks()
    assert step.append(decode, 1)
    assert step.append(prefill, 18)
    assert step.num_rows == 19
    packed = step.pack()
    assert packed.num_rows == 19
    assert packed.slots.tolist() == [20, *range(32, 50)]
    assert packed.positions.tolist() == [20, *range(18)]
    assert packed.row_starts.tolist() == [0, 1, 19]
    assert [(table.tolist(), first, count) for table, first, count in packed.sequences] == [([0, 1], 20, 1), ([2, 3], 0, 18)]
    dtypes = (packed.copy_from, packed.copy_to, packed.slots, packed.positions, packed.row_starts, packed.sequences[0][0])
    assert [array.dtype for array in dtypes] == [np.int32, np.int32, np.int64, np.int64, np.int64, np.int32]
    step.commit()
    assert (decode.num_tokens, prefill.num_tokens) == (21, 18)


def test_forks_that_write_get_their_copies_in_one_list():
    pool = BlockPool(16)
    first = stored(pool, 5)
    second, third = first.fork(), first.fork()
    step = StepBlocks()
    for sequence in (first, second, third):
        assert step.append(sequence, 1)
    packed = step.pack()
    assert packed.copy_from.tolist() == [0, 0, 0], "the last one too: block 0 is what a failed step goes back to"
    assert packed.copy_to.tolist() == [1, 2, 3]
    assert packed.slots.tolist() == [21, 37, 53]
    step.commit()
    pool.check_integrity([one.block_table for one in (first, second, third)])
    assert (pool.num_free, pool.references(0)) == (13, 0)


def test_an_empty_step_is_a_step():
    step = StepBlocks()
    packed = step.pack()
    assert (packed.num_rows, packed.row_starts.tolist(), packed.sequences, len(packed.copy_from)) == (0, [0], (), 0)
    assert (packed.slots.dtype, packed.positions.dtype) == (np.int64, np.int64)
    step.commit()


def test_a_step_ends_once_and_is_packed_once():
    sequence, step = SequenceBlocks(BlockPool(4)), StepBlocks()
    with pytest.raises(EngineError, match="commit: this step is not packed yet"):
        step.commit()
    with pytest.raises(EngineError, match="is not in this step"):
        step.remove(sequence)
    assert step.append(sequence, 3)
    with pytest.raises(EngineError, match="while a step is to write 3 tokens"):
        step.append(sequence, 1)
    step.pack()
    for call in (step.pack, lambda: step.append(sequence, 1), lambda: step.remove(sequence)):
        with pytest.raises(EngineError, match="this step is packed already, or has ended"):
            call()
    for kept in ([], [4], [-1], [1, 1]):
        with pytest.raises(EngineError, match="rows of its sequences"):
            step.commit(kept)
    assert sequence.num_reserved == 3, "a refused commit has changed nothing"
    step.commit([2])
    for call in (step.commit, step.roll_back):
        with pytest.raises(EngineError, match="has ended"):
            call()
    assert sequence.num_tokens == 2


BLOCK_TOKENS = 4
NUM_BLOCKS = 14
# What a failed step may have done before it failed.
FAILURES = ("before packing", "before copies", "after copies", "after writes")


class CacheMachine(RuleBasedStateMachine):
    """Sequences of unlike tokens in a small pool. `cells` is the cache, whose slots hold tokens,
    and `histories` is what each sequence should read back. `prompts` are tokens that were stored
    once and may come again, and `contents` is what each hash stands for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_TOKENS)
        self.cells = np.full(NUM_BLOCKS * BLOCK_TOKENS, -1, np.int64)
        self.histories: dict[SequenceBlocks, list[int]] = {}
        self.next_token = 0
        self.prompts: list[list[int]] = []
        self.contents: dict[bytes, list[int]] = {}

    def hashes_of(self, tokens: list[int]) -> list[bytes]:
        hashes = BlockHashes(b"seed", BLOCK_TOKENS)
        hashes.extend(tokens)
        for number, block_hash in enumerate(hashes.hashes):
            self.contents[block_hash] = tokens[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
        return list(hashes.hashes)

    def pick(self, number: int) -> SequenceBlocks:
        return list(self.histories)[number % len(self.histories)]

    def tokens(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def copy_blocks(self, packed: PackedStep) -> None:
        assert len(set(packed.copy_to.tolist())) == len(packed.copy_to)
        assert not set(packed.copy_to.tolist()) & set(packed.copy_from.tolist())
        blocks = self.cells.reshape(NUM_BLOCKS, BLOCK_TOKENS)
        blocks[packed.copy_to] = blocks[packed.copy_from]

    def write(self, packed: PackedStep, tokens: list[int]) -> None:
        assert len(set(packed.slots.tolist())) == packed.num_rows, "two rows of a step go to one slot"
        self.cells[packed.slots] = tokens

    @rule()
    @precondition(lambda self: len(self.histories) < 6)
    def begin(self) -> None:
        self.histories[SequenceBlocks(self.pool)] = []

    @rule(number=st.integers(0, 9), share=st.floats(0, 1))
    @precondition(lambda self: 0 < len(self.histories) < 6)
    def fork(self, number: int, share: float) -> None:
        sequence = self.pick(number)
        shared = round(share * sequence.num_tokens)
        self.histories[sequence.fork(shared)] = self.histories[sequence][:shared]

    def remember(self, tokens: list[int]) -> None:
        self.prompts = [*self.prompts[-7:], list(tokens)]

    @rule()
    def publish(self) -> None:
        for sequence, history in self.histories.items():
            sequence.publish(self.hashes_of(history))

    @rule(number=st.integers(0, 9), back=st.integers(1, 6))
    @precondition(lambda self: self.histories)
    def go_back(self, number: int, back: int) -> None:
        sequence = self.pick(number)
        num_tokens = max(sequence.num_tokens - back, 0)
        sequence.truncate(num_tokens)
        del self.histories[sequence][num_tokens:]

    @rule(number=st.integers(0, 9))
    @precondition(lambda self: self.prompts and len(self.histories) < 6)
    def adopt(self, number: int) -> None:
        prompt = self.prompts[number % len(self.prompts)]
        matched = self.pool.match(self.hashes_of(prompt))
        free, sequence = self.pool.num_free, SequenceBlocks(self.pool)
        unreferenced = sum(self.pool.is_unreferenced(block) for block in matched)
        sequence.adopt_prefix(matched)
        assert self.pool.num_free == free - unreferenced
        self.histories[sequence] = prompt[: sequence.num_tokens]

    @rule(number=st.integers(0, 9))
    @precondition(lambda self: any(self.prompts) and len(self.histories) < 6)
    def compute_again(self, number: int) -> None:
        prompts = [prompt for prompt in self.prompts if prompt]
        prompt = prompts[number % len(prompts)]
        sequence, step = SequenceBlocks(self.pool), StepBlocks()
        if step.append(sequence, len(prompt)):
            self.write(step.pack(), prompt)
            step.commit()
            self.histories[sequence] = list(prompt)

    @rule(chosen=st.sets(st.integers(0, 5)))
    @precondition(lambda self: self.histories)
    def preempt(self, chosen: set[int]) -> None:
        sequences = [sequence for place, sequence in enumerate(self.histories) if place in chosen]
        expected = self.pool.num_free + releasable(sequences)
        for sequence in sequences:
            sequence.release()
            self.remember(self.histories[sequence])
            self.histories[sequence] = []
        assert self.pool.num_free == expected

    @rule(number=st.integers(0, 9), share=st.floats(0, 1))
    @precondition(lambda self: self.histories)
    def truncate(self, number: int, share: float) -> None:
        sequence = self.pick(number)
        num_tokens = round(share * sequence.num_tokens)
        sequence.truncate(num_tokens)
        self.remember(self.histories[sequence])
        del self.histories[sequence][num_tokens:]

    @rule(number=st.integers(0, 9))
    @precondition(lambda self: self.histories)
    def end(self, number: int) -> None:
        sequence = self.pick(number)
        sequence.release()
        self.remember(self.histories.pop(sequence))

    def plan(self, counts: list[int]) -> tuple[StepBlocks, dict[SequenceBlocks, int]]:
        """Appends what fits. Where blocks run out, the youngest sequence gives its own up, whether
        it is in the step or not.
        """
        step, planned = StepBlocks(), {}
        for sequence, count in zip(list(self.histories), counts, strict=False):
            if count == 0:
                continue
            free, needed = self.pool.num_free, sequence.blocks_needed(count)
            if step.append(sequence, count):
                assert self.pool.num_free == free - needed
                planned[sequence] = count
                continue
            assert (self.pool.num_free, sequence.num_reserved, needed > free) == (free, 0, True)
            youngest = list(self.histories)[-1]
            if youngest in planned:
                step.remove(youngest)
                del planned[youngest]
            youngest.release()
            self.remember(self.histories[youngest])
            self.histories[youngest] = []
        assert step.num_rows == sum(planned.values())
        return step, planned

    @rule(counts=st.lists(st.integers(0, 11), min_size=1, max_size=6), kept=st.lists(st.floats(0, 1), min_size=6, max_size=6))
    @precondition(lambda self: self.histories)
    def run_step(self, counts: list[int], kept: list[float]) -> None:
        step, planned = self.plan(counts)
        packed = step.pack()
        self.copy_blocks(packed)
        rows = [self.tokens(count) for count in planned.values()]
        self.write(packed, [token for row in rows for token in row])
        few = [round(share * count) for share, count in zip(kept, planned.values(), strict=False)]
        step.commit(few)
        for sequence, row, count in zip(planned, rows, few, strict=True):
            self.histories[sequence] += row[:count]

    @rule(counts=st.lists(st.integers(0, 11), min_size=1, max_size=6), failure=st.sampled_from(FAILURES))
    @precondition(lambda self: self.histories)
    def fail_step(self, counts: list[int], failure: str) -> None:
        step, _ = self.plan(counts)
        if failure != "before packing":
            packed = step.pack()
        if failure in ("after copies", "after writes"):
            self.copy_blocks(packed)
        if failure == "after writes":
            self.write(packed, self.tokens(packed.num_rows))
        tables = {sequence: len(history) for sequence, history in self.histories.items()}
        step.roll_back()
        assert tables == {sequence: sequence.num_tokens for sequence in self.histories}

    @invariant()
    def every_sequence_reads_back_its_own_tokens(self) -> None:
        for sequence, history in self.histories.items():
            assert sequence.num_tokens == len(history)
            assert self.cells[sequence.slot_mapping(0, len(history))].tolist() == history
            assert len(sequence.block_table) == -(-len(history) // BLOCK_TOKENS)

    @invariant()
    def every_published_block_has_the_content_of_its_hash(self) -> None:
        blocks = self.cells.reshape(NUM_BLOCKS, BLOCK_TOKENS)
        for block_hash, content in self.contents.items():
            for block in self.pool.match([block_hash]):
                assert blocks[block].tolist() == content

    @invariant()
    def references_are_table_entries_and_nothing_leaks(self) -> None:
        tables = [sequence.block_table.tolist() for sequence in self.histories]
        self.pool.check_integrity(tables)
        assert self.pool.num_free == NUM_BLOCKS - len({block for table in tables for block in table})
        assert not any(sequence.held_blocks or sequence.num_reserved for sequence in self.histories)


CacheMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestCache = CacheMachine.TestCase
