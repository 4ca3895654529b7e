"""What is found out of a model before anything is packed: its layers, masks that its attention's
arguments do not tell of, and parameters that others read.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from transformers.masking_utils import create_chunked_causal_mask

from bench.models.families import tiny_options
from dflash_moe import _core
from dflash_moe.model.make import build_model
from dflash_moe.operators.attention_probe import probe_attention
from dflash_moe.operators.takeover import take_over

pytestmark = pytest.mark.transformers

POOL = _core.HostPool(threads=1, isa=_core.best_isa())


def test_latents_are_found_by_what_the_cache_is_given():
    found = probe_attention(build_model(tiny_options("deepseek_v3")))
    assert [(layer.is_latent, layer.num_kv_heads, layer.key_size, layer.value_size) for layer in found.layers] == [
        (True, 1, 48, 12)
    ] * 2


def test_a_window_that_attention_is_told_of_is_paged():
    model = build_model(tiny_options("gpt_oss"))
    assert model.config.sliding_window == 128
    found = probe_attention(model)
    assert not found.refusal
    assert [layer.index for layer in found.layers] == [0, 1]


@pytest.mark.parametrize("window", [1, 21, 4096])
def test_a_window_that_only_the_mask_has_is_the_window(window):
    model = build_model(tiny_options("phimoe"))
    assert [layer.call.window for layer in probe_attention(model).layers] == [0, 0]
    model.config.sliding_window = window
    found = probe_attention(model)
    assert not found.refusal
    assert [layer.call.window for layer in found.layers] == [window, window]


def test_layers_of_one_model_may_have_windows_in_masks_of_their_own():
    model = build_model(tiny_options("qwen2_moe"), {"use_sliding_window": True, "sliding_window": 21})
    found = probe_attention(model)
    assert not found.refusal
    assert [layer.call.window for layer in found.layers] == [21, 0]


def test_a_mask_that_is_no_window_is_refused(monkeypatch):
    model = build_model(tiny_options("phimoe"), {"sliding_window": 21})
    model.config.attention_chunk_size = 21
    monkeypatch.setattr(sys.modules[type(model).__module__], "create_sliding_window_causal_mask", create_chunked_causal_mask)
    assert "PhimoeAttention: its attention is told no window, and its mask says otherwise" in probe_attention(model).refusal


def test_a_window_other_than_the_masks_is_refused():
    model = build_model(tiny_options("gpt_oss"))
    model.model.layers[0].self_attn.sliding_window = 64
    assert (
        "GptOssAttention: its attention is told sliding_window 64, and its mask says otherwise"
        in probe_attention(model).refusal
    )


def test_a_window_as_long_as_all_positions_is_no_window():
    model = build_model(tiny_options("phimoe"))
    model.config.sliding_window = model.config.max_position_embeddings
    assert not probe_attention(model).refusal


def test_a_module_whose_parameters_others_read_stays_and_runs(monkeypatch):
    model = build_model(tiny_options("mixtral", "f32"))
    kind = type(model.model.layers[0].self_attn)
    right = kind.forward

    def reads(self: Any, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        return right(self, hidden_states.to(self.q_proj.weight.dtype), *arguments, **options)

    monkeypatch.setattr(kind, "forward", reads)
    found = probe_attention(model)
    named = {f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)}
    assert found.read_modules == named
    report = take_over(model, POOL, "f32-canonical", read_modules=found.read_modules)
    assert {finding.module for finding in report.kept} == named
    assert all(type(layer.self_attn.q_proj) is torch.nn.Linear for layer in model.model.layers)
    model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
