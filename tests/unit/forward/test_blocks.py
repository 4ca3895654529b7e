"""The block pool: who has which block, and that its books refuse what they cannot mean.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_moe.errors import ConfigError, DflashError, EngineError
from dflash_moe.forward.blocks import MAX_BLOCKS, BlockPool


def table_of(*block_ids: int) -> np.ndarray:
    return np.array(block_ids, np.int32)


def test_blocks_are_given_out_once_and_come_back():
    pool = BlockPool(5)
    assert (pool.num_blocks, pool.num_free, pool.block_tokens) == (5, 5, 16)
    first, second = pool.allocate(2), pool.allocate(3)
    assert (first, second, pool.num_free) == ([0, 1], [2, 3, 4], 0)
    pool.release([1])
    assert (pool.num_free, pool.references(1), pool.references(0)) == (1, 0, 1)
    assert pool.allocate(1) == [1]


def test_too_few_free_blocks_give_none_and_change_nothing():
    pool = BlockPool(2)
    assert pool.allocate(3) is None
    assert pool.num_free == 2
    assert pool.allocate(0) == []
    with pytest.raises(EngineError, match="-1 blocks were asked for"):
        pool.allocate(-1)


def test_a_double_release_raises_a_typed_error_and_changes_nothing():
    pool = BlockPool(3)
    pool.allocate(2)
    pool.release([0])
    with pytest.raises(EngineError, match="block 0 is released 1 times and has 0 references; it was released twice"):
        pool.release([1, 0])
    with pytest.raises(EngineError, match="block 1 is released 2 times and has 1 references"):
        pool.release([1, 1])
    assert (pool.references(1), pool.num_free) == (1, 2)
    assert issubclass(EngineError, DflashError)
    pool.check_integrity([[1]])


def test_a_fork_keeps_blocks_until_the_last_table_releases_them():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.fork(blocks)
    pool.release(blocks)
    assert (pool.num_free, [pool.references(block) for block in blocks]) == (1, [1, 1])
    with pytest.raises(EngineError, match="block 2 is free and cannot be forked"):
        pool.fork([0, 2])
    assert pool.references(0) == 1
    pool.release(blocks)
    assert pool.num_free == 3


def test_a_block_of_one_table_is_written_in_place_and_a_shared_one_replaced():
    pool = BlockPool(2)
    table = table_of(*pool.allocate(1))
    assert pool.writable(table, 0) == 0
    pool.fork([0])
    assert (pool.writable(table, 0), table[0]) == (1, 1)
    assert [pool.references(block) for block in range(2)] == [1, 1]
    pool.check_integrity([[0], table])


def test_without_a_free_block_a_shared_one_stays():
    pool = BlockPool(1)
    table = table_of(*pool.allocate(1))
    pool.fork([0])
    assert pool.writable(table, 0) is None
    assert (table[0], pool.references(0)) == (0, 2)
    pool.release([0, 0])
    with pytest.raises(EngineError, match="block 0 is free, but entry 0 of a table names it"):
        pool.writable(table, 0)


@pytest.mark.parametrize("block_id", [-1, 4, 1 << 40])
def test_a_block_that_does_not_exist_is_refused_everywhere(block_id):
    pool = BlockPool(4)
    pool.allocate(4)
    calls = [
        lambda: pool.references(block_id),
        lambda: pool.fork([0, block_id]),
        lambda: pool.release([0, block_id]),
        lambda: pool.writable(np.array([block_id]), 0),
        lambda: pool.check_integrity([[block_id]]),
    ]
    for call in calls:
        with pytest.raises(EngineError, match=rf"block {block_id} does not exist; the pool has blocks 0\.\.3"):
            call()
    assert [pool.references(block) for block in range(4)] == [1] * 4


@pytest.mark.parametrize(("num_blocks", "block_tokens"), [(0, 16), (-1, 16), (MAX_BLOCKS + 1, 16), (4, 0)])
def test_a_pool_without_blocks_is_refused(num_blocks, block_tokens):
    with pytest.raises(ConfigError, match="is not allowed; allowed: "):
        BlockPool(num_blocks, block_tokens)


def test_the_integrity_check_finds_a_leak_a_missing_reference_and_a_free_block_in_a_table():
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(EngineError, match="block 0 has 1 references, and 0 table entries name it"):
        pool.check_integrity([])
    with pytest.raises(EngineError, match="block 0 has 1 references, and 2 table entries name it"):
        pool.check_integrity([table_of(0), [0]])
    with pytest.raises(EngineError, match="block 2 has 0 references, and 1 table entries name it"):
        pool.check_integrity([[0, 2]])
    pool.check_integrity([[0]])


def test_the_integrity_check_finds_a_damaged_list_of_free_blocks():
    for damage in ([2, 2], [2], [2, 1, 1], [2, 1, 0]):
        pool = BlockPool(3)
        pool.allocate(1)
        pool._free = damage
        with pytest.raises(EngineError, match="is in the list of free blocks wrongly"):
            pool.check_integrity([[0]])


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9), st.lists(st.tuples(st.sampled_from(["allocate", "fork", "release"]), st.integers(0, 9)), max_size=60))
def test_any_calls_agree_with_a_model_that_counts(num_blocks, calls):
    pool, owned = BlockPool(num_blocks), []
    for verb, number in calls:
        if verb == "allocate":
            taken = pool.allocate(number)
            assert (taken is None) == (number > num_blocks - len(set(owned)))
            assert not set(taken or []) & set(owned), "a block in use was given out"
            owned += taken or []
        elif verb == "fork" and owned:
            block = owned[number % len(owned)]
            pool.fork([block])
            owned.append(block)
        elif verb == "release" and owned:
            pool.release([owned.pop(number % len(owned))])
        assert [pool.references(block) for block in range(num_blocks)] == [owned.count(block) for block in range(num_blocks)]
        assert pool.num_free == num_blocks - len(set(owned))
        pool.check_integrity([owned])
