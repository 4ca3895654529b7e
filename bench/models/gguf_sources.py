"""Makes the tiny transformers checkpoints that llama.cpp's converter turns into the GGUF files of
the tests, one or two for each GGUF architecture. Only tests and campaigns use it.

Every parameter is random, norms and biases included, so that no two can be taken for each other.
Matrices have four values only: files of them compress to a tenth, and are committed.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from dflash_moe.model.architecture import find_model_class
from dflash_moe.model.checkpoint_files import SINGLE_NAME
from dflash_moe.model.make import MakeOptions, build_config, write_tokenizer
from dflash_moe.model.progress import quiet_progress

NUM_EXPERTS = 4
HIDDEN_SIZE = 64
# Twice this is another width than the hidden one, so that no matrix can be taken for its transpose.
WIDTH = 24
TOP_K = 2
SEED = 15
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 4096}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 8192}
# The root of 1 + ln(16384 / 4096) / ln(4096), which llama.cpp's converter computes.
_PHI_MSCALE = (7 / 6) ** 0.5
_PHI = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096}
_PHI |= {"short_factor": [1.0 + n / 8 for n in range(8)], "long_factor": [2.0 + n / 4 for n in range(8)]}
_PHI |= {"short_mscale": _PHI_MSCALE, "long_mscale": _PHI_MSCALE}
_LONG = {"max_position_embeddings": 16384}


@dataclass(frozen=True, slots=True)
class GgufSource:
    """A checkpoint to convert: `architecture` is GGUF's, and `model_type` that of transformers.

    `settings` replace those that `make.build_config` chooses. `published` go into config.json
    alone: the converter looks for keys that published checkpoints have, and transformers' classes
    have not. `options` are the converter's. With `inputs_first` experts are stored as they were
    published, and with `predicts` the checkpoint has one more layer, which predicts further tokens.
    """

    architecture: str
    model_type: str
    num_layers: int = 2
    settings: dict[str, Any] = field(default_factory=dict)
    published: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    inputs_first: bool = False
    predicts: bool = False


_GROUPS = {"n_group": 2, "topk_group": 1}
_LATENT = {**_LONG, "first_k_dense_replace": 1, "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}

# The names are those of the committed files.
SOURCES: dict[str, GgufSource] = {
    "llama": GgufSource("llama", "mixtral", settings={"rope_parameters": _LLAMA3}),
    "qwen2moe": GgufSource("qwen2moe", "qwen2_moe"),
    "qwen3moe": GgufSource("qwen3moe", "qwen3_moe", settings={**_LONG, "norm_topk_prob": True, "rope_parameters": YARN}),
    "qwen35moe": GgufSource(
        "qwen35moe", "qwen3_5_moe_text",
        settings={
            "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_key_value_heads": 2,
        },
        published={"full_attention_interval": 2}, options=("--no-mtp",),
    ),
    "gpt-oss": GgufSource("gpt-oss", "gpt_oss"),
    "minimax-m2": GgufSource("minimax-m2", "minimax_m2", published={"rotary_dim": 16, "scoring_func": "sigmoid"}),
    "deepseek2-v2": GgufSource(
        "deepseek2", "deepseek_v2",
        settings={
            **_LATENT, **_GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0, "q_lora_rank": None,
        },
    ),
    "deepseek2-v3": GgufSource(
        "deepseek2", "deepseek_v3",
        settings={**_LATENT, **_GROUPS, "routed_scaling_factor": 2.5, "qk_nope_head_dim": 32},
        published={"scoring_func": "sigmoid"},
    ),
    "glm4moe": GgufSource(
        "glm4moe", "glm4_moe",
        settings={"first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5},
        published={"num_nextn_predict_layers": 1}, predicts=True,
    ),
    "qwen3vlmoe": GgufSource("qwen3vlmoe", "qwen3_vl_moe", inputs_first=True),
    "dots1": GgufSource(
        "dots1", "dots1",
        settings={"first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "n_shared_experts": 2},
        published={"scoring_func": "sigmoid"},
    ),
    "ernie4_5-moe": GgufSource("ernie4_5-moe", "ernie4_5_moe", settings={"moe_num_shared_experts": 2}),
    "hunyuan-moe": GgufSource(
        "hunyuan-moe", "hunyuan_v1_moe",
        settings={"num_key_value_heads": 2},
        published={"moe_intermediate_size": [WIDTH, WIDTH], "moe_topk": [TOP_K, TOP_K], "num_shared_expert": [1, 1]},
    ),
    "olmoe": GgufSource("olmoe", "olmoe"),
    "granitemoe": GgufSource(
        "granitemoe", "granitemoe",
        settings={
            "num_key_value_heads": 2, "embedding_multiplier": 1.5, "logits_scaling": 3.0, "residual_multiplier": 0.22,
            "attention_multiplier": 0.3, "tie_word_embeddings": True,
        },
    ),
    "granitemoe-shared": GgufSource(
        "granitemoe", "granitemoeshared",
        settings={
            "shared_intermediate_size": 48, "embedding_multiplier": 1.5, "logits_scaling": 3.0, "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
        },
    ),
    "phimoe": GgufSource(
        "phimoe", "phimoe", settings={**_LONG, "attention_bias": True, "lm_head_bias": True, "rope_parameters": _PHI},
        published={"architectures": ["PhiMoEForCausalLM"]},
    ),
    "afmoe": GgufSource(
        "afmoe", "afmoe", num_layers=4,
        settings={
            "mup_enabled": True, "num_shared_experts": 2, "route_scale": 2.5, "sliding_window": 8, "num_dense_layers": 1,
            "num_key_value_heads": 2,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
        published={"score_func": "sigmoid", "route_norm": True},
    ),
    "exaone-moe": GgufSource(
        "exaone-moe", "exaone_moe", num_layers=3,
        settings={
            "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_shared_experts": 2, "num_key_value_heads": 2, "routed_scaling_factor": 2.5,
        },
        published={"scoring_func": "sigmoid"},
    ),
}  # fmt: skip


def write_source(name: str, directory: Path) -> Any:
    """Writes the checkpoint of SOURCES[name] into `directory`, and returns its model, in float32 on
    the CPU.
    """
    source = SOURCES[name]
    model = find_model_class(config := source_config(source))(config).float().eval()
    fill(model)
    with quiet_progress():
        model.save_pretrained(directory)
        write_tokenizer(directory)
    _publish(source, directory)
    return model


def _publish(source: GgufSource, directory: Path) -> None:
    """Changes a saved checkpoint into what the converter finds on the hub."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | source.published, indent=1), encoding="utf-8")
    path = directory / SINGLE_NAME
    tensors = load_file(path)
    if source.inputs_first:
        experts = {name: value for name, value in tensors.items() if ".mlp.experts." in name}
        tensors |= {name: value.transpose(1, 2).contiguous() for name, value in experts.items()}
    if source.predicts:
        last, further = (f"model.layers.{number}." for number in (source.num_layers - 1, source.num_layers))
        tensors |= {name.replace(last, further): value.clone() for name, value in tensors.items() if name.startswith(last)}
        norms = ("enorm", "hnorm", "shared_head.norm")
        tensors |= {f"{further}{name}.weight": torch.ones(HIDDEN_SIZE) for name in norms}
        tensors[f"{further}eh_proj.weight"] = torch.ones(HIDDEN_SIZE, 2 * HIDDEN_SIZE)
    save_file(tensors, path, {"format": "pt"})


def source_config(source: GgufSource) -> Any:
    """Returns the configuration of a source."""
    options = MakeOptions(source.model_type, source.num_layers, HIDDEN_SIZE, NUM_EXPERTS, TOP_K, WIDTH, "f32", SEED)
    made = build_config(options)
    text = made.get_text_config()
    settings = {**text.to_dict(), **source.settings}
    if text is not made:
        vision: dict[str, Any] = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
        vision |= {"out_hidden_size": HIDDEN_SIZE, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
        return type(made)(text_config=settings, vision_config=vision)
    return type(made)(**settings)


def fill(model: Any) -> None:
    """Fills parameters and saved buffers with numbers that depend on their names alone."""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            seed = int.from_bytes(hashlib.sha256(f"{SEED} {name}".encode()).digest()[:8], "little")
            value.copy_(torch.from_numpy(_values(name, tuple(value.shape), np.random.default_rng(seed))))


def _values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    codes = rng.integers(0, 4, shape).astype(np.float32) - np.float32(1.5)
    leaf = name.rpartition(".")[2]
    if "bias" in leaf or leaf == "sinks":
        return np.asarray(codes / 16, np.float32)
    if len(shape) < 2:
        return np.asarray(1 + codes / 4, np.float32)
    # A power of two near one over the root of the inputs keeps outputs as large as inputs.
    return codes if "embed" in name else np.asarray(codes * 2.0 ** -round(math.log2(shape[-1]) / 2), np.float32)
