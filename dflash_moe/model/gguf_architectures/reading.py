"""Reads the configuration of a GGUF model from its metadata, and says how its tensors become
parameters.

The records of this room come first, and then the tables that transformers has itself.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any

from dflash_moe.errors import CheckpointError, UnsupportedError, shown
from dflash_moe.model.config_limits import check_counts
from dflash_moe.model.gguf_architectures import deepseek, llama, qwen, softmax_routed
from dflash_moe.model.gguf_architectures.record import EMBEDDING, OUTPUT, GgufArchitecture, GgufFile
from dflash_moe.model.gguf_architectures.refused import REFUSED
from dflash_moe.model.gguf_architectures.rope import rope_scaling
from dflash_moe.model.refusals import refusing

if TYPE_CHECKING:
    from dflash_moe.model.checkpoint import Checkpoint

ARCHITECTURES: dict[str, GgufArchitecture] = {
    **qwen.ARCHITECTURES,
    **llama.ARCHITECTURES,
    **deepseek.ARCHITECTURES,
    **softmax_routed.ARCHITECTURES,
}

# Each field of a configuration is read from this metadata key below the architecture's name.
_COMMON_KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "num_experts_per_tok": "expert_used_count",
}
# The tensors of experts, in files of today and in those of old that have a tensor for each.
_EXPERTS = re.compile(r"_exps\.|\.ffn_(gate|up|down)\.\d+\.")
_OPTIONAL_KEYS = {"intermediate_size": "feed_forward_length", "head_dim": "attention.key_length"}


def gguf_config(checkpoint: Checkpoint) -> Any:
    """Returns the transformers configuration of a GGUF checkpoint, with the errors of
    `gguf_settings`.
    """
    from transformers import AutoConfig

    settings = gguf_settings(checkpoint)
    with refusing(f"{checkpoint.path}: its metadata makes no configuration"):
        return AutoConfig.for_model(settings.pop("model_type"), **settings)


def gguf_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the fields of the transformers configuration that the metadata say, `model_type`
    among them. Raises UnsupportedError naming the architecture, and CheckpointError naming a
    missing key.
    """
    metadata = checkpoint.config()
    name = metadata["general.architecture"]
    check_counts(metadata, f"{checkpoint.path}: metadata")
    refuse_dense(checkpoint)
    refuse_scaled_nvfp4(checkpoint)
    with refusing(f"{checkpoint.path}: its metadata is not that of a {name} model", CheckpointError):
        try:
            return _settings(checkpoint, name, metadata)
        except KeyError as error:
            raise CheckpointError(f"{checkpoint.path}: metadata {error} is missing, which every {name} model has") from None


def refuse_dense(checkpoint: Checkpoint) -> None:
    """Raises UnsupportedError where a GGUF file is of a model without experts. Where its
    architecture is called after experts it lacks them by a fault, which is named elsewhere.
    """
    metadata = checkpoint.config()
    name = metadata["general.architecture"]
    has_experts = metadata.get(f"{name}.expert_count") or any(_EXPERTS.search(tensor) for tensor in checkpoint.stored)
    if not has_experts and "moe" not in name:
        raise UnsupportedError(
            f"{checkpoint.path}: this {shown(name)} model is dense: it has no experts that workers could compute; llama.cpp "
            f"alone runs it, as in `llama-cli -m {checkpoint.path.name}`"
        )


def refuse_scaled_nvfp4(checkpoint: Checkpoint) -> None:
    """Raises UnsupportedError naming the first tensor in NVFP4 that has one of scales beside it.
    llama.cpp multiplies what such a tensor gives by these; no reader here does, so that the model
    would compute with wrong numbers.
    """
    for name, info in checkpoint.stored.items():
        scale = f"{name.removesuffix('.weight')}.scale"
        if info.dtype == "NVFP4" and scale in checkpoint.stored:
            raise UnsupportedError(
                f"{checkpoint.files[info.file]}: tensor {name!r} has format NVFP4 with a further scale in "
                f"{scale!r}, which is not applied here; use a file in another format"
            )


def gguf_conversion(checkpoint: Checkpoint, config: Any) -> list[Any]:
    """Returns the weight transforms of transformers from the names of the file to those of the
    model.
    """
    name = checkpoint.config()["general.architecture"]
    if name in ARCHITECTURES:
        from transformers.core_model_loading import WeightRenaming

        record = ARCHITECTURES[name]
        return [*(WeightRenaming(source, target) for source, target in record.names), *record.converters(config)]
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


def supported() -> list[str]:
    """Returns the names of all architectures that are read, in order."""
    configs, conversions = _transformers_tables()
    return sorted({*ARCHITECTURES, *(configs.keys() & conversions.keys())})


def left_out(checkpoint: Checkpoint) -> str | None:
    """Returns a sentence on the layers of a GGUF file that are no part of its model, or None."""
    metadata = checkpoint.config() if checkpoint.metadata is not None else {}
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        return None
    file = GgufFile(checkpoint, name)
    first, behind = file.num_layers(), file.get("block_count")
    if first >= behind or not any(layer >= first for layer in file.layers_with("attn_norm.weight")):
        return None
    which = f"layer {first} predicts" if behind - first == 1 else f"layers {first} to {behind - 1} predict"
    return f"{checkpoint.path.name}: {which} further tokens (NextN), which is left out"


def _settings(checkpoint: Checkpoint, name: str, metadata: dict[str, Any]) -> dict[str, Any]:
    if name in ARCHITECTURES:
        return _own_settings(GgufFile(checkpoint, name), ARCHITECTURES[name])
    if name not in supported():
        raise UnsupportedError(f"{checkpoint.path}: GGUF architecture {shown(name)} is not supported{_reason(name)}")
    configs, _ = _transformers_tables()
    return dict(configs[name](metadata, tuple(checkpoint.tensors)))


def _reason(name: str) -> str:
    """Returns why an architecture is refused, or which names are like it."""
    if name in REFUSED:
        return f": {REFUSED[name]}"
    known = supported()
    nearest = difflib.get_close_matches(name[:100], known, n=3)
    hint = f"; the nearest are {', '.join(nearest)}" if nearest else ""
    return f"{hint}; supported: {', '.join(known)}"


def _own_settings(file: GgufFile, record: GgufArchitecture) -> dict[str, Any]:
    tensors, metadata = file.checkpoint.tensors, file.checkpoint.config()
    found = {field: file.value(key) for field, key in _COMMON_KEYS.items()}
    if not file.get("expert_count"):
        raise UnsupportedError(
            f"{file.checkpoint.path}: this {file.architecture} model has no routed experts, so there is nothing to offload"
        )
    found["num_hidden_layers"] = file.num_layers()
    found |= {field: file.get(key) for field, key in _OPTIONAL_KEYS.items() if file.get(key) is not None}
    found |= rope_scaling(file)
    if EMBEDDING not in tensors:
        raise CheckpointError(f"{file.checkpoint.path}: tensor {EMBEDDING!r} is missing; the file is not a whole model")
    found["vocab_size"] = tensors[EMBEDDING].shape[0]
    found["tie_word_embeddings"] = OUTPUT not in tensors
    for field in ("eos_token_id", "bos_token_id"):
        found[field] = metadata.get(f"tokenizer.ggml.{field}")
    found["pad_token_id"] = metadata.get("tokenizer.ggml.padding_token_id")
    found |= record.settings
    found |= {field: file.value(key) for field, key in record.keys.items()}
    found |= {field: file.get(key, default) for field, (key, default) in record.defaults.items()}
    return found | {"model_type": record.model_type} | record.fields(file)
