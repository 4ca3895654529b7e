"""The architectures that llama.cpp converts as it does Llama, turning queries and keys in pairs of
neighbours: Mixtral and Granite.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

from dflash_moe.model.gguf_architectures.conversions import gate_above_up, rotated_by_halves, stacked
from dflash_moe.model.gguf_architectures.names import decoder_names
from dflash_moe.model.gguf_architectures.record import GgufArchitecture, GgufFile

# Queries and keys are turned, and so are not kept as they are stored.
_TURNED = frozenset({"attn_q", "attn_k"})
_GRANITE_EXPERTS = "block_sparse_moe.experts"


def _mixtral_fields(file: GgufFile) -> dict[str, Any]:
    file.check_gating("softmax", default="softmax")
    return {"intermediate_size": file.expert_width()}


def _mixtral_converters(config: Any) -> list[Any]:
    return [*rotated_by_halves(config), *gate_above_up(config)]


def _granite_fields(file: GgufFile) -> dict[str, Any]:
    head_dim = file.value("embedding_length") // file.value("attention.head_count")
    # llama.cpp divides scores by the root of the head's size where the file does not say otherwise.
    found = {
        "intermediate_size": file.expert_width(),
        "attention_multiplier": file.get("attention.scale") or head_dim**-0.5,
        "attention_bias": file.has(".attn_q.bias"),
    }
    if file.has(".ffn_down_shexp.weight"):
        found |= {"model_type": "granitemoeshared", "shared_intermediate_size": file.expert_width("shexp")}
        found["architectures"] = ["GraniteMoeSharedForCausalLM"]
    return found


def _granite_converters(config: Any) -> list[Any]:
    shared = stacked("ffn_gate_shexp", "ffn_up_shexp", "shared_mlp.input_linear")
    return [*rotated_by_halves(config), *gate_above_up(config, _GRANITE_EXPERTS), shared]


ARCHITECTURES = {
    "llama": GgufArchitecture(
        "mixtral",
        decoder_names(),
        settings={"architectures": ["MixtralForCausalLM"]},
        keys={"num_local_experts": "expert_count"},
        defaults={"sliding_window": ("attention.sliding_window", None)},
        fields=_mixtral_fields,
        converters=_mixtral_converters,
        remade=_TURNED,
    ),
    "granitemoe": GgufArchitecture(
        "granitemoe",
        decoder_names(
            {"ffn_gate_inp": "block_sparse_moe.router", "ffn_down_shexp": "shared_mlp.output_linear"},
            experts=_GRANITE_EXPERTS,
        ),
        settings={"architectures": ["GraniteMoeForCausalLM"]},
        keys={"num_local_experts": "expert_count", "logits_scaling": "logit_scale"},
        defaults={
            "residual_multiplier": ("residual_scale", 1.0),
            "embedding_multiplier": ("embedding_scale", 1.0),
        },
        fields=_granite_fields,
        converters=_granite_converters,
        remade=_TURNED | {"ffn_gate_shexp", "ffn_up_shexp"},
    ),
}
