"""The architectures of Qwen, gpt-oss and MiniMax.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

from dflash_moe.model.gguf_architectures.conversions import in_turns
from dflash_moe.model.gguf_architectures.names import decoder_names
from dflash_moe.model.gguf_architectures.record import GgufArchitecture, GgufFile, one_width, routed_width


def _both_widths(file: GgufFile) -> dict[str, Any]:
    return routed_width(file) | {"shared_expert_intermediate_size": file.expert_width("shexp")}


def _minimax_fields(file: GgufFile) -> dict[str, Any]:
    file.check_gating("sigmoid", default="sigmoid")
    rotary_dim = file.get("rope.dimension_count")
    found = one_width(file)
    return found if rotary_dim in (None, file.get("attention.key_length")) else found | {"rotary_dim": rotary_dim}


_QWEN3 = GgufArchitecture(
    "qwen3_moe",
    decoder_names(),
    settings={"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True},
    keys={"num_experts": "expert_count"},
)

ARCHITECTURES = {
    "qwen2moe": GgufArchitecture(
        "qwen2_moe",
        decoder_names({"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}, shared="mlp.shared_expert"),
        settings={"architectures": ["Qwen2MoeForCausalLM"], "norm_topk_prob": False},
        keys={"num_experts": "expert_count"},
        fields=_both_widths,
    ),
    "qwen3moe": _QWEN3,
    # Without images this is Qwen3-MoE: no deep features are added, and the three positions of a
    # token are the same. transformers has no class of the text model with a head.
    "qwen3vlmoe": _QWEN3,
    "minimax-m2": GgufArchitecture(
        "minimax_m2",
        decoder_names({"exp_probs_b.bias": "mlp.e_score_correction_bias"}),
        settings={"architectures": ["MiniMaxM2ForCausalLM"]},
        keys={"num_local_experts": "expert_count"},
        fields=_minimax_fields,
    ),
    "gpt-oss": GgufArchitecture(
        "gpt_oss",
        decoder_names(
            {
                "post_attention_norm": "post_attention_layernorm",
                "attn_sinks.weight": "self_attn.sinks",
                "ffn_gate_inp": "mlp.router",
                "ffn_down_exps.weight": "",
                "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
            }
        ),
        settings={"architectures": ["GptOssForCausalLM"]},
        keys={"num_local_experts": "expert_count", "sliding_window": "attention.sliding_window"},
        fields=one_width,
        converters=in_turns,
    ),
}
