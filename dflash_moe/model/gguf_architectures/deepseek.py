"""The architectures of DeepSeek, and those whose experts are routed as its are: GLM-4.5, dots1,
EXAONE and AFMoE.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

from dflash_moe.model.gguf_architectures.conversions import gate_above_up, joined_latents
from dflash_moe.model.gguf_architectures.names import decoder_names
from dflash_moe.model.gguf_architectures.record import GgufArchitecture, GgufFile

# AFMoE attends to all tokens in every fourth layer, where the file does not say which layers do.
_AFMOE_PERIOD = 4

_CORRECTION = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_GROUPS = {"n_group": ("expert_group_count", 1), "topk_group": ("expert_group_used_count", 1)}
_DENSE_FIRST = {"first_k_dense_replace": ("leading_dense_block_count", 0)}
_SHARED = {"n_shared_experts": "expert_shared_count"}
_WEIGHTS = {"routed_scaling_factor": ("expert_weights_scale", 1.0), "norm_topk_prob": ("expert_weights_norm", False)}


def _latent_fields(file: GgufFile) -> dict[str, Any]:
    """Returns the sizes of MLA. Files for absorbed attention have those of its heads apart."""
    if (temperature := file.get("attention.temperature_scale")) is not None:
        raise file.refusal("attention.temperature_scale", temperature, "transformers' DeepSeek has no such scale")
    ending = "_mla" if file.get("attention.key_length_mla") is not None else ""
    rope = file.value("rope.dimension_count")
    is_v3 = file.has(".exp_probs_b.bias") or file.get("expert_gating_func") == 2
    found: dict[str, Any] = {
        "num_key_value_heads": file.value("attention.head_count"),
        "head_dim": rope,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": file.value(f"attention.key_length{ending}") - rope,
        "v_head_dim": file.value(f"attention.value_length{ending}"),
        "moe_intermediate_size": file.expert_width(),
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
    }
    if not is_v3:
        file.check_gating("softmax", default="softmax")
        found["topk_method"] = "group_limited_greedy" if file.get("expert_group_count", 1) > 1 else "greedy"
    return found


def _latent_converters(config: Any) -> list[Any]:
    return [*gate_above_up(config), *joined_latents()]


def _sigmoid_fields(file: GgufFile) -> dict[str, Any]:
    file.check_gating("sigmoid", default="sigmoid")
    return {"moe_intermediate_size": file.expert_width()}


def _glm_fields(file: GgufFile) -> dict[str, Any]:
    head_dim = file.get("attention.key_length") or file.value("embedding_length") // file.value("attention.head_count")
    return _sigmoid_fields(file) | {
        "partial_rotary_factor": file.get("rope.dimension_count", head_dim) / head_dim,
        "use_qk_norm": file.has(".attn_q_norm.weight"),
        "attention_bias": file.has(".attn_q.bias"),
    }


def _exaone_fields(file: GgufFile) -> dict[str, Any]:
    return _sigmoid_fields(file) | _layer_types(file, file.value("attention.sliding_window_pattern"))


def _afmoe_fields(file: GgufFile) -> dict[str, Any]:
    if file.get("expert_weights_norm") is False:
        raise file.refusal("expert_weights_norm", False, "transformers' AFMoE norms the weights of experts")
    default = [number % _AFMOE_PERIOD != _AFMOE_PERIOD - 1 for number in range(file.num_layers())]
    return _sigmoid_fields(file) | _layer_types(file, file.get("attention.sliding_window_pattern", default))


def _layer_types(file: GgufFile, pattern: Any) -> dict[str, Any]:
    """Returns the kinds of attention by layer, of a list or of the period of layers that attend to
    all tokens.
    """
    count = file.num_layers()
    if type(pattern) is int:
        pattern = [number % pattern != pattern - 1 for number in range(count)]
    return {"layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in pattern[:count]]}


ARCHITECTURES = {
    "deepseek2": GgufArchitecture(
        "deepseek_v2",
        decoder_names(
            {
                **_CORRECTION,
                "attn_q_a": "self_attn.q_a_proj",
                "attn_q_a_norm": "self_attn.q_a_layernorm",
                "attn_q_b": "self_attn.q_b_proj",
                "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
                "attn_kv_a_norm": "self_attn.kv_a_layernorm",
                "attn_kv_b": "self_attn.kv_b_proj",
            },
            shared="mlp.shared_experts",
        ),
        settings={"num_nextn_predict_layers": 0},
        keys={**_SHARED, "n_routed_experts": "expert_count", "kv_lora_rank": "attention.kv_lora_rank"},
        defaults={**_GROUPS, **_DENSE_FIRST, **_WEIGHTS, "q_lora_rank": ("attention.q_lora_rank", None)},
        fields=_latent_fields,
        converters=_latent_converters,
        # Older files have one matrix that expands latents, which is cut into heads.
        remade=frozenset({"attn_kv_b"}),
    ),
    "glm4moe": GgufArchitecture(
        "glm4_moe",
        decoder_names({**_CORRECTION, "post_attention_norm": "post_attention_layernorm"}, shared="mlp.shared_experts"),
        settings={"architectures": ["Glm4MoeForCausalLM"], "num_nextn_predict_layers": 0},
        keys={**_SHARED, "n_routed_experts": "expert_count"},
        defaults={**_GROUPS, **_DENSE_FIRST, **_WEIGHTS},
        fields=_glm_fields,
    ),
    "dots1": GgufArchitecture(
        "dots1",
        decoder_names(_CORRECTION, shared="mlp.shared_experts"),
        settings={"architectures": ["Dots1ForCausalLM"], "sliding_window": None},
        keys={**_SHARED, "n_routed_experts": "expert_count"},
        defaults={**_GROUPS, **_DENSE_FIRST, **_WEIGHTS},
        fields=_sigmoid_fields,
    ),
    "exaone-moe": GgufArchitecture(
        "exaone_moe",
        decoder_names(_CORRECTION, shared="mlp.shared_experts"),
        settings={"architectures": ["ExaoneMoeForCausalLM"]},
        keys={
            "num_experts": "expert_count",
            "num_shared_experts": "expert_shared_count",
            "sliding_window": "attention.sliding_window",
        },
        defaults={**_GROUPS, **_DENSE_FIRST, **_WEIGHTS},
        fields=_exaone_fields,
    ),
    "afmoe": GgufArchitecture(
        "afmoe",
        decoder_names(
            {
                "post_attention_norm": "post_attention_layernorm",
                "ffn_norm": "pre_mlp_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
                "attn_gate": "self_attn.gate_proj",
                "ffn_gate_inp": "mlp.router.gate",
                "exp_probs_b.bias": "mlp.expert_bias",
            },
            shared="mlp.shared_experts",
        ),
        # llama.cpp always multiplies embeddings by the root of their width.
        settings={"architectures": ["AfmoeForCausalLM"], "mup_enabled": True},
        keys={
            "num_experts": "expert_count",
            "num_shared_experts": "expert_shared_count",
            "sliding_window": "attention.sliding_window",
        },
        defaults={"num_dense_layers": ("leading_dense_block_count", 0), "route_scale": ("expert_weights_scale", 1.0)},
        fields=_afmoe_fields,
    ),
}
