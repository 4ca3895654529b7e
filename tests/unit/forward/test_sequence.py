"""What a sequence has in the paged KV cache: slots, forks, reservations and their ends.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import numpy as np
import pytest

from dflash_moe.errors import EngineError
from dflash_moe.forward.block_hashes import BlockHashes
from dflash_moe.forward.blocks import BlockPool
from dflash_moe.forward.sequence import BlockCopy, SequenceBlocks, releasable


def stored(pool: BlockPool, num_tokens: int) -> SequenceBlocks:
    sequence = SequenceBlocks(pool)
    if num_tokens:
        assert sequence.reserve(num_tokens)
        sequence.keep(num_tokens)
    return sequence


def check(pool: BlockPool, *sequences: SequenceBlocks) -> None:
    pool.check_integrity([table for one in sequences for table in (one.block_table, one.held_blocks)])


def test_slots_follow_the_table_block_by_block():
    pool = BlockPool(8)
    stored(pool, 17)
    sequence = stored(pool, 40)
    assert sequence.block_table.tolist() == [2, 3, 4]
    slots = sequence.slot_mapping(14, 20)
    assert slots.dtype == np.int64
    assert slots.tolist() == [*range(2 * 16 + 14, 2 * 16 + 16), *range(3 * 16, 3 * 16 + 16), *range(4 * 16, 4 * 16 + 2)]
    assert sequence.slot_mapping(0, 0).shape == (0,)


def test_the_block_table_is_int32_and_cannot_be_written():
    sequence = stored(BlockPool(4), 20)
    table = sequence.block_table
    assert (table.dtype, table.flags.c_contiguous) == (np.int32, True)
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 3


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 21), (20, 1), (5, -1)])
def test_slots_of_positions_without_a_block_are_refused(first, count):
    with pytest.raises(EngineError, match="20 tokens are stored and 0 reserved"):
        stored(BlockPool(4), 20).slot_mapping(first, count)


def test_a_reservation_counts_only_once_it_is_kept():
    pool = BlockPool(4)
    sequence = stored(pool, 15)
    assert sequence.blocks_needed(18) == 2
    assert sequence.reserve(18)
    assert (sequence.num_tokens, sequence.num_reserved, len(sequence.block_table)) == (15, 18, 3)
    assert sequence.slot_mapping(15, 18).tolist() == list(range(15, 33))
    sequence.keep(2)
    assert (sequence.num_tokens, sequence.num_reserved, sequence.block_table.tolist()) == (17, 0, [0, 1])
    check(pool, sequence)


def test_a_reservation_given_up_leaves_the_table_as_it_was():
    pool = BlockPool(4)
    sequence = stored(pool, 15)
    assert sequence.reserve(18)
    sequence.unreserve()
    assert (sequence.num_tokens, sequence.num_reserved, sequence.block_table.tolist(), pool.num_free) == (15, 0, [0], 3)
    assert sequence.reserve(18)
    assert sequence.block_table.tolist() == [0, 1, 2], "the same blocks as the first time"


def test_too_few_free_blocks_reserve_nothing():
    pool = BlockPool(2)
    sequence, other = stored(pool, 10), stored(pool, 1)
    assert not sequence.reserve(7)
    assert (sequence.num_reserved, sequence.block_table.tolist(), sequence.copy) == (0, [0], None)
    assert sequence.reserve(6), "the last block has room for 6"
    check(pool, sequence, other)


def test_a_fork_shares_blocks_until_either_writes():
    pool = BlockPool(8)
    one = stored(pool, 20)
    two = one.fork()
    assert (two.num_tokens, two.block_table.tolist(), pool.num_free) == (20, [0, 1], 6)
    assert two.reserve(1)
    assert two.copy == BlockCopy(1, 2)
    assert (two.block_table.tolist(), one.block_table.tolist(), two.held_blocks) == ([0, 2], [0, 1], (1,))
    check(pool, one, two)
    two.keep(1)
    assert (pool.references(0), pool.references(1), pool.references(2)) == (2, 1, 1)
    assert one.reserve(1)
    assert one.copy is None, "the block is no longer shared"


def test_a_full_last_block_is_shared_without_a_copy():
    pool = BlockPool(4)
    one = stored(pool, 32)
    two = one.fork()
    assert two.reserve(3)
    assert (two.copy, two.block_table.tolist()) == (None, [0, 1, 2])
    check(pool, one, two)


def test_a_copy_given_up_puts_the_shared_block_back_even_if_the_other_has_gone():
    pool = BlockPool(3)
    one = stored(pool, 20)
    two = one.fork()
    assert two.reserve(1)
    one.release()
    assert pool.references(1) == 1, "held: its content is what the copy is made of"
    two.unreserve()
    assert (two.block_table.tolist(), two.num_tokens, pool.num_free) == ([0, 1], 20, 1)
    check(pool, one, two)


def test_a_fork_of_a_prefix_has_its_tokens_only():
    pool = BlockPool(8)
    one = stored(pool, 40)
    two = one.fork(17)
    assert (two.num_tokens, two.block_table.tolist()) == (17, [0, 1])
    assert one.fork(0).block_table.tolist() == []
    assert two.reserve(1)
    assert two.copy == BlockCopy(1, 3)
    check(pool, one, two)
    with pytest.raises(EngineError, match="a fork at 41 tokens; 40 are stored"):
        one.fork(41)


def test_truncation_releases_what_only_the_forgotten_tokens_need():
    pool = BlockPool(4)
    sequence = stored(pool, 40)
    sequence.truncate(32)
    assert (sequence.num_tokens, sequence.block_table.tolist(), pool.num_free) == (32, [0, 1], 2)
    sequence.truncate(1)
    assert (sequence.block_table.tolist(), pool.num_free) == ([0], 3)
    with pytest.raises(EngineError, match="truncation to 2 tokens; 1 are stored"):
        sequence.truncate(2)


def test_a_released_sequence_can_begin_again():
    pool = BlockPool(3)
    sequence = stored(pool, 33)
    sequence.release()
    sequence.release()
    assert (sequence.num_tokens, pool.num_free) == (0, 3)
    assert sequence.reserve(33)


def test_a_table_grows_beyond_its_first_room():
    pool = BlockPool(100, 4)
    sequence = SequenceBlocks(pool)
    for count in (63, 2, 100, 1, 200):
        assert sequence.reserve(count)
        sequence.keep(count)
    assert sequence.slot_mapping(0, 366).tolist() == list(range(366))
    other = sequence.fork()
    assert other.reserve(10)
    assert other.block_table.tolist() == [*range(91), 92, 93, 94]
    check(pool, sequence, other)


def test_nothing_else_happens_to_a_sequence_while_a_step_is_to_write_it():
    sequence = stored(BlockPool(4), 10)
    with pytest.raises(EngineError, match="nothing is reserved"):
        sequence.unreserve()
    with pytest.raises(EngineError, match="1 positions were to be kept; 0 are reserved"):
        sequence.keep(1)
    with pytest.raises(EngineError, match="0 positions were to be reserved"):
        sequence.reserve(0)
    assert sequence.reserve(2)
    for call in (sequence.release, sequence.fork, lambda: sequence.truncate(3), lambda: sequence.reserve(1)):
        with pytest.raises(EngineError, match="while a step is to write 2 tokens; keep or unreserve them first"):
            call()
    with pytest.raises(EngineError, match="3 positions were to be kept; 2 are reserved"):
        sequence.keep(3)


def hashes_of(num_tokens: int) -> BlockHashes:
    hashes = BlockHashes(b"model")
    hashes.extend(range(num_tokens))
    return hashes


def test_full_blocks_are_published_as_they_fill_and_adopted_by_an_empty_sequence():
    pool = BlockPool(8)
    one, hashes = stored(pool, 31), hashes_of(40).hashes
    one.publish(hashes)
    assert pool.match(hashes) == [0], "the second block has 15 tokens"
    assert one.reserve(9)
    one.publish(hashes)
    assert pool.match(hashes) == [0], "what is reserved is not stored"
    one.keep(5)
    one.publish(hashes[:1])
    assert pool.match(hashes) == [0], "a block without a hash waits"
    one.publish(hashes)
    assert pool.match(hashes) == [0, 1]
    two = SequenceBlocks(pool)
    two.adopt_prefix(pool.match(hashes))
    assert (two.num_tokens, two.block_table.tolist(), two.blocks_needed(17)) == (32, [0, 1], 2)
    assert two.reserve(3)
    assert (two.copy, two.block_table.tolist()) == (None, [0, 1, 3])
    check(pool, one, two)
    with pytest.raises(EngineError, match="adopt_prefix while a step is to write 3 tokens"):
        two.adopt_prefix([])
    with pytest.raises(EngineError, match="a prefix was to be adopted behind 36 stored tokens"):
        one.adopt_prefix([0])


def test_a_prefix_that_was_evicted_is_not_adopted():
    pool = BlockPool(2)
    one, hashes = stored(pool, 32), hashes_of(32).hashes
    one.publish(hashes)
    matched = pool.match(hashes)
    one.release()
    two, three = stored(pool, 1), SequenceBlocks(pool)
    assert pool.match(hashes) == [0], "the end of a prefix is evicted first"
    with pytest.raises(EngineError, match="block 1 is not published"):
        three.adopt_prefix(matched)
    assert (three.num_tokens, three.block_table.tolist(), pool.num_free) == (0, [], 1)
    check(pool, two, three)


def test_a_published_block_that_is_truncated_and_written_is_not_found_any_more():
    pool = BlockPool(4)
    one, hashes = stored(pool, 32), hashes_of(32).hashes
    one.publish(hashes)
    one.truncate(20)
    assert pool.match(hashes) == [0, 1], "its content is still whole"
    assert one.reserve(1)
    assert (one.copy, pool.match(hashes)) == (None, [0])
    one.unreserve()
    assert pool.match(hashes) == [0], "a failed step may have written"
    assert one.reserve(12)
    one.keep(12)
    one.publish(hashes)
    assert pool.match(hashes) == [0, 1], "it is full again"


def test_a_published_block_that_others_name_is_copied_by_who_truncates_and_writes():
    pool = BlockPool(4)
    one, hashes = stored(pool, 32), hashes_of(32).hashes
    one.publish(hashes)
    two = SequenceBlocks(pool)
    two.adopt_prefix(pool.match(hashes))
    two.truncate(31)
    assert two.blocks_needed(1) == 1
    assert two.reserve(1)
    assert (two.copy, pool.match(hashes)) == (BlockCopy(1, 2), [0, 1])
    two.keep(1)
    check(pool, one, two)


def test_rejected_drafts_fill_no_published_block():
    pool = BlockPool(4)
    one, hashes = stored(pool, 14), hashes_of(32).hashes
    assert one.reserve(5)
    one.keep(1)
    one.publish(hashes)
    assert (one.num_tokens, pool.match(hashes), pool.num_free) == (15, [], 3)


def test_a_fork_publishes_what_its_origin_did_not():
    pool = BlockPool(8)
    one, hashes = stored(pool, 40), hashes_of(48).hashes
    one.publish(hashes[:1])
    two = one.fork(33)
    one.release()
    two.publish(hashes)
    assert pool.match(hashes) == [0, 1]


def test_releasable_counts_blocks_that_only_these_sequences_name():
    pool = BlockPool(16)
    one = stored(pool, 40)
    two, other = one.fork(32), stored(pool, 20)
    three = two.fork()
    assert two.reserve(1)
    assert one.reserve(1), "in its own last block"
    assert three.reserve(1)
    for chosen, expected in (
        ((), 0),
        ((one,), 1),
        ((two, two), 1),
        ((one, two), 2),
        ((one, two, three), 5),
        ((other, one), 3),
        ((one, two, three, other), 7),
    ):
        assert releasable(chosen) == expected
    check(pool, one, two, three, other)
    assert pool.num_free == 16 - 7


def test_releasable_counts_a_shared_block_that_a_step_holds_until_it_ends():
    pool = BlockPool(4)
    one = stored(pool, 5)
    two = one.fork()
    assert two.reserve(1)
    assert (two.held_blocks, releasable([two]), releasable([one]), releasable([one, two])) == ((0,), 1, 0, 2)
