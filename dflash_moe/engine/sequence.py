"""`SequenceBlocks` is what one sequence has in the paged KV cache: its table of blocks and how many
tokens are stored. Steps change it; engine/step_blocks.py plans them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dflash_moe.engine.blocks import BlockPool
from dflash_moe.errors import EngineError

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
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._table = np.empty(_FIRST_ROOM, np.int32)
        self._num_blocks = 0
        self._num_tokens = 0
        # None: nothing is reserved. Else what `unreserve` needs to know.
        self._reserved: _Reserved | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens that are stored."""
        return self._num_tokens

    @property
    def num_reserved(self) -> int:
        """The number of positions behind the stored tokens that a step is to write."""
        return 0 if self._reserved is None else self._reserved.num_tokens

    @property
    def block_table(self) -> np.ndarray:
        """The blocks as int32 [num_blocks], for reading: a view, valid until the sequence
        changes.
        """
        view = self._table[: self._num_blocks]
        view.flags.writeable = False
        return view

    def slot_mapping(self, first: int, count: int) -> np.ndarray:
        """Returns the slots of the positions first..first + count - 1, as int64 [count]. They must
        be stored or reserved.
        """
        if not (first >= 0 and count >= 0 and first + count <= self._num_tokens + self.num_reserved):
            asked = f"the slots of positions {first}..{first + count - 1} were asked for"
            raise EngineError(f"{asked}; {self._num_tokens} tokens are stored and {self.num_reserved} reserved")
        positions = np.arange(first, first + count, dtype=np.int64)
        at, offset = np.divmod(positions, self._pool.block_tokens)
        return self._table[at].astype(np.int64) * self._pool.block_tokens + offset

    @property
    def held_blocks(self) -> tuple[int, ...]:
        """The shared blocks that copies have replaced in the table. They stay referenced until the
        reservation ends, because it may end by putting them back.
        """
        return () if self._reserved is None or self._reserved.copy is None else (self._reserved.copy.copy_from,)

    def blocks_needed(self, count: int) -> int:
        """Returns how many free blocks `reserve(count)` would take: new ones at the end, and one
        for a copy where the last block is shared and not full.
        """
        return self._blocks_for(self._num_tokens + count) - self._num_blocks + self._shares_what_it_writes()

    def reserve(self, count: int) -> bool:
        """Makes the `count` positions behind the stored tokens writable: allocates blocks at the
        end, and takes a copy of the last block where it is not full and other sequences name it too
        (`copy`).

        Returns False, and has changed nothing, where the pool has too few free blocks.
        """
        self._check_idle("reserve")
        if count < 1:
            raise EngineError(f"{count} positions were to be reserved; a step writes at least 1 token of a sequence")
        if self.blocks_needed(count) > self._pool.num_free:
            return False
        num_blocks, copy = self._num_blocks, None
        if self._shares_what_it_writes():
            shared = int(self._table[num_blocks - 1])
            self._pool.fork([shared])
            copy = BlockCopy(shared, self._own(num_blocks - 1))
        self._extend(self._blocks_for(self._num_tokens + count))
        self._reserved = _Reserved(count, num_blocks, copy)
        return True

    @property
    def copy(self) -> BlockCopy | None:
        """The copy that the open reservation needs, if any, before any layer writes."""
        return None if self._reserved is None else self._reserved.copy

    def keep(self, count: int) -> None:
        """Ends a reservation after a clean forward pass: the first `count` of its positions are
        stored now, and blocks that only the others need are released.
        """
        if self._reserved is None or not 0 <= count <= self._reserved.num_tokens:
            raise EngineError(f"{count} positions were to be kept; {self.num_reserved} are reserved")
        self._pool.release(self.held_blocks)
        self._num_tokens += count
        self._reserved = None
        self.truncate(self._num_tokens)

    def unreserve(self) -> None:
        """Ends a reservation whose forward pass failed or never ran: the table is as before."""
        if self._reserved is None:
            raise EngineError("nothing is reserved that could be given up")
        undone, self._reserved = self._reserved, None
        self._shrink(undone.num_blocks)
        if undone.copy is not None:
            self._table[undone.num_blocks - 1] = undone.copy.copy_from
            self._pool.release([undone.copy.copy_to])

    def truncate(self, num_tokens: int) -> None:
        """Forgets all but the first `num_tokens` tokens and releases the blocks that only they
        need.
        """
        self._check_idle("truncate")
        if not 0 <= num_tokens <= self._num_tokens:
            raise EngineError(f"truncation to {num_tokens} tokens; {self._num_tokens} are stored")
        self._num_tokens = num_tokens
        self._shrink(self._blocks_for(num_tokens))

    def fork(self, num_tokens: int | None = None) -> SequenceBlocks:
        """Returns another sequence that shares the blocks of the first `num_tokens` tokens, by
        default of all. Whoever writes into a shared block first takes a copy.
        """
        self._check_idle("fork")
        shared = self._num_tokens if num_tokens is None else num_tokens
        if not 0 <= shared <= self._num_tokens:
            raise EngineError(f"a fork at {shared} tokens; {self._num_tokens} are stored")
        num_blocks = self._blocks_for(shared)
        other = SequenceBlocks(self._pool)
        self._pool.fork(self._table[:num_blocks].tolist())
        other._table = self._table[: max(_FIRST_ROOM, num_blocks)].copy()
        other._num_blocks, other._num_tokens = num_blocks, shared
        return other

    def release(self) -> None:
        """Gives all blocks back: the request has ended, or is preempted and will be computed
        again from its first token.
        """
        self.truncate(0)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_tokens)

    def _shares_what_it_writes(self) -> bool:
        """Says whether the next token goes into a block that another table names too. Only the last
        block can be so: it is the only one with room.
        """
        return (
            self._num_tokens % self._pool.block_tokens != 0
            and self._pool.references(int(self._table[self._num_blocks - 1])) > 1
        )

    def _own(self, index: int) -> int:
        own = self._pool.writable(self._table, index)
        if own is None:
            raise EngineError("the pool has run out of blocks that were counted as free")
        return own

    def _extend(self, num_blocks: int) -> None:
        taken = self._pool.allocate(num_blocks - self._num_blocks)
        if taken is None:
            raise EngineError("the pool has run out of blocks that were counted as free")
        if num_blocks > len(self._table):
            room = np.empty(max(num_blocks, 2 * len(self._table)), np.int32)
            room[: self._num_blocks] = self._table[: self._num_blocks]
            self._table = room
        self._table[self._num_blocks : num_blocks] = taken
        self._num_blocks = num_blocks

    def _shrink(self, num_blocks: int) -> None:
        if num_blocks < self._num_blocks:
            # Backwards, so that the next sequence to grow gets them in the same order.
            self._pool.release(self._table[num_blocks : self._num_blocks][::-1].tolist())
            self._num_blocks = num_blocks

    def _check_idle(self, verb: str) -> None:
        if self._reserved is not None:
            raise EngineError(f"{verb} while a step is to write {self.num_reserved} tokens; keep or unreserve them first")


class _Reserved(NamedTuple):
    num_tokens: int
    num_blocks: int  # that the table had before
    copy: BlockCopy | None  # of the last one of them
