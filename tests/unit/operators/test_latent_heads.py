"""Latent heads over rows that do not lie densely, as those of a single head do.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest
import torch

from dflash_moe import _core
from dflash_moe.operators.latent_proof import take_latent_heads

pytestmark = pytest.mark.transformers

POOL = _core.HostPool(threads=1, isa=_core.best_isa())


@pytest.mark.parametrize("num_heads", [1, 2, 3])
@pytest.mark.parametrize("width", [8, 32])
def test_any_number_of_heads_is_proven(num_heads, width):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    sizes = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), width)
    config = DeepseekV3Config(hidden_size=width, num_attention_heads=num_heads, num_key_value_heads=num_heads, **sizes)
    module = DeepseekV3Attention(config, 0)
    torch.manual_seed(0)
    with torch.no_grad():
        module.kv_b_proj.weight.normal_(0.0, 0.5)
    heads, reason = take_latent_heads(POOL, module, "f32-canonical")
    assert reason == ""
    query = torch.randn(5, num_heads, 2 * width)
    nope, rotated = query.split(width, dim=-1)
    keys = module.kv_b_proj.weight.detach().view(num_heads, 2 * width, width)[:, :width]
    expected = torch.cat((torch.einsum("rhn,hnl->rhl", nope, keys), rotated), dim=-1)
    torch.testing.assert_close(heads.of_queries(query), expected, rtol=1e-4, atol=1e-5)
