"""`BlockPool` counts who uses the blocks of the paged KV cache, and keeps the content of those that
nobody uses for as long as no other content needs them. A block holds the keys and values of
`block_tokens` tokens in every layer.

The pool knows numbers and no memory: every layer has its own pages, and a block has the same number
in each. Form and words are those of nano-vllm's block manager.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from dflash_moe.config import BLOCK_TOKENS
from dflash_moe.errors import ConfigError, EngineError
from dflash_moe.forward.prefix_cache import PrefixCache

# Block tables hold block ids as int32.
MAX_BLOCKS = (1 << 31) - 1


class BlockPool:
    """The blocks 0..num_blocks - 1 with a count of references each. A block without references is
    free. Owned by the engine thread: nothing here is locked.

    A full block can be published under a hash of its content. When its last reference ends it is
    free and cached: `adopt` may take it again with its content, until `allocate` needs it. A block
    is never found under the hash of a content that it no longer has: `writable` unpublishes what is
    about to change, and so does `allocate`.

    Every method either does what it says or changes nothing. Ids that are no block, and references
    that are not there, raise EngineError.

    A planner, who changes nothing, counts so. A step takes exactly as many free blocks as
      * the matched blocks without references (`is_unreferenced`), each counted once, and
      * per sequence `SequenceBlocks.blocks_needed(count)`, or ceil(count / block_tokens) for one
        that is yet to adopt what was matched,
    and it can run if that is at most `num_free` + `releasable(preempted)`. The step must then
    release first, adopt next and reserve last, because an allocation may evict what was matched.
    Two things make the count inexact.
      * A matched block that only preempted sequences name has references in the plan and none in
        the step: count it too.
      * `blocks_needed` counts a copy where another table names the last block, which is not full.
        Once the others are preempted, none is needed. And where a prefix is adopted that contains
        the last block of a sequence that was truncated into it, one more is needed.
    `reserve` returns False where a count was too low.
    """

    def __init__(self, num_blocks: int, block_tokens: int = BLOCK_TOKENS) -> None:
        if not 1 <= num_blocks <= MAX_BLOCKS:
            raise ConfigError(f"num_blocks={num_blocks} is not allowed; allowed: 1..{MAX_BLOCKS}")
        if block_tokens < 1:
            raise ConfigError(f"block_tokens={block_tokens} is not allowed; allowed: at least 1")
        self.block_tokens = block_tokens
        self._references = [0] * num_blocks
        # The last one is given out first: block 0 at the start, and later what was released last.
        # Pages are zeroed when they are first touched, so that blocks which were used before cost
        # no further memory.
        self._free = list(range(num_blocks - 1, -1, -1))
        # Blocks without references are either in `_free` or idle in the cache.
        self._cache = PrefixCache()
        self._num_adopted = 0

    @property
    def num_blocks(self) -> int:
        """The number of blocks, free or not."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """The number of blocks without references, cached or not: as many can be allocated."""
        return len(self._free) + self._cache.num_idle

    @property
    def num_cached(self) -> int:
        """The number of free blocks whose content can still be found."""
        return self._cache.num_idle

    @property
    def num_adopted(self) -> int:
        """The number of references that `adopt` has given since the start: the cache's hits."""
        return self._num_adopted

    @property
    def num_evicted(self) -> int:
        """The number of cached blocks that `allocate` took since the start."""
        return self._cache.num_evicted

    def references(self, block_id: int) -> int:
        """Returns how many table entries name the block, 0 where it is free."""
        self._check_ids((block_id,))
        return self._references[block_id]

    def is_unreferenced(self, block_id: int) -> bool:
        """Says whether the block is free, so that `adopt` would lower `num_free`."""
        return self.references(block_id) == 0

    def has_one_writer(self, block_id: int) -> bool:
        """Says whether the block has one reference and is not published, so that its one table may
        be written through without asking `writable`. The id must be one of a table.
        """
        return self._references[block_id] == 1 and not self._cache.has(block_id)

    def publish(self, block_id: int, block_hash: bytes) -> bool:
        """Makes a block findable whose tokens are all stored and committed; `block_hash` names
        them and all before them (forward/block_hashes.py). The block must be in use.

        Returns whether it is the one found under the hash: the first one stays, and to publish a
        block again changes nothing.
        """
        if self.is_unreferenced(block_id):
            raise EngineError(f"block {block_id} is free and cannot be published; publish it while a table names it")
        return self._cache.publish(block_id, block_hash)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Returns the blocks of the longest prefix of `hashes` that is published, for `adopt`.
        Changes nothing, not even what is evicted next. The ids mean these hashes until the next
        allocation or write.
        """
        return self._cache.match(hashes)

    def adopt(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to each of the blocks that `match` found, for a table that names them
        from now on. Raises EngineError for a block that is not published any more.
        """
        block_ids = list(block_ids)
        self._check_ids(block_ids)
        for block_id in block_ids:
            if not self._cache.has(block_id):
                raise EngineError(f"block {block_id} is not published and cannot be adopted; match the hashes again")
        for block_id in block_ids:
            if self._references[block_id] == 0:
                self._cache.set_used(block_id)
            self._references[block_id] += 1
        self._num_adopted += len(block_ids)

    def forget_cached(self) -> None:
        """Makes all cached blocks that no table names free, so that nobody finds them again."""
        self._free += [self._cache.evict() for _ in range(self._cache.num_idle)]

    def allocate(self, num_wanted: int) -> list[int] | None:
        """Takes free blocks and gives each its first reference: those without content to find, and
        then the least recently used cached ones. Returns None where fewer than `num_wanted` are
        free.
        """
        if num_wanted < 0:
            raise EngineError(f"{num_wanted} blocks were asked for; at least 0 can be allocated")
        if num_wanted > self.num_free:
            return None
        taken = [self._free.pop() if self._free else self._cache.evict() for _ in range(num_wanted)]
        for block_id in taken:
            self._references[block_id] = 1
        return taken

    def fork(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to each of the blocks, which must be in use, for another table that
        names them.
        """
        block_ids = list(block_ids)
        self._check_ids(block_ids)
        for block_id in block_ids:
            if self._references[block_id] == 0:
                raise EngineError(f"block {block_id} is free and cannot be forked; allocate it first")
        for block_id in block_ids:
            self._references[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Takes back a reference of each of the blocks, for a table that no longer names them. What
        loses its last reference is free, and evicted in this order if it is cached.

        A block may appear several times, as often as it has references.
        """
        block_ids = list(block_ids)
        self._check_ids(block_ids)
        for block_id, count in Counter(block_ids).items():
            if count > self._references[block_id]:
                found = self._references[block_id]
                raise EngineError(
                    f"block {block_id} is released {count} times and has {found} references; it was released twice"
                )
        for block_id in block_ids:
            self._references[block_id] -= 1
            if self._references[block_id] == 0 and not self._cache.set_idle(block_id):
                self._free.append(block_id)

    def writable(self, table: np.ndarray, index: int) -> int | None:
        """Makes `table[index]` a block that no other table names and no hash finds, so that it can
        be written: the same one, or a free one that takes its place in the table.

        `table` is int32 [num_blocks] and owned by the caller, who copies the former block's content
        into the new one before any layer writes. Returns the block's id, None where a free block is
        needed and there is none.
        """
        shared = int(table[index])
        self._check_ids((shared,))
        if self._references[shared] == 0:
            raise EngineError(f"block {shared} is free, but entry {index} of a table names it")
        if self._references[shared] == 1:
            self._cache.forget(shared)
            return shared
        own = self.allocate(1)
        if own is None:
            return None
        self._references[shared] -= 1
        table[index] = own[0]
        return own[0]

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Checks the books against all tables there are: each block has as many references as table
        entries name it, and those without are free, once, cached or not. For tests, after every
        step.
        """
        entries = Counter(int(block_id) for table in tables for block_id in table)
        self._check_ids(entries)
        for block_id, found in enumerate(self._references):
            if found != entries[block_id]:
                raise EngineError(f"block {block_id} has {found} references, and {entries[block_id]} table entries name it")
        free = Counter([*self._free, *self._cache.check_integrity()])
        expected = Counter(block_id for block_id, count in enumerate(self._references) if count == 0)
        if free != expected:
            wrong = min((free - expected) | (expected - free))
            raise EngineError(f"block {wrong} is in the list of free blocks wrongly, twice or not at all")

    def _check_ids(self, block_ids: Iterable[int]) -> None:
        # A negative index would silently mean a block from the end.
        for block_id in block_ids:
            if not 0 <= block_id < len(self._references):
                raise EngineError(f"block {block_id} does not exist; the pool has blocks 0..{len(self._references) - 1}")
