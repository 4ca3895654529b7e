"""`BlockHashes` names the content of a sequence's full blocks, so that another sequence that begins
with the same tokens can find them in the prefix cache (forward/prefix_cache.py).

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b

from dflash_moe.config import BLOCK_TOKENS
from dflash_moe.errors import EngineError

# Bytes of a hash. A block found by its hash is used without a look at its tokens: two contents with
# one hash would be wrong numbers that nobody notices. So the hashes are cryptographic and have 128
# bits. Nobody can choose tokens that collide in less than about 2**64 trials, and by accident, with
# 2**32 blocks, the chance is below 2**-64. Python's own hash of integers has neither property.
HASH_BYTES = 16
# It keeps the hashes of salts apart from those of tokens.
_SALT = b"cache salt"


class BlockHashes:
    """The hashes of the full blocks of one sequence, which grows at its end.

    The hash of block i is blake2b over the hash of block i - 1 and the block's token ids as int32,
    little endian. So it names all tokens up to the block's end and not the block's alone: keys and
    values depend on all of them. The first block is chained from `seed`, which must differ where
    equal tokens have other keys and values: model, weights and numerics. `rotation` gives what a
    block's positions are rotated by, in a fixed number of bytes, where that is not the same in all
    sequences; it stands before the block's tokens.
    """

    def __init__(
        self, seed: bytes, block_tokens: int = BLOCK_TOKENS, rotation: Callable[[int], bytes] = lambda _block: b""
    ) -> None:
        self.block_tokens = block_tokens
        self._rotation = rotation
        # A seed of any length becomes one of fixed length, so that it cannot pass for tokens.
        self._last = _digest(seed)
        self._hashes: list[bytes] = []
        # The tokens behind the last full block, 4 bytes each.
        self._rest = b""

    def salted(self, salt: bytes) -> BlockHashes:
        """Returns the hashes of another sequence, still empty as this one must be, whose blocks are
        found by those with the same salt alone. An empty salt changes nothing.

        The salt enters what the first block is chained from, by a hash of its own kind: no salt can
        stand for tokens, so that none reaches the blocks of another salt or of none.
        """
        if self.num_tokens:
            raise EngineError(f"a sequence of {self.num_tokens} tokens was to be salted; salt comes before the first")
        other = self.fork()
        if salt:
            other._last = blake2b(self._last + salt, digest_size=HASH_BYTES, person=_SALT).digest()
        return other

    @property
    def hashes(self) -> Sequence[bytes]:
        """The hashes of the full blocks, for reading: it grows with the sequence."""
        return self._hashes

    @property
    def num_tokens(self) -> int:
        """The number of tokens that were appended."""
        return len(self._hashes) * self.block_tokens + len(self._rest) // 4

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens. Takes time for these alone, and for what lies behind the last full block.
        Raises EngineError, and has appended none, where one is outside int32.
        """
        try:
            content = self._rest + struct.pack(f"<{len(token_ids)}i", *token_ids)
        except struct.error as error:
            raise EngineError(f"tokens were appended of which one is no int32: {error}") from error
        size = 4 * self.block_tokens
        num_full = len(content) // size
        for begin in range(0, num_full * size, size):
            rotation = self._rotation(len(self._hashes))
            self._last = _digest(self._last + rotation + content[begin : begin + size])
            self._hashes.append(self._last)
        self._rest = content[num_full * size :]

    def fork(self) -> BlockHashes:
        """Returns the hashes of another sequence that has had the same tokens so far."""
        other = BlockHashes(b"", self.block_tokens, self._rotation)
        other._last, other._hashes, other._rest = self._last, self._hashes.copy(), self._rest
        return other


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=HASH_BYTES).digest()
