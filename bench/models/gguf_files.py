"""Writes small GGUF files from a transformers checkpoint of the families that GGUF has, with the
`gguf` package. Only tests use it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from bench.models.weight_blocks import random_blocks
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.formats.dequantize import dequantize

# The gguf package can quantise to these formats. Blocks of others are random: a test needs valid
# weights, not good ones.
QUANTISABLE = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0", "gguf_mxfp4": "MXFP4"}
QUANTISABLE |= {"q4_1": "Q4_1", "q5_0": "Q5_0", "q5_1": "Q5_1"}
_SAMPLE_SPREAD = 0.01
_ARCHITECTURES = {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "minimax_m2": "minimax-m2"}
_LEAVES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip
# Some families have names of their own for these.
_OWN_LEAVES = {
    "gpt_oss": {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
    "minimax_m2": {"block_sparse_moe.gate": "ffn_gate_inp"},
}
_PACKED = re.compile(r"model\.layers\.(\d+)\.(mlp\.experts\.(gate_up_proj|down_proj)(_bias)?|self_attn\.sinks)")
_EXPERT = re.compile(
    r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
_MATRIX = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w2": "down", "w3": "up"}
_ROUTER_BIAS = re.compile(r"model\.layers\.(\d+)\.block_sparse_moe\.e_score_correction_bias")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def write_gguf(
    source: Path, path: Path, experts: str = "q8_0", *, down: str = "", every_second: bool = False, host: str = "f32",
    seed: int = 0,
) -> Path:  # fmt: skip
    """Writes the checkpoint directory `source` as the GGUF file `path`, and returns that. Routed
    experts are in format `experts`, their down_proj in `down` where that is given, in layers of
    even numbers alone with `every_second`, and all other matrices in `host`.
    """
    checkpoint = Checkpoint.open(source)
    config = checkpoint.config()
    architecture = _ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(str(path), architecture)
    _write_settings(writer, architecture, config)
    for name, value in sorted(_gguf_tensors(checkpoint).items()):
        is_mixed = "ffn_down_exps" in name and not (every_second and int(name.split(".")[1]) % 2)
        format_name = (down or experts if is_mixed else experts) if "_exps." in name else host
        if value.ndim == 1 or "ffn_gate_inp" in name or name.endswith("bias"):
            # llama.cpp keeps routers, norms and biases in this format.
            format_name = "f32"
        _add(writer, name, value, format_name, seed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def split_gguf(path: Path, folder: Path, count: int) -> Path:
    """Cuts a file into `count` parts in `folder`, named as llama.cpp does. Returns the first
    part.
    """
    reader = gguf.GGUFReader(str(path))
    names = [folder / f"{path.stem}-{number + 1:05}-of-{count:05}.gguf" for number in range(count)]
    for number, part in enumerate(names):
        writer = gguf.GGUFWriter(str(part), reader.fields["general.architecture"].contents())
        if number == 0:
            for key, field in reader.fields.items():
                if not key.startswith(("GGUF.", "general.")):
                    writer.add_key_value(key, field.contents(), *field.types[:2])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, np.asarray(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return names[0]


def _write_settings(writer: Any, architecture: str, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(float(rope.get("rope_theta", config.get("rope_theta", 10000.0))))
    writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    if architecture == "minimax-m2":
        writer.add_rope_dimension_count(int(config["head_dim"] * rope.get("partial_rotary_factor", 1.0)))
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
    write_tokenizer(writer, config["vocab_size"])


def write_tokenizer(writer: Any, vocab_size: int) -> None:
    """Writes a token for each byte as byte-level BPE spells it, and then end of text. The byte
    0xff, which no text has, gives way to a merge.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    symbols = bytes_to_unicode()
    tokens = [*(symbols[byte] for byte in range(255)), "th", "<|endoftext|>"]
    # Type 1 is a normal token, and type 3 a control token.
    kinds = [1] * 256 + [3]
    unused = [f"[unused{number}]" for number in range(len(tokens), vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*tokens, *unused])
    writer.add_token_types([*kinds, *[5] * len(unused)])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(256)


def _gguf_tensors(checkpoint: Checkpoint) -> dict[str, np.ndarray[Any, Any]]:
    """Returns float32 tensors by llama.cpp's names, with the experts of a layer stacked."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    experts: dict[str, dict[int, np.ndarray[Any, Any]]] = {}
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    outer["lm_head.weight"] = "output.weight"
    for name in checkpoint.tensors:
        value = checkpoint.values(name)
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(f"blk.{match[1]}.ffn_{_MATRIX[match[3]]}_exps.weight", {})[int(match[2])] = value
        elif match := _PACKED.fullmatch(name):
            found |= {f"blk.{match[1]}.{leaf}": part for leaf, part in _packed_parts(match[2], value).items()}
        elif name in outer:
            found[outer[name]] = value
        elif match := _ROUTER_BIAS.fullmatch(name):
            found[f"blk.{match[1]}.exp_probs_b.bias"] = value
        elif match := _LAYER.fullmatch(name):
            value = value[0] if match[2] == "mlp.shared_expert_gate" else value
            leaves = _LEAVES | _OWN_LEAVES.get(checkpoint.config()["model_type"], {})
            found[f"blk.{match[1]}.{leaves[match[2]]}.{match[3]}"] = value
        else:
            raise ValueError(f"{name} has no place in a GGUF file")
    found |= {name: np.stack([values[number] for number in sorted(values)]) for name, values in experts.items()}
    return found


def _packed_parts(name: str, value: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the tensors that llama.cpp makes of a packed tensor of gpt_oss. There gate and up
    take turns in the last dimension, which is the outputs; llama.cpp has them apart, with the
    outputs first.
    """
    if name == "self_attn.sinks":
        return {"attn_sinks.weight": value}
    leaf = "bias" if name.endswith("_bias") else "weight"
    value = value if leaf == "bias" else np.ascontiguousarray(value.transpose(0, 2, 1))
    if "down_proj" in name:
        return {f"ffn_down_exps.{leaf}": value}
    return {f"ffn_gate_exps.{leaf}": value[:, ::2].copy(), f"ffn_up_exps.{leaf}": value[:, 1::2].copy()}


@cache
def _sample_deviation(format_name: str) -> float:
    """Returns the standard deviation of weights in random blocks of _SAMPLE_SPREAD."""
    rows, inputs = 16, 4 * 256
    blocks = random_blocks(format_name, rows, inputs, spread=_SAMPLE_SPREAD)
    return float(dequantize(format_name, blocks, rows, inputs).std())


def _add(writer: Any, name: str, value: np.ndarray[Any, Any], format_name: str, seed: int) -> None:
    if format_name in QUANTISABLE:
        kind = gguf.GGMLQuantizationType[QUANTISABLE[format_name]]
        writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
        return
    kind = gguf.GGMLQuantizationType[format_name.removeprefix("gguf_").upper()]
    rows = int(np.prod(value.shape[:-1]))
    spread = _SAMPLE_SPREAD * float(value.std()) / _sample_deviation(format_name)
    blocks = random_blocks(format_name, rows, value.shape[-1], seed=seed + len(name), spread=spread)
    writer.add_tensor(name, blocks.reshape(*value.shape[:-1], -1), raw_dtype=kind)
