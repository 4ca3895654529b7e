"""Latent heads over rows that do not lie densely, as those of a single head do, and packed as a
file stores them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest
import torch

from dflash_moe import _core
from dflash_moe.operators.latent_proof import take_latent_heads
from dflash_moe.operators.paged_attention import StoredHeads

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


def stored_module(tmp_path, kinds):
    """Returns an attention module in bf16, and keys and values of its heads in a GGUF file."""
    import numpy as np
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    from dflash_moe.model.checkpoint import Checkpoint
    from dflash_moe.model.dense_tensors import StoredLatents

    gguf = pytest.importorskip("gguf", reason="the gguf package is an extra of the tests")
    sizes = {"q_lora_rank": 32, "kv_lora_rank": 96, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 64}
    config = DeepseekV3Config(hidden_size=64, num_attention_heads=2, num_key_value_heads=2, **sizes)
    writer = gguf.GGUFWriter(str(tmp_path / "latents.gguf"), "deepseek2")
    rng = np.random.default_rng(1)
    for name, shape, kind in (("k", (2, 96, 32), kinds[0]), ("v", (2, 64, 96), kinds[1])):
        values = rng.standard_normal(shape, np.float32)
        kind = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"blk.0.attn_{name}_b.weight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = Checkpoint.open(tmp_path / "latents.gguf")
    formats = tuple(kind.lower() for kind in kinds)
    latents = StoredLatents(checkpoint, "blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight", formats)
    module = DeepseekV3Attention(config, 0).to(torch.bfloat16)
    with torch.no_grad():
        module.kv_b_proj.weight.copy_(torch.from_numpy(latents.joined()))
    return module, latents


@pytest.mark.parametrize("kinds", [("Q8_0", "Q4_0"), ("Q4_0", "Q8_0")])
def test_heads_are_packed_as_a_file_stores_them(tmp_path, kinds):
    module, latents = stored_module(tmp_path, kinds)
    stored = StoredHeads(latents, ("f32-canonical", "f32-canonical"))
    heads, reason = take_latent_heads(POOL, module, "f32-canonical", stored)
    assert reason == ""
    assert (heads.keys.formats[0], heads.values.formats[0]) == latents.formats
    # Every number is that of the file, which bf16 would have rounded.
    assert torch.equal(heads.exact().weight, torch.from_numpy(latents.joined()).double())
    assert not torch.equal(heads.exact().weight, module.kv_b_proj.weight.double())


def test_stored_heads_of_another_layer_are_refused(tmp_path):
    module, latents = stored_module(tmp_path, ("Q8_0", "Q8_0"))
    with torch.no_grad():
        module.kv_b_proj.weight.copy_(module.kv_b_proj.weight.flip(0))
    heads, reason = take_latent_heads(POOL, module, "f32-canonical", StoredHeads(latents, ("f32-canonical", "f32-canonical")))
    assert heads is None
    assert reason == "its kv_b_proj is not what the file stores for it"
