"""Pages full of random keys and values for `attention`, and the sequences that are cut out of
them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from dflash_moe import _core
from dflash_moe.config import BLOCK_TOKENS
from dflash_moe.experts.tensors import ITEM_BYTES

# So many tokens are appended at once while the pages are filled.
FILLED_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one layer; keys and values have `head_size` numbers each. There are pages for
    `num_layers` such layers.
    """

    num_heads: int = 8
    num_kv_heads: int = 2
    head_size: int = 128
    num_layers: int = 12

    def token_bytes(self, kv_dtype: str) -> int:
        """Returns the bytes of the keys and values of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_size * ITEM_BYTES[kv_dtype]

    def operations(self, rows: int, context: int) -> int:
        """Returns the floating-point operations of the last `rows` of `context` tokens in one
        layer: a multiply-add for each number of every visible key and value.
        """
        visible = rows * context - rows * (rows - 1) // 2
        return 2 * 2 * self.num_heads * self.head_size * visible


@dataclass(frozen=True, slots=True)
class Rows:
    """Random rows [num_rows, width] in a dtype of the core. NumPy has no bf16; its bits are
    uint16.
    """

    array: Any
    dtype: str

    @classmethod
    def random(cls, num_rows: int, width: int, dtype: str, seed: int) -> Rows:
        """Draws them with deviation 1."""
        values = np.random.default_rng(seed).standard_normal((num_rows, width), dtype=np.float32)
        if dtype == "bf16":
            return cls((values.view(np.uint32) >> 16).astype(np.uint16), dtype)
        return cls(values.astype(np.float16 if dtype == "f16" else np.float32), dtype)

    @property
    def described(self) -> tuple[int, int, str]:
        """Address, bytes from row to row, and dtype, as operators take them."""
        return self.array.ctypes.data, self.array.strides[0], self.dtype


class LayerStack:
    """The pages of all layers, each for `num_tokens` tokens, written once."""

    def __init__(self, shape: AttentionShape, kv_dtype: str, num_tokens: int, seed: int = 0) -> None:
        self.shape, self.kv_dtype, self.num_tokens = shape, kv_dtype, num_tokens
        sizes = (shape.num_kv_heads, shape.head_size, shape.head_size, kv_dtype)
        self.layers = [_core.KvLayer(-(-num_tokens // BLOCK_TOKENS), *sizes) for _ in range(shape.num_layers)]
        count = min(FILLED_AT_ONCE, num_tokens)
        keys = Rows.random(count, shape.num_kv_heads * shape.head_size, kv_dtype, seed)
        values = Rows.random(count, shape.num_kv_heads * shape.head_size, kv_dtype, seed + 1)
        for first in range(0, num_tokens, count):
            slots = np.arange(first, min(first + count, num_tokens), dtype=np.int64)
            for layer in self.layers:
                layer.append(slots.ctypes.data, len(slots), *keys.described, *values.described)

    def steps(self, rows: int, context: int) -> Iterator[tuple[_core.KvLayer, _core.AttentionPlan]]:
        """Yields without end the steps of the last `rows` of `context` tokens: one sequence after
        another, each in all layers, so that a page is read again only after all others.
        """
        blocks = -(-context // BLOCK_TOKENS)
        tables = np.arange(self.num_tokens // BLOCK_TOKENS // blocks * blocks, dtype=np.int32).reshape(-1, blocks)
        plans = [_core.AttentionPlan([(table, context - rows, rows)]) for table in tables]
        return cycle([(layer, plan) for plan in plans for layer in self.layers])
