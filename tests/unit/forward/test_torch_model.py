"""What a model with torch's operators gets of its device: blocks and a gather buffer within one
budget, and nothing that mixes devices or waits for a card.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.models.families import tiny_options
from dflash_moe.config import BLOCK_TOKENS, MemoryBudget
from dflash_moe.errors import ConfigError
from dflash_moe.forward import torch_model
from dflash_moe.forward.forward import StepRows
from dflash_moe.forward.kv_budget import KvShape
from dflash_moe.forward.rotary_tables import RotaryTables
from dflash_moe.forward.torch_cache import TorchCache
from dflash_moe.forward.torch_model import page_torch_model, split_budget
from dflash_moe.model.architecture import find_model_class
from dflash_moe.model.make import build_config
from dflash_moe.operators import attention_probe

FREE = 1 << 30


@pytest.mark.parametrize("max_tokens", [0, 1, 100, 4096, 10**9])
@pytest.mark.parametrize(("per_block", "gathered"), [(4096, 64), (4096, 4096), (1 << 20, 100)])
def test_blocks_and_buffer_share_the_budget(per_block, gathered, max_tokens):
    budget = MemoryBudget(num_bytes=8 << 20)
    num_blocks, max_keys = split_budget(budget, FREE, per_block, gathered, max_tokens)
    room = num_blocks * BLOCK_TOKENS
    assert num_blocks >= 1
    assert num_blocks * per_block + max_keys * gathered <= 8 << 20
    # The longest sequence fits, and not one block more would.
    assert max_keys >= min(room, max_tokens or room)
    more = (num_blocks + 1) * BLOCK_TOKENS
    longest = min(more, -(-max_tokens // BLOCK_TOKENS) * BLOCK_TOKENS or more)
    assert (num_blocks + 1) * per_block + longest * gathered > 8 << 20


def test_a_share_is_one_of_the_devices_memory():
    whole, _ = split_budget(MemoryBudget(fraction=0.5), FREE, 1 << 16, 64, 0)
    half, _ = split_budget(MemoryBudget(fraction=0.25), FREE, 1 << 16, 64, 0)
    assert whole - 2 * half in (0, 1)
    with pytest.raises(ConfigError, match="less than one block"):
        split_budget(MemoryBudget(num_bytes=1000), FREE, 1000, 1, 0)


def test_memory_that_a_device_does_not_give_is_a_typed_error():
    with pytest.raises(ConfigError, match=r"engine\.kv_memory: cpu has no room for .* 1000 tokens"):
        TorchCache([KvShape(64, 1024, 1024)], 1 << 31, 1000, torch.float32, torch.device("cpu"))


class _Zeros:
    """Stands in for the route of routed experts."""

    def call(self, hidden_states: Any, topk_ids: Any, topk_weights: Any) -> Any:
        assert hidden_states.device == topk_ids.device == topk_weights.device
        return torch.zeros_like(hidden_states)


@pytest.mark.transformers
@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_step_mixes_no_devices_and_waits_for_no_value(monkeypatch, arch):
    """The meta device refuses operands of another one, and has no values that anybody could ask
    for. Only loading looks at values.
    """
    from dflash_moe.integrations import transformers as integration
    from dflash_moe.model.architecture import find_experts

    monkeypatch.setattr(RotaryTables, "_looks_at_others", lambda _tables: False)
    monkeypatch.setattr(attention_probe._Mask, "window", lambda _mask, _module, told, *_arguments: told)
    monkeypatch.setattr(torch_model, "_free_bytes", lambda _device: FREE)
    config = build_config(tiny_options(arch))
    with torch.device("meta"):
        model = find_model_class(config)._from_config(config, dtype=torch.bfloat16).eval()
    for module in find_experts(model).values():
        module.__dict__[integration._ROUTE] = _Zeros()
        module.config._experts_implementation_internal = integration.IMPLEMENTATION
    packed, report = page_torch_model(model, "a test", kv_memory=MemoryBudget(num_bytes=4 << 20))
    assert packed is not None, report.lines()
    counts = (60, 3, 2, 30)
    sequences = [packed.admit(100) for _ in counts]
    packed.forward([StepRows(sequence, [1] * count) for sequence, count in zip(sequences, counts, strict=True)])
    sequences.append(sequences[0].fork())
    for count in (3, 1):
        logits = packed.forward([StepRows(sequence, [1] * count, count) for sequence in sequences])
        assert (logits.device.type, logits.dtype, len(logits)) == ("meta", torch.float32, 5 * count)
