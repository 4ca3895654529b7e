"""Translates GGUF models to what transformers knows: the metadata to a configuration, and the names
of the tensors to its own.

GGUF has the names of llama.cpp, so that this is the one place that knows architectures by name. It
uses the tables of transformers where there are any, and its own for architectures whose experts the
older reader of transformers would widen all at once.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_moe.errors import CheckpointError, UnsupportedError
from dflash_moe.model.config_limits import check_counts
from dflash_moe.model.refusals import refusing

if TYPE_CHECKING:
    from dflash_moe.model.checkpoint import Checkpoint

# This number stands for a sigmoid router in the metadata that llama.cpp writes.
_SIGMOID = 2
_EMBEDDING = "token_embd.weight"
_OUTPUT = "output.weight"

# Each configuration field is read from this metadata key below the architecture's name.
_COMMON_FIELDS = {
    "max_position_embeddings": "context_length",
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "num_experts_per_tok": "expert_used_count",
}
_OPTIONAL_FIELDS = {"intermediate_size": "feed_forward_length", "head_dim": "attention.key_length"}

# Tensor names begin with llama.cpp's words on the left, and with transformers' module names on the
# right.
_DECODER_NAMES = (
    (r"^token_embd\.", "model.embed_tokens."),
    (r"^output_norm\.", "model.norm."),
    (r"^output\.", "lm_head."),
    (r"^blk\.", "model.layers."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attn_q\.", ".self_attn.q_proj."),
    (r"\.attn_k\.", ".self_attn.k_proj."),
    (r"\.attn_v\.", ".self_attn.v_proj."),
    (r"\.attn_output\.", ".self_attn.o_proj."),
    (r"\.attn_q_norm\.", ".self_attn.q_norm."),
    (r"\.attn_k_norm\.", ".self_attn.k_norm."),
)
_QWEN_NAMES = (
    *_DECODER_NAMES,
    (r"\.ffn_gate\.", ".mlp.gate_proj."),
    (r"\.ffn_up\.", ".mlp.up_proj."),
    (r"\.ffn_down\.", ".mlp.down_proj."),
    (r"\.ffn_gate_inp\.", ".mlp.gate."),
    (r"\.ffn_gate_inp_shexp\.", ".mlp.shared_expert_gate."),
    (r"\.ffn_gate_shexp\.", ".mlp.shared_expert.gate_proj."),
    (r"\.ffn_up_shexp\.", ".mlp.shared_expert.up_proj."),
    (r"\.ffn_down_shexp\.", ".mlp.shared_expert.down_proj."),
    (r"\.ffn_down_exps\.weight", ".mlp.experts.down_proj"),
)
_MINIMAX_NAMES = (*_QWEN_NAMES, (r"\.exp_probs_b\.bias", ".mlp.e_score_correction_bias"))
_GPT_OSS_NAMES = (
    *_DECODER_NAMES,
    (r"\.post_attention_norm\.", ".post_attention_layernorm."),
    (r"\.attn_sinks\.weight", ".self_attn.sinks"),
    (r"\.ffn_gate_inp\.", ".mlp.router."),
    (r"\.ffn_down_exps\.bias", ".mlp.experts.down_proj_bias"),
)


@dataclass(frozen=True, slots=True)
class _Family:
    """What metadata cannot say of an architecture: the model type in transformers, the settings
    that llama.cpp has in its code, the names, and the layout of experts.
    """

    model_type: str
    settings: dict[str, Any]
    fields: Callable[[Checkpoint, str], dict[str, Any]]
    names: tuple[tuple[str, str], ...]
    converters: Callable[[], list[Any]]


def gguf_config(checkpoint: Checkpoint) -> Any:
    """Returns the transformers configuration of a GGUF checkpoint. Raises UnsupportedError naming
    the architecture, and CheckpointError naming a missing key.
    """
    from transformers import AutoConfig

    metadata = checkpoint.config()
    name = metadata["general.architecture"]
    check_counts(metadata, f"{checkpoint.path}: metadata")
    with refusing(f"{checkpoint.path}: its metadata is not that of a {name} model", CheckpointError):
        try:
            settings = _settings(checkpoint, name, metadata)
        except KeyError as error:
            raise CheckpointError(f"{checkpoint.path}: metadata {error} is missing, which every {name} model has") from None
    with refusing(f"{checkpoint.path}: its metadata makes no configuration"):
        return AutoConfig.for_model(settings.pop("model_type"), **settings)


def gguf_conversion(checkpoint: Checkpoint, config: Any) -> list[Any]:
    """Returns the weight transforms of transformers from the names of the file to those of the
    model.
    """
    name = checkpoint.config()["general.architecture"]
    if name in _FAMILIES:
        from transformers.core_model_loading import WeightRenaming

        family = _FAMILIES[name]
        return [*(WeightRenaming(source, target) for source, target in family.names), *family.converters()]
    return list(_transformers_tables()[1][name](config))


def _transformers_tables() -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the configurations and weight transforms by GGUF architecture. They are empty in
    versions of transformers that do not have them.
    """
    try:
        from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS
        from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS
    except ImportError:
        return {}, {}
    return dict(GGUF_CONFIG_ARCHS), dict(GGUF_ARCHS)


def _settings(checkpoint: Checkpoint, name: str, metadata: dict[str, Any]) -> dict[str, Any]:
    configs, conversions = _transformers_tables()
    if name not in _FAMILIES:
        if name not in configs or name not in conversions:
            known = ", ".join(sorted({*_FAMILIES, *(configs.keys() & conversions.keys())}))
            raise UnsupportedError(f"{checkpoint.path}: GGUF architecture {name!r} is not supported; supported: {known}")
        return dict(configs[name](metadata, tuple(checkpoint.tensors)))
    family = _FAMILIES[name]
    found = {field: metadata[f"{name}.{key}"] for field, key in _COMMON_FIELDS.items()}
    found |= {field: metadata[f"{name}.{key}"] for field, key in _OPTIONAL_FIELDS.items() if f"{name}.{key}" in metadata}
    found |= _rope_scaling(checkpoint, name, metadata)
    if _EMBEDDING not in checkpoint.tensors:
        raise CheckpointError(f"{checkpoint.path}: tensor {_EMBEDDING!r} is missing; the file is not a whole model")
    found["vocab_size"] = checkpoint.tensors[_EMBEDDING].shape[0]
    found["tie_word_embeddings"] = _OUTPUT not in checkpoint.tensors
    for field in ("eos_token_id", "bos_token_id"):
        found[field] = metadata.get(f"tokenizer.ggml.{field}")
    found["pad_token_id"] = metadata.get("tokenizer.ggml.padding_token_id")
    return found | family.settings | family.fields(checkpoint, name) | {"model_type": family.model_type}


def _rope_scaling(checkpoint: Checkpoint, name: str, metadata: dict[str, Any]) -> dict[str, Any]:
    kind = metadata.get(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return {}
    if kind not in ("yarn", "linear"):
        key = f"{name}.rope.scaling.type"
        raise UnsupportedError(f"{checkpoint.path}: metadata {key}: found {kind!r}; read are none, linear and yarn")
    scaling = {"rope_type": kind, "factor": metadata[f"{name}.rope.scaling.factor"]}
    if kind == "yarn":
        for field, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            scaling[field] = metadata.get(f"{name}.rope.scaling.yarn_{field}", default)
    if name == "gpt-oss":
        # The published code of gpt-oss sets this, and the file does not say it.
        scaling["truncate"] = False
    original = f"{name}.rope.scaling.original_context_length"
    if original in metadata:
        scaling["original_max_position_embeddings"] = metadata[original]
    return {"rope_scaling": scaling}


def _expert_width(checkpoint: Checkpoint, kind: str) -> int:
    """Returns the intermediate width of routed (`exps`) or shared (`shexp`) experts from their
    tensors, because the metadata of older files does not say it.
    """
    for name, info in checkpoint.tensors.items():
        if name.endswith(f".ffn_up_{kind}.weight") and len(info.shape) >= 2:
            return info.shape[-2]
    raise CheckpointError(f"{checkpoint.path}: has no tensor blk.N.ffn_up_{kind}.weight; it has no experts, or is damaged")


def _num_experts(checkpoint: Checkpoint, name: str) -> int:
    return int(checkpoint.config()[f"{name}.expert_count"])


def _qwen2_fields(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    widths = {"moe_intermediate_size": "exps", "shared_expert_intermediate_size": "shexp"}
    found = {field: _expert_width(checkpoint, kind) for field, kind in widths.items()}
    return found | {"num_experts": _num_experts(checkpoint, name)}


def _qwen3_fields(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    return {"moe_intermediate_size": _expert_width(checkpoint, "exps"), "num_experts": _num_experts(checkpoint, name)}


def _gpt_oss_fields(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    return {
        "intermediate_size": _expert_width(checkpoint, "exps"),
        "num_local_experts": _num_experts(checkpoint, name),
        "sliding_window": checkpoint.config()[f"{name}.attention.sliding_window"],
    }


def _minimax_fields(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    metadata = checkpoint.config()
    if (gating := metadata.get(f"{name}.expert_gating_func", _SIGMOID)) != _SIGMOID:
        key = f"{name}.expert_gating_func"
        raise UnsupportedError(
            f"{checkpoint.path}: metadata {key}: found {gating}; transformers' minimax_m2 has {_SIGMOID}, sigmoid"
        )
    found = {"intermediate_size": _expert_width(checkpoint, "exps"), "num_local_experts": _num_experts(checkpoint, name)}
    rotary_dim = metadata.get(f"{name}.rope.dimension_count")
    if rotary_dim is not None and rotary_dim != metadata.get(f"{name}.attention.key_length"):
        found["rotary_dim"] = rotary_dim
    return found


_GATE_AND_UP = [r"\.ffn_gate_exps\.weight", r"\.ffn_up_exps\.weight"]


def _qwen_converters() -> list[Any]:
    """Returns converters that put gate above up."""
    from transformers.core_model_loading import Concatenate, WeightConverter

    return [WeightConverter(_GATE_AND_UP, ".mlp.experts.gate_up_proj", [Concatenate(dim=1)])]


def _gpt_oss_converters() -> list[Any]:
    """Returns converters in which gate and up take turns along the outputs, and weights have the
    inputs first.
    """
    import torch
    from transformers.core_model_loading import ConversionOps, WeightConverter

    def tensors(inputs: dict[str, Any], patterns: list[str]) -> list[Any]:
        found = (inputs[pattern] for pattern in patterns)
        return [value[0] if isinstance(value, list) else value for value in found]

    class Interleave(ConversionOps):  # type: ignore[misc]
        def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **_more: Any) -> dict[str, Any]:
            gate, up = tensors(input_dict, source_patterns)
            return {target_patterns[0]: torch.stack([gate, up], dim=2).flatten(1, 2)}

    class InputsFirst(ConversionOps):  # type: ignore[misc]
        def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **_more: Any) -> dict[str, Any]:
            (value,) = tensors(input_dict, list(input_dict))
            return {target_patterns[0]: value.transpose(1, 2).contiguous()}

    biases = [pattern.replace("weight", "bias") for pattern in _GATE_AND_UP]
    return [
        WeightConverter(_GATE_AND_UP, ".mlp.experts.gate_up_proj", [Interleave(), InputsFirst()]),
        WeightConverter(biases, ".mlp.experts.gate_up_proj_bias", [Interleave()]),
        WeightConverter([r"\.ffn_down_exps\.weight"], ".mlp.experts.down_proj", [InputsFirst()]),
    ]


_FAMILIES = {
    "qwen2moe": _Family(
        "qwen2_moe", {"architectures": ["Qwen2MoeForCausalLM"], "norm_topk_prob": False}, _qwen2_fields, _QWEN_NAMES,
        _qwen_converters,
    ),
    "qwen3moe": _Family(
        "qwen3_moe", {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}, _qwen3_fields, _QWEN_NAMES,
        _qwen_converters,
    ),
    "minimax-m2": _Family(
        "minimax_m2", {"architectures": ["MiniMaxM2ForCausalLM"]}, _minimax_fields, _MINIMAX_NAMES, _qwen_converters,
    ),
    "gpt-oss": _Family(
        "gpt_oss", {"architectures": ["GptOssForCausalLM"]}, _gpt_oss_fields, _GPT_OSS_NAMES, _gpt_oss_converters,
    ),
}  # fmt: skip
