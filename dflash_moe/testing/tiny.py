"""Makes a small checkpoint of nothing but experts, its spec, and routed batches, for tests and
benches that need no torch.

The tensors are laid out and named as in Qwen3-MoE checkpoints on disk, with one tensor for each
expert and matrix.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.ffn import FfnSpec, TensorPattern
from dflash_moe.model.spec import LayerSpec, ModelSpec

SAFETENSORS_DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}


def layer_name(layer: int) -> str:
    """Returns the name of the experts module, as in Qwen3-MoE."""
    return f"model.layers.{layer}.mlp.experts"


def tiny_ffn(layer: int, hidden_size: int, moe_intermediate_size: int) -> FfnSpec:
    """Returns the spec of SwiGLU experts without biases."""
    prefix = layer_name(layer) + ".{expert}."
    return FfnSpec(
        in_size=hidden_size,
        intermediate_size=moe_intermediate_size,
        out_size=hidden_size,
        gate_tensor=TensorPattern(prefix + "gate_proj.weight"),
        up_tensor=TensorPattern(prefix + "up_proj.weight"),
        down_tensor=TensorPattern(prefix + "down_proj.weight"),
    )


def tiny_checkpoint(
    directory: Path,
    *,
    hidden_size: int = 64,
    moe_intermediate_size: int = 48,
    num_experts: int = 8,
    top_k: int = 2,
    num_layers: int = 2,
    dtype: str = "f32",
    seed: int = 0,
) -> ModelSpec:
    """Writes config.json and model.safetensors with random experts into `directory`, and returns
    the spec, which needs no transformers.
    """
    directory.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    shapes = {
        f"{layer_name(layer)}.{expert}.{matrix}.weight": shape
        for layer in range(num_layers)
        for expert in range(num_experts)
        for matrix, shape in (
            ("gate_proj", (moe_intermediate_size, hidden_size)),
            ("up_proj", (moe_intermediate_size, hidden_size)),
            ("down_proj", (hidden_size, moe_intermediate_size)),
        )
    }
    _write_safetensors(directory / "model.safetensors", shapes, dtype, generator)
    config = {
        "model_type": "tiny_experts",
        "hidden_size": hidden_size,
        "moe_intermediate_size": moe_intermediate_size,
        "num_experts": num_experts,
        "num_experts_per_tok": top_k,
        "num_hidden_layers": num_layers,
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tiny_spec(directory, dtype=dtype)


def tiny_spec(directory: Path, *, dtype: str = "f32") -> ModelSpec:
    """Returns the spec of what `tiny_checkpoint` has written there in this dtype."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    num_experts, top_k = config["num_experts"], config["num_experts_per_tok"]
    layers = []
    for layer in range(config["num_hidden_layers"]):
        ffn = tiny_ffn(layer, config["hidden_size"], config["moe_intermediate_size"])
        layers.append(
            LayerSpec(
                index=layer,
                name=layer_name(layer),
                num_experts=num_experts,
                top_k=top_k,
                ffn=ffn,
                weight_dtype=dtype,
                expert_bytes=ffn.stored_bytes(dtype),
            )
        )
    return ModelSpec(
        layers=tuple(layers),
        dtype=dtype,
        fingerprint=Checkpoint.open(directory).fingerprint(),
        config_name="tiny_experts",
        path=str(directory),
    )


def routed_batch(
    num_tokens: int, hidden_size: int, num_experts: int, top_k: int, *, seed: int = 0
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns hidden_states in f32 [num_tokens, hidden_size], and topk_ids in int64 and
    topk_weights in f32, both [num_tokens, top_k].

    The ids of a token are distinct, and its weights add up to one.
    """
    generator = np.random.default_rng(seed)
    hidden_states = generator.standard_normal((num_tokens, hidden_size), dtype=np.float32)
    order = np.argsort(generator.random((num_tokens, num_experts)), axis=1)
    topk_ids = np.ascontiguousarray(order[:, :top_k]).astype(np.int64)
    topk_weights = generator.random((num_tokens, top_k), dtype=np.float32)
    topk_weights /= topk_weights.sum(axis=1, keepdims=True)
    return hidden_states, topk_ids, topk_weights


def _write_safetensors(path: Path, shapes: dict[str, tuple[int, int]], dtype: str, generator: np.random.Generator) -> None:
    """Writes one header and then the values in order (https://github.com/huggingface/safetensors,
    section Format).
    """
    header: dict[str, Any] = {}
    offset = 0
    item_bytes = 4 if dtype == "f32" else 2
    for name, (outputs, inputs) in shapes.items():
        end = offset + outputs * inputs * item_bytes
        header[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": [outputs, inputs], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for outputs, inputs in shapes.values():
            values = generator.standard_normal((outputs, inputs), dtype=np.float32) / np.float32(np.sqrt(inputs))
            file.write(_as_bytes(values, dtype))


def _as_bytes(values: np.ndarray[Any, Any], dtype: str) -> bytes:
    if dtype == "f32":
        return values.tobytes()
    if dtype == "f16":
        return values.astype(np.float16).tobytes()
    bits = values.view(np.uint32)
    # This rounds to the nearest even value; it holds for finite values only.
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded >> 16).astype(np.uint16).tobytes()
