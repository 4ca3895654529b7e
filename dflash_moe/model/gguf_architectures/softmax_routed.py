"""The architectures whose routers take a softmax and have names of their own for the rest: OLMoE,
Phi-3.5-MoE, ERNIE 4.5 and Hunyuan.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

from dflash_moe.errors import CheckpointError
from dflash_moe.model.gguf_architectures.names import decoder_names
from dflash_moe.model.gguf_architectures.record import OUTPUT, GgufArchitecture, GgufFile, one_width


def _phimoe_fields(file: GgufFile) -> dict[str, Any]:
    return one_width(file) | {
        "attention_bias": file.has(".attn_q.bias"),
        "lm_head_bias": file.has(OUTPUT.replace("weight", "bias")),
        # Zero stands for none.
        "sliding_window": file.get("attention.sliding_window") or None,
    }


def _ernie_fields(file: GgufFile) -> dict[str, Any]:
    layers = file.layers_with("ffn_down_exps.weight")
    if not layers:
        file.expert_width()
    return {
        "moe_intermediate_size": file.expert_width(),
        "moe_layer_start_index": layers[0],
        "moe_layer_end_index": layers[-1],
        "use_bias": file.has(".attn_q.bias"),
    }


def _hunyuan_fields(file: GgufFile) -> dict[str, Any]:
    routed, shared = file.expert_width(), file.expert_width("shexp")
    if routed != shared:
        raise CheckpointError(
            f"{file.checkpoint.path}: its routed experts have width {routed} and its shared one {shared}; "
            "transformers' Hunyuan has one width"
        )
    return {"intermediate_size": routed}


ARCHITECTURES = {
    "olmoe": GgufArchitecture(
        "olmoe",
        decoder_names(),
        settings={"architectures": ["OlmoeForCausalLM"], "norm_topk_prob": False},
        keys={"num_experts": "expert_count"},
        defaults={"clip_qkv": ("attention.clamp_kqv", None)},
        fields=one_width,
    ),
    "phimoe": GgufArchitecture(
        "phimoe",
        decoder_names({"ffn_gate_inp": "mlp.router"}),
        settings={"architectures": ["PhimoeForCausalLM"]},
        keys={"num_local_experts": "expert_count"},
        fields=_phimoe_fields,
    ),
    "ernie4_5-moe": GgufArchitecture(
        "ernie4_5_moe",
        decoder_names({"exp_probs_b.bias": "mlp.gate.moe_statics.e_score_correction_bias"}, shared="mlp.shared_experts"),
        settings={"architectures": ["Ernie4_5_MoeForCausalLM"]},
        keys={"moe_num_experts": "expert_count", "moe_k": "expert_used_count"},
        defaults={
            "moe_layer_interval": ("interleave_moe_layer_step", 1),
            "moe_num_shared_experts": ("expert_shared_count", 0),
        },
        fields=_ernie_fields,
    ),
    "hunyuan-moe": GgufArchitecture(
        "hunyuan_v1_moe",
        decoder_names(
            {
                "attn_q_norm": "self_attn.query_layernorm",
                "attn_k_norm": "self_attn.key_layernorm",
                "ffn_gate_inp": "mlp.gate.wg",
            },
            shared="mlp.shared_mlp",
        ),
        settings={"architectures": ["HunYuanMoEV1ForCausalLM"]},
        keys={"num_experts": "expert_count", "moe_topk": "expert_used_count"},
        fields=_hunyuan_fields,
    ),
}
