"""`SequenceBlocks` is what one sequence has in the paged KV cache: its table of blocks and how many
tokens are stored. Steps change it; forward/step_blocks.py plans them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dflash_moe.errors import EngineError
from dflash_moe.forward.blocks import BlockPool

# A table begins with room for so many blocks (256 tokens) and doubles when it is full.
_FIRST_ROOM = 16


class BlockCopy(NamedTuple):
    """Block `copy_to` takes the place of the shared block `copy_from` in a table. Its content must
    be copied in every layer before any layer writes.
    """

    copy_from: int
    copy_to: int


class SequenceBlocks:
    """The blocks of one sequence. Position p lies in slot `table[p // B] * B + p % B`, where B is
    the pool's `block_tokens`. Owned by the engine thread.

    Positions 0..num_tokens - 1 are stored. `reserve` makes the ones behind them writable, `keep`
    makes them count once the forward pass that wrote them is clean, and `unreserve` gives them up.

    Most steps append one token to each of many sequences, within its last block. What such a step
    calls looks at a few integers; arrays and the pool come into play where a block begins.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._block_tokens = pool.block_tokens
        self._table = np.empty(_FIRST_ROOM, np.int32)
        self._set_num_blocks(0)
        self._num_tokens = 0
        # So many blocks from the first on need not be published any more.
        self._num_published = 0
        # The open reservation; without one 0 and None. `_former_blocks` is how many blocks the
        # table had before, and `copy` has replaced the last one of these.
        self._num_reserved = 0
        self._former_blocks = 0
        self._copy: BlockCopy | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens that are stored."""
        return self._num_tokens

    @property
    def num_reserved(self) -> int:
        """The number of positions behind the stored tokens that a step is to write."""
        return self._num_reserved

    @property
    def block_table(self) -> np.ndarray:
        """The blocks as int32 [num_blocks], for reading: a view, valid until the sequence
        changes.
        """
        return self._view

    def slot_mapping(self, first: int, count: int) -> np.ndarray:
        """Returns the slots of the positions first..first + count - 1, as int64 [count]. They must
        be stored or reserved.
        """
        if not (first >= 0 and count >= 0 and first + count <= self._num_tokens + self._num_reserved):
            asked = f"the slots of positions {first}..{first + count - 1} were asked for"
            raise EngineError(f"{asked}; {self._num_tokens} tokens are stored and {self._num_reserved} reserved")
        slots: list[int] = []
        self._append_slots(slots, first, count)
        return np.array(slots, np.int64)

    def rows(self) -> tuple[np.ndarray, int, int]:
        """Returns what is reserved as `_core.AttentionPlan` takes it: the block table, the first
        position and the number of rows.
        """
        return self._view, self._num_tokens, self._num_reserved

    def append_rows(self, slots: list[int], positions: list[int]) -> tuple[np.ndarray, int, int]:
        """Appends the slots and the positions of what is reserved to those of a step. Returns
        `rows`.
        """
        first, count = self._num_tokens, self._num_reserved
        self._append_slots(slots, first, count)
        positions.extend(range(first, first + count))
        return self.rows()

    @property
    def held_blocks(self) -> tuple[int, ...]:
        """The shared blocks that copies have replaced in the table. They stay referenced until the
        reservation ends, because it may end by putting them back.
        """
        return () if self._copy is None else (self._copy.copy_from,)

    def blocks_needed(self, count: int, released: Iterable[SequenceBlocks] = ()) -> int:
        """Returns how many free blocks `reserve(count)` would take once the sequences `released`
        are: new ones at the end, and one for a copy where the last block is shared and not full.
        What other sequences of the step reserve does not change it (`BlockPool` says what else
        may).
        """
        return self._blocks_for(self._num_tokens + count) - self._num_blocks + self._shares_what_it_writes(released)

    def reserve(self, count: int) -> bool:
        """Makes the `count` positions behind the stored tokens writable: allocates blocks at the
        end, and takes a copy of the last block where it is not full and other sequences name it too
        (`copy`). A last block that is published and not shared is not published any more.

        Returns False, and has changed nothing, where the pool has too few free blocks.
        """
        self._check_idle("reserve")
        if count < 1:
            raise EngineError(f"{count} positions were to be reserved; a step writes at least 1 token of a sequence")
        self._former_blocks = self._num_blocks
        room = self._num_blocks * self._block_tokens - self._num_tokens
        if (count > room or not self._pool.has_one_writer(self._table.item(self._num_blocks - 1))) and not self._take(count):
            return False
        self._num_reserved = count
        return True

    @property
    def copy(self) -> BlockCopy | None:
        """The copy that the open reservation needs, if any, before any layer writes."""
        return self._copy

    def keep(self, count: int) -> None:
        """Ends a reservation after a clean forward pass: the first `count` of its positions are
        stored now, and blocks that only the others need are released.
        """
        if not 0 <= count <= self._num_reserved or self._num_reserved == 0:
            raise EngineError(f"{count} positions were to be kept; {self._num_reserved} are reserved")
        if self._copy is not None:
            self._pool.release(self.held_blocks)
        rejects = count < self._num_reserved
        self._num_tokens += count
        self._end_reservation()
        if rejects:
            self._shrink(self._blocks_for(self._num_tokens))

    def unreserve(self) -> None:
        """Ends a reservation whose forward pass failed or never ran: the table is as before."""
        if self._num_reserved == 0:
            raise EngineError("nothing is reserved that could be given up")
        copy, num_blocks = self._copy, self._former_blocks
        self._end_reservation()
        self._shrink(num_blocks)
        if copy is not None:
            self._table[num_blocks - 1] = copy.copy_from
            self._pool.release([copy.copy_to])

    def publish(self, hashes: Sequence[bytes]) -> None:
        """Publishes the blocks that are full of stored tokens, for other sequences to match. The
        hashes are those of the sequence's blocks from the first one on (`BlockHashes.hashes`);
        blocks without one wait. Takes time for what was not published before.
        """
        num_full = min(self._num_tokens // self._block_tokens, len(hashes))
        for index in range(self._num_published, num_full):
            self._pool.publish(self._table.item(index), hashes[index])
        self._num_published = max(self._num_published, num_full)

    def adopt_prefix(self, block_ids: Sequence[int]) -> None:
        """Gives an empty sequence the blocks that `BlockPool.match` found: it then stores
        `len(block_ids) * block_tokens` tokens. The last token of a prompt must be computed for its
        logits, so whoever matches leaves out the hash of a block that ends with it.
        """
        self._check_idle("adopt_prefix")
        if self._num_tokens:
            raise EngineError(f"a prefix was to be adopted behind {self._num_tokens} stored tokens; release them first")
        self._pool.adopt(block_ids)
        self._append_blocks(block_ids)
        self._num_tokens = len(block_ids) * self._block_tokens
        self._num_published = len(block_ids)

    def truncate(self, num_tokens: int) -> None:
        """Forgets all but the first `num_tokens` tokens and releases the blocks that only they
        need.
        """
        self._check_idle("truncate")
        if not 0 <= num_tokens <= self._num_tokens:
            raise EngineError(f"truncation to {num_tokens} tokens; {self._num_tokens} are stored")
        self._num_tokens = num_tokens
        self._num_published = min(self._num_published, num_tokens // self._block_tokens)
        self._shrink(self._blocks_for(num_tokens))

    def fork(self, num_tokens: int | None = None) -> SequenceBlocks:
        """Returns another sequence that shares the blocks of the first `num_tokens` tokens, by
        default of all. Whoever writes into a shared block first takes a copy.
        """
        self._check_idle("fork")
        shared = self._num_tokens if num_tokens is None else num_tokens
        if not 0 <= shared <= self._num_tokens:
            raise EngineError(f"a fork at {shared} tokens; {self._num_tokens} are stored")
        block_ids = self._table[: self._blocks_for(shared)].tolist()
        other = SequenceBlocks(self._pool)
        self._pool.fork(block_ids)
        other._append_blocks(block_ids)
        other._num_tokens = shared
        other._num_published = min(self._num_published, shared // self._block_tokens)
        return other

    def release(self) -> None:
        """Gives all blocks back: the request has ended, or is preempted and will be computed
        again from its first token.
        """
        self.truncate(0)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)

    def _append_slots(self, slots: list[int], first: int, count: int) -> None:
        position, end = first, first + count
        while position < end:
            index, offset = divmod(position, self._block_tokens)
            in_block = min(self._block_tokens - offset, end - position)
            slot = self._table.item(index) * self._block_tokens + offset
            slots.extend(range(slot, slot + in_block))
            position += in_block

    def _shares_what_it_writes(self, released: Iterable[SequenceBlocks] = ()) -> bool:
        """Says whether the next token goes into a block that another table names too, one that is
        not to be released. Only the last block can be so: it is the only one with room.
        """
        if self._num_tokens % self._block_tokens == 0:
            return False
        last = self._table.item(self._num_blocks - 1)
        return self._pool.references(last) - sum(last in one.block_table for one in released) > 1

    def _take(self, count: int) -> bool:
        """Does what `reserve` does with blocks."""
        if self.blocks_needed(count) > self._pool.num_free:
            return False
        num_blocks = self._num_blocks
        if self._num_tokens % self._block_tokens != 0:
            self._make_last_writable()
        taken = self._pool.allocate(self._blocks_for(self._num_tokens + count) - num_blocks)
        if taken is None:
            raise EngineError("the pool has run out of blocks that were counted as free")
        self._append_blocks(taken)
        return True

    def _make_last_writable(self) -> None:
        last = self._num_blocks - 1
        former = self._table.item(last)
        is_shared = self._pool.references(former) > 1
        if is_shared:
            self._pool.fork([former])
        own = self._pool.writable(self._table, last)
        if own is None:
            raise EngineError("the pool has run out of blocks that were counted as free")
        if is_shared:
            self._copy = BlockCopy(former, own)

    def _end_reservation(self) -> None:
        self._num_reserved, self._copy = 0, None

    def _append_blocks(self, block_ids: Sequence[int]) -> None:
        first, num_blocks = self._num_blocks, self._num_blocks + len(block_ids)
        if num_blocks > len(self._table):
            room = np.empty(max(num_blocks, 2 * len(self._table)), np.int32)
            room[:first] = self._table[:first]
            self._table = room
        self._table[first:num_blocks] = block_ids
        self._set_num_blocks(num_blocks)

    def _set_num_blocks(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._view = self._table[:num_blocks]
        self._view.flags.writeable = False

    def _shrink(self, num_blocks: int) -> None:
        if num_blocks < self._num_blocks:
            # Backwards, so that the next sequence to grow gets them in the same order, and so that
            # of a cached prefix its end is evicted first.
            self._pool.release(self._table[num_blocks : self._num_blocks][::-1].tolist())
            self._set_num_blocks(num_blocks)

    def _check_idle(self, verb: str) -> None:
        if self._num_reserved:
            raise EngineError(f"{verb} while a step is to write {self._num_reserved} tokens; keep or unreserve them first")


def releasable(sequences: Iterable[SequenceBlocks]) -> int:
    """Returns by how much the pool's `num_free` would grow if all these sequences of it were
    released, those of a step after their reservations. Forks share blocks, which become free with
    the last one. Changes nothing.
    """
    counted = list(set(sequences))
    entries = Counter(block_id for one in counted for block_id in (*one.block_table.tolist(), *one.held_blocks))
    return sum(counted[0]._pool.references(block_id) == count for block_id, count in entries.items())
