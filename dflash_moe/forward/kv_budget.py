"""How many blocks the paged KV cache gets: the setting `engine.kv_memory` and the memory that is
free once the weights are loaded, divided by what a block takes in all layers.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dflash_moe.config import BLOCK_TOKENS, MemoryBudget, format_bytes
from dflash_moe.errors import ConfigError
from dflash_moe.experts.tensors import ITEM_BYTES
from dflash_moe.forward.blocks import MAX_BLOCKS
from dflash_moe.telemetry.machine import memory_available

# The proof that rows do not depend on their batch needs some sequences of some blocks.
LEAST_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one layer stores of a token: `num_kv_heads` keys of `key_size` numbers and as many
    values of `value_size`.
    """

    num_kv_heads: int
    key_size: int
    value_size: int

    @property
    def values_per_token(self) -> int:
        """The numbers that a token takes in this layer."""
        return self.num_kv_heads * (self.key_size + self.value_size)


def block_bytes(layers: Iterable[KvShape], kv_dtype: str, block_tokens: int = BLOCK_TOKENS) -> int:
    """Returns the bytes of one block in all layers together, stored as `kv_dtype`: f32, f16 or
    bf16.
    """
    return block_tokens * ITEM_BYTES[kv_dtype] * sum(layer.values_per_token for layer in layers)


def most_blocks(max_context: int | None, max_requests: int) -> int:
    """Returns how many blocks requests can take together that have at most `max_context` tokens
    each, where that is given, and never less than LEAST_BLOCKS.
    """
    if max_context is None:
        return MAX_BLOCKS
    return min(MAX_BLOCKS, max(LEAST_BLOCKS, max_requests * -(-max_context // BLOCK_TOKENS)))


def kv_blocks(kv_memory: MemoryBudget, bytes_per_block: int, *, free_bytes: int | None = None, most: int = MAX_BLOCKS) -> int:
    """Returns the number of blocks that `kv_memory` pays for, at most `most`; a fraction is one of
    `free_bytes`.

    `free_bytes` is by default what this process may still take of memory, its control group
    counted. Ask after the weights are loaded, because the pages come on top of them. Raises
    ConfigError where not one block fits, or more is asked for than is free: pages that are not
    there would be missed in the middle of a request.
    """
    free = memory_available() if free_bytes is None else free_bytes
    granted = kv_memory.resolve(free)
    if granted > free:
        raise ConfigError(
            f"engine.kv_memory: {format_bytes(granted)} were asked for, and {format_bytes(free)} are free after the weights; "
            "lower it, or give a percentage"
        )
    if granted < bytes_per_block:
        asked = (
            ""
            if kv_memory.fraction is None
            else f"{kv_memory.fraction * 100:g}% of {format_bytes(free)} free after the weights: "
        )
        raise ConfigError(
            f"engine.kv_memory: {asked}{format_bytes(granted)} are less than one block of the KV cache takes, "
            f"{format_bytes(bytes_per_block)}; raise it, or place fewer experts here"
        )
    return min(most, granted // bytes_per_block)
