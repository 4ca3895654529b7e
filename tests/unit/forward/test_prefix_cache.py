"""The prefix cache of the block pool: what is found, what is evicted and when, and that its books
follow a model for any calls.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dflash_moe.errors import EngineError
from dflash_moe.forward.blocks import BlockPool

A, B, C, D = (bytes([letter]) * 16 for letter in b"abcd")


def cached(num_blocks: int, *hashes: bytes) -> BlockPool:
    """Returns a pool whose first blocks are free and cached, the first one to be evicted first."""
    pool = BlockPool(num_blocks)
    blocks = pool.allocate(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        assert pool.publish(block, block_hash)
    pool.release(blocks)
    return pool


def test_a_released_published_block_is_free_and_found_again_with_its_content():
    pool = cached(4, A, B)
    assert (pool.num_free, pool.num_cached) == (4, 2)
    assert pool.match([A, B]) == [0, 1]
    pool.adopt([0, 1])
    assert (pool.num_free, pool.num_cached, pool.num_adopted, pool.references(0)) == (2, 0, 2, 1)
    pool.adopt([0])
    assert (pool.references(0), pool.num_adopted) == (2, 3)
    pool.check_integrity([[0, 1], [0]])


def test_a_match_is_the_longest_prefix_and_changes_nothing():
    pool = cached(4, A, B, C)
    assert pool.match(iter([A, B, D, C])) == [0, 1]
    assert (pool.match([D, A]), pool.match([])) == ([], [])
    assert pool.match([A]) == [0]
    assert pool.allocate(2) == [3, 0], "a match of block 0 does not make it more recently used"


def test_plain_free_blocks_are_taken_first_and_then_the_least_recently_used_cached_ones():
    pool = cached(5, A, B, C)
    pool.adopt([0])
    pool.release([0])
    assert pool.allocate(3) == [3, 4, 1], "block 0 was used after 1 and 2"
    assert (pool.num_evicted, pool.num_cached, pool.num_free) == (1, 2, 2)
    assert (pool.match([B]), pool.match([C]), pool.match([A])) == ([], [2], [0])
    assert pool.allocate(3) is None
    assert pool.num_evicted == 1, "an allocation that cannot be evicts nothing"
    assert pool.allocate(2) == [2, 0]
    pool.release([0, 2])
    assert (pool.num_cached, pool.num_free) == (0, 2), "what was evicted is not cached again"


def test_the_first_block_published_under_a_hash_stays_the_one():
    pool = BlockPool(3)
    pool.allocate(2)
    assert pool.publish(0, A)
    assert pool.publish(0, A), "again"
    assert not pool.publish(1, A)
    pool.release([0, 1])
    assert (pool.match([A]), pool.num_cached) == ([0], 1)
    pool.check_integrity([])


def test_what_cannot_be_published_or_adopted_is_refused_and_changes_nothing():
    pool = BlockPool(3)
    with pytest.raises(EngineError, match="block 2 is free and cannot be published"):
        pool.publish(2, A)
    pool.allocate(2)
    pool.publish(0, A)
    with pytest.raises(EngineError, match=f"published as {B.hex()} and is published as {A.hex()}"):
        pool.publish(0, B)
    for not_published in (1, 2):
        with pytest.raises(EngineError, match=f"block {not_published} is not published and cannot be adopted"):
            pool.adopt([0, not_published])
    for call in (lambda: pool.publish(3, B), lambda: pool.adopt([0, 3]), lambda: pool.is_unreferenced(-1)):
        with pytest.raises(EngineError, match=r"does not exist; the pool has blocks 0\.\.2"):
            call()
    assert (pool.references(0), pool.match([A, B]), pool.num_adopted) == (1, [0], 0)
    pool.check_integrity([[0, 1]])


def test_a_block_is_not_published_any_more_once_it_may_be_written():
    pool = BlockPool(3)
    table = np.array(pool.allocate(1), np.int32)
    assert pool.has_one_writer(0)
    pool.publish(0, A)
    assert not pool.has_one_writer(0)
    assert pool.writable(table, 0) == 0
    assert (pool.match([A]), pool.has_one_writer(0)) == ([], True)


def test_a_shared_published_block_stays_published_and_its_writer_gets_another():
    pool = BlockPool(3)
    table = np.array(pool.allocate(1), np.int32)
    pool.publish(0, A)
    pool.adopt(pool.match([A]))
    assert pool.writable(table, 0) == 1
    assert (pool.match([A]), pool.references(0), pool.has_one_writer(1)) == ([0], 1, True)
    pool.check_integrity([[0], table])


def test_the_integrity_check_finds_damaged_books_of_the_cache():
    def damaged(change) -> BlockPool:
        pool = cached(3, A, B)
        change(pool._cache)
        return pool

    for change, message in (
        (lambda cache: cache._hash_of.pop(0), "under a hash that is not its own"),
        (lambda cache: cache._block_of.update({A: 1}), "under a hash that is not its own"),
        (lambda cache: cache._idle.update({2: None}), "block 2 is kept for its content and is not published"),
        (lambda cache: cache._idle.pop(1), "block 1 is in the list of free blocks wrongly"),
    ):
        with pytest.raises(EngineError, match=message):
            damaged(change).check_integrity([])
    pool = cached(3, A, B)
    pool._free.append(0)
    with pytest.raises(EngineError, match="block 0 is in the list of free blocks wrongly"):
        pool.check_integrity([])


NUM_BLOCKS = 7
HASHES = [bytes([number]) * 16 for number in range(6)]


class PoolMachine(RuleBasedStateMachine):
    """The pool beside a model: which tables name which blocks, what is published, and the cached
    blocks as a list in the order of their last use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.entries: list[int] = []
        self.published: dict[bytes, int] = {}
        self.idle: list[int] = []
        self.evicted = 0

    def drop_hash(self, block: int) -> None:
        self.published = {block_hash: found for block_hash, found in self.published.items() if found != block}

    def evict_for(self, count: int) -> list[int]:
        """Evicts what an allocation of `count` blocks has to."""
        plain = NUM_BLOCKS - len(set(self.entries)) - len(self.idle)
        evicted = self.idle[: max(count - plain, 0)]
        for block in evicted:
            self.drop_hash(block)
        del self.idle[: len(evicted)]
        self.evicted += len(evicted)
        return evicted

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        free = NUM_BLOCKS - len(set(self.entries))
        taken = self.pool.allocate(count)
        assert (taken is None) == (count > free)
        if taken is None:
            return
        assert not set(taken) & set(self.entries)
        evicted = self.evict_for(count)
        assert taken[count - len(evicted) :] == evicted, "cached blocks come last, in the order of use"
        self.entries += taken

    @rule(number=st.integers(0, 20), block_hash=st.sampled_from(HASHES))
    @precondition(lambda self: self.entries)
    def publish(self, number: int, block_hash: bytes) -> None:
        block = self.entries[number % len(self.entries)]
        if any(found == block and former != block_hash for former, found in self.published.items()):
            with pytest.raises(EngineError, match="is published as"):
                self.pool.publish(block, block_hash)
            return
        is_the_one = self.published.setdefault(block_hash, block) == block
        assert self.pool.publish(block, block_hash) == is_the_one

    @rule(hashes=st.lists(st.sampled_from(HASHES), max_size=3, unique=True))
    def adopt_what_matches(self, hashes: list[bytes]) -> None:
        found = self.pool.match(hashes)
        assert found == [self.published[one] for one in hashes[: len(found)]]
        assert len(found) == len(hashes) or hashes[len(found)] not in self.published
        free, unreferenced = self.pool.num_free, sum(self.pool.is_unreferenced(block) for block in found)
        self.pool.adopt(found)
        assert self.pool.num_free == free - unreferenced
        self.entries += found
        self.idle = [block for block in self.idle if block not in found]

    @rule(number=st.integers(0, 20))
    @precondition(lambda self: self.entries)
    def release(self, number: int) -> None:
        block = self.entries.pop(number % len(self.entries))
        self.pool.release([block])
        if block not in self.entries and block in self.published.values():
            self.idle.append(block)

    @rule(number=st.integers(0, 20))
    @precondition(lambda self: self.entries)
    def write(self, number: int) -> None:
        at = number % len(self.entries)
        table = np.array(self.entries, np.int32)
        block, is_shared = self.entries[at], self.entries.count(self.entries[at]) > 1
        if is_shared and self.pool.num_free == 0:
            assert self.pool.writable(table, at) is None
            return
        if is_shared:
            self.evict_for(1)
        own = self.pool.writable(table, at)
        assert self.pool.has_one_writer(own)
        assert (own == block) == (not is_shared)
        self.drop_hash(own)
        self.entries[at] = own

    @invariant()
    def the_pool_says_what_the_model_says(self) -> None:
        self.pool.check_integrity([self.entries])
        assert self.pool.num_free == NUM_BLOCKS - len(set(self.entries))
        assert (self.pool.num_cached, self.pool.num_evicted) == (len(self.idle), self.evicted)
        assert list(self.pool._cache._idle) == self.idle
        assert [self.pool.match([one]) for one in HASHES] == [
            [self.published[one]] if one in self.published else [] for one in HASHES
        ]


PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
