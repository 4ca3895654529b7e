"""qwen35moe: an architecture whose conversion is transformers' own; the weights are those its own
GGUF loader makes.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import numpy as np
import pytest

from dflash_moe.model.checkpoint import Checkpoint

gguf = pytest.importorskip("gguf", reason="the gguf package is an extra of the tests")
pytest.importorskip("transformers.integrations.gguf", reason="older versions of transformers have no conversion of their own")
pytestmark = pytest.mark.transformers

H, W, E = 64, 32, 4
NUMBERS = {
    "context_length": 512, "embedding_length": H, "attention.head_count": 4, "attention.head_count_kv": 2,
    "attention.key_length": 32, "full_attention_interval": 2, "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2,
    "ssm.time_step_rank": 4, "block_count": 2, "ssm.inner_size": 64, "rope.dimension_count": 8, "expert_feed_forward_length": W,
    "expert_shared_feed_forward_length": W, "expert_count": E, "expert_used_count": 2,
}  # fmt: skip
EVERY_BLOCK = {
    "attn_norm.weight": (H,), "post_attention_norm.weight": (H,), "ffn_gate_inp.weight": (E, H),
    "ffn_gate_inp_shexp.weight": (H,), "ffn_gate_shexp.weight": (W, H), "ffn_up_shexp.weight": (W, H),
    "ffn_down_shexp.weight": (H, W), "ffn_gate_exps.weight": (E, W, H), "ffn_up_exps.weight": (E, W, H),
    "ffn_down_exps.weight": (E, H, W),
}  # fmt: skip
LINEAR_BLOCK = {
    "attn_qkv.weight": (128, H), "attn_gate.weight": (64, H), "ssm_alpha.weight": (4, H), "ssm_beta.weight": (4, H),
    "ssm_conv1d.weight": (128, 4), "ssm_norm.weight": (16,), "ssm_out.weight": (H, 64), "ssm_a": (4,), "ssm_dt.bias": (4,),
}  # fmt: skip
FULL_BLOCK = {
    "attn_q.weight": (256, H), "attn_k.weight": (64, H), "attn_v.weight": (64, H), "attn_output.weight": (H, 128),
    "attn_q_norm.weight": (32,), "attn_k_norm.weight": (32,),
}  # fmt: skip


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "qwen35moe")
    for key, value in NUMBERS.items():
        writer.add_uint32(f"qwen35moe.{key}", value)
    writer.add_float32("qwen35moe.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen35moe.rope.freq_base", 1e6)
    writer.add_array("qwen35moe.rope.dimension_sections", [2, 1, 1, 0])
    writer.add_token_list([f"token{number}" for number in range(128)])
    shapes = {"token_embd.weight": (128, H), "output.weight": (128, H), "output_norm.weight": (H,)}
    for block, own in enumerate((LINEAR_BLOCK, FULL_BLOCK)):
        shapes |= {f"blk.{block}.{name}": shape for name, shape in (EVERY_BLOCK | own).items()}
    generator = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = generator.normal(scale=0.1, size=shape).astype(np.float32)
        writer.add_tensor(name, -np.exp(values) if name.endswith("ssm_a") else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_parameter_is_made_and_experts_are_found(file):
    import torch

    from dflash_moe.integrations.host_weights import load_weights
    from dflash_moe.model.architecture import find_model_class, load_config
    from dflash_moe.model.spec import model_spec

    checkpoint = Checkpoint.open(file)
    model_class = find_model_class(load_config(checkpoint))
    model, missing = load_weights(model_class, checkpoint, has_experts=True, dtype=torch.float32)
    assert (missing, model_class.__name__) == ([], "Qwen3_5MoeForCausalLM")
    stored, made = checkpoint.values, model.state_dict()
    np.testing.assert_array_equal(made["model.layers.1.mlp.experts.down_proj"], stored("blk.1.ffn_down_exps.weight"))
    gates = made["model.layers.0.mlp.experts.gate_up_proj"][:, :W]
    np.testing.assert_array_equal(gates, stored("blk.0.ffn_gate_exps.weight"))
    np.testing.assert_allclose(made["model.norm.weight"], stored("output_norm.weight") - 1, rtol=1e-6)
    assert [(layer.name, layer.num_experts, layer.top_k) for layer in model_spec(file).layers] == [
        ("model.layers.0.mlp.experts", E, 2),
        ("model.layers.1.mlp.experts", E, 2),
    ]


def test_all_weights_are_those_of_transformers_own_loader(file):
    pytest.importorskip("accelerate", reason="transformers' own GGUF loader needs it")
    import torch

    from dflash_moe.integrations.host_weights import load_weights
    from dflash_moe.model.architecture import find_model_class, load_config

    checkpoint = Checkpoint.open(file)
    model_class = find_model_class(load_config(checkpoint))
    ours = load_weights(model_class, checkpoint, has_experts=True, dtype=torch.float32)[0].state_dict()
    theirs = model_class.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name, value in theirs.items() if not torch.equal(ours[name], value)] == []
