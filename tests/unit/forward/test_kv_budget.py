"""How many blocks the memory of the KV cache pays for, and what is refused.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

from dflash_moe.config import MemoryBudget, Settings
from dflash_moe.errors import ConfigError
from dflash_moe.forward import kv_budget
from dflash_moe.forward.blocks import MAX_BLOCKS
from dflash_moe.forward.kv_budget import KvShape, block_bytes, kv_blocks, most_blocks

GIB = 1 << 30


def test_a_block_takes_its_tokens_keys_and_values_in_every_layer():
    layers = [KvShape(2, 128, 128)] * 12
    assert block_bytes(layers, "bf16") == 12 * 16 * 2 * (128 + 128) * 2
    assert block_bytes(layers, "f32") == 2 * block_bytes(layers, "f16")
    assert block_bytes([KvShape(1, 576, 512), KvShape(8, 64, 32)], "f32", 4) == 4 * 4 * (1088 + 768)


def test_a_percentage_is_one_of_what_is_free_and_an_amount_is_itself():
    assert kv_blocks(MemoryBudget(fraction=0.25), 1000, free_bytes=8999) == 2
    assert kv_blocks(MemoryBudget(3999), 1000, free_bytes=8999) == 3
    assert kv_blocks(MemoryBudget(fraction=1.0), 1000, free_bytes=8000) == 8
    assert kv_blocks(MemoryBudget(1 << 50), 16, free_bytes=1 << 50) == MAX_BLOCKS


def test_free_memory_is_what_the_control_group_leaves(monkeypatch):
    monkeypatch.setattr(kv_budget, "memory_available", lambda: 4 * GIB)
    assert kv_blocks(Settings().kv_memory, 1 << 20) == 1024


def test_more_than_is_free_is_refused_before_any_page_is_touched():
    with pytest.raises(ConfigError, match=r"engine.kv_memory: 8.0 GiB were asked for, and 3.0 GiB are free after the weights"):
        kv_blocks(MemoryBudget(8 * GIB), 1 << 20, free_bytes=3 * GIB)


def test_a_budget_below_one_block_is_refused_with_both_numbers():
    with pytest.raises(
        ConfigError, match=r"kv_memory: 25% of 1.0 MiB free after the weights: 256.0 KiB are less .*, 1.0 MiB; "
    ):
        kv_blocks(MemoryBudget(fraction=0.25), 1 << 20, free_bytes=1 << 20)
    with pytest.raises(
        ConfigError, match=r"^engine.kv_memory: 15 bytes are less than one block of the KV cache takes, 16 bytes"
    ):
        kv_blocks(MemoryBudget(15), 16, free_bytes=GIB)


def test_a_longest_context_bounds_the_blocks_by_what_all_requests_can_take():
    assert most_blocks(None, 64) == MAX_BLOCKS
    assert most_blocks(100, 64) == 64 * 7
    assert most_blocks(1 << 24, 4096) == MAX_BLOCKS
    # Fewer would not prove that rows do not depend on their batch.
    assert most_blocks(16, 1) == 64
    assert kv_blocks(MemoryBudget(GIB), 1 << 10, free_bytes=GIB, most=most_blocks(100, 64)) == 448
