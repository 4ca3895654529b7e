"""`PrefixCache` knows under which hash a block of the KV cache can be found, and in which order the
blocks that no table names were last used. It knows no reference counts: `BlockPool` owns it, calls
it when a count begins or ends, and lets nobody else at it.

Form and words are those of nano-vllm's block manager; the order of eviction is vLLM's.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from dflash_moe.errors import EngineError


class PrefixCache:
    """The published blocks. Those that no table names are idle: they keep their content until they
    are evicted, the one that was idle first before the others.
    """

    def __init__(self) -> None:
        # Each is the other one's inverse.
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        # The one to evict first comes first. A plain dict would search its deleted entries for it.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.num_evicted = 0

    @property
    def num_idle(self) -> int:
        """The number of published blocks that no table names."""
        return len(self._idle)

    def has(self, block_id: int) -> bool:
        """Says whether the block is published."""
        return block_id in self._hash_of

    def publish(self, block_id: int, block_hash: bytes) -> bool:
        """Publishes a block that a table names. Returns whether it is the one found under the hash:
        the first one stays. Raises EngineError where it is published under another hash.
        """
        found = self._hash_of.get(block_id)
        if found is not None and found != block_hash:
            raise EngineError(
                f"block {block_id} was to be published as {block_hash.hex()} and is published as {found.hex()}; "
                "its content has changed without `writable`, or one of the hashes is of other tokens"
            )
        if self._block_of.setdefault(block_hash, block_id) != block_id:
            return False
        self._hash_of[block_id] = block_hash
        return True

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Returns the blocks of the first hashes, up to the first one that is not found. Changes
        nothing.
        """
        found = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def forget(self, block_id: int) -> None:
        """Makes a block that a table names unpublished, if it is not so already."""
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None:
            del self._block_of[block_hash]

    def set_idle(self, block_id: int) -> bool:
        """Keeps a block that no table names any more. Returns False for one that is not published,
        which the caller keeps.
        """
        if block_id not in self._hash_of:
            return False
        self._idle[block_id] = None
        return True

    def set_used(self, block_id: int) -> None:
        """Takes an idle block back because a table names it again."""
        del self._idle[block_id]

    def evict(self) -> int:
        """Forgets the block that was idle first and returns it. There must be one."""
        block_id, _ = self._idle.popitem(last=False)
        self.forget(block_id)
        self.num_evicted += 1
        return block_id

    def check_integrity(self) -> list[int]:
        """Raises EngineError where the books contradict each other. Returns the idle blocks."""
        if self._block_of != {block_hash: block_id for block_id, block_hash in self._hash_of.items()}:
            raise EngineError("the prefix cache finds a block under a hash that is not its own")
        unpublished = sorted(set(self._idle) - set(self._hash_of))
        if unpublished:
            raise EngineError(f"block {unpublished[0]} is kept for its content and is not published")
        return list(self._idle)
