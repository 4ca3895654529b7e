"""Writes GGUF files of nothing but experts, for any architecture, layout and format, and computes
in float64 what `experts()` must return for them, with a bound of the difference.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.ffn import FfnSpec, TensorPattern
from dflash_moe.model.spec import LayerSpec

Array = np.ndarray[Any, Any]

# The unit roundoff of float32.
UNIT = 2.0**-24


def write_experts(
    path: Path,
    architecture: str = "qwen3moe",
    *,
    formats: tuple[str, str] = ("f32", "f32"),
    hidden_size: int = 64,
    width: int = 32,
    num_experts: int = 4,
    top_k: int | list[int] = 2,
    layers: Iterable[int] = (0, 1),
    is_fused: bool = False,
    has_gate: bool = True,
    has_biases: bool = False,
    metadata: dict[str, Any] | None = None,
    more: dict[str, Array] | None = None,
    seed: int = 0,
) -> Path:
    """Writes `path` and returns it. Gate and up have the first format and down the second, by our
    names. Every expert has weights of its own. `more` are further tensors.
    """
    import gguf

    writer = gguf.GGUFWriter(str(path), architecture)
    if type(top_k) is list:
        writer.add_array(f"{architecture}.expert_used_count", top_k)
    else:
        writer.add_expert_used_count(top_k)
    for key, value in (metadata or {}).items():
        if type(value) is list:
            writer.add_array(f"{architecture}.{key}", value)
        else:
            (writer.add_float32 if type(value) is float else writer.add_uint32)(f"{architecture}.{key}", value)
    rng = np.random.default_rng(seed)
    inner = {"gate_up": 2 * width} if is_fused else {"gate": width, "up": width} if has_gate else {"up": width}
    for layer in layers:
        for part, outputs in (*inner.items(), ("down", hidden_size)):
            name = f"blk.{layer}.ffn_{part}_exps"
            shape = (num_experts, outputs, width if part == "down" else hidden_size)
            _add(writer, f"{name}.weight", shape, formats[part == "down"], rng)
            if has_biases:
                writer.add_tensor(f"{name}.bias", rng.standard_normal(shape[:2], np.float32) * np.float32(0.1))
    for name, value in (more or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, name: str, shape: tuple[int, ...], format_name: str, rng: np.random.Generator) -> None:
    import gguf

    from bench.models.gguf_files import QUANTISABLE
    from bench.models.weight_blocks import random_blocks

    kind = gguf.GGMLQuantizationType[format_name.removeprefix("gguf_").upper()]
    if format_name in QUANTISABLE:
        values = rng.standard_normal(shape, np.float32) * np.float32(0.2)
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        return
    blocks = random_blocks(format_name, shape[0] * shape[1], shape[2], seed=int(rng.integers(1 << 30)), spread=0.002)
    writer.add_tensor(name, blocks.reshape(*shape[:2], -1), raw_dtype=kind)


def expected(
    checkpoint: Checkpoint,
    layer: LayerSpec,
    rows: Array,
    ids: Array,
    weights: Array,
    scales: dict[str, Array] | None = None,
) -> tuple[Array, Array]:
    """Returns the result [tokens, outputs] in float64, and a bound of what float32 arithmetic may
    differ from it by.

    A sum of n products in any order is off by at most n u times the sum of their magnitudes (to
    first order; the factor 1.01 below covers the rest). Activations are known to 8 u of their
    value, and none but the squared one rises faster than 1.2 times its argument. `scales` are
    factors per expert of gate, up and down.
    """
    ffn = layer.ffn
    result = np.zeros((len(rows), ffn.out_size))
    bound = np.zeros_like(result)
    magnitude = np.zeros_like(result)
    for token, slot in np.ndindex(*ids.shape):
        expert = int(ids[token, slot])

        def of(pattern: TensorPattern | None, label: str = "", expert: int = expert) -> Any:
            if pattern is None:
                return None
            found = checkpoint.values(pattern.name)[expert].astype(np.float64)
            found = {"all": found, "first_half": found[: len(found) // 2], "second_half": found[len(found) // 2 :]}[
                pattern.part
            ]
            return found * float((scales or {}).get(label, np.ones(expert + 1))[expert])

        x = rows[token].astype(np.float64)
        up, up_off = _affine(of(ffn.up_tensor, "up"), x, np.zeros_like(x), of(ffn.up_bias_tensor))
        if ffn.gate_tensor is None:
            h = _activation(ffn, up)
            rise = 2 * (np.abs(up) + up_off) if ffn.activation == "relu_squared" else 1.2
            h_off = rise * up_off + 8 * UNIT * np.abs(h)
        else:
            gate, gate_off = _affine(of(ffn.gate_tensor, "gate"), x, np.zeros_like(x), of(ffn.gate_bias_tensor))
            up = np.clip(up, -ffn.up_limit, ffn.up_limit)
            acted = _activation(ffn, np.minimum(gate, ffn.gate_max))
            acted_off = 1.2 * gate_off + 8 * UNIT * np.abs(acted)
            h = acted * (up + ffn.up_offset)
            h_off = acted_off * (np.abs(up + ffn.up_offset) + up_off) + np.abs(acted) * up_off + 4 * UNIT * np.abs(h)
        down, down_off = _affine(of(ffn.down_tensor, "down"), h, h_off, of(ffn.down_bias_tensor))
        weight = float(weights[token, slot])
        result[token] += weight * down
        bound[token] += abs(weight) * down_off
        magnitude[token] += np.abs(weight * down)
    return result, 1.01 * (bound + (ids.shape[1] + 4) * UNIT * magnitude)


def _affine(matrix: Array, x: Array, x_off: Array, bias: Array | None) -> tuple[Array, Array]:
    """Returns W x + b, and a bound of its error where x is off by `x_off`. Each weight is off by
    4 u, because it is made of a factor and a code, and scaled.
    """
    n = matrix.shape[1] + 6
    sizes = np.abs(matrix) @ (np.abs(x) + x_off)
    value = matrix @ x + (0 if bias is None else bias)
    return value, np.abs(matrix) @ x_off + n * UNIT * (sizes + (0 if bias is None else np.abs(bias)))


def _activation(ffn: FfnSpec, x: Array) -> Array:
    if ffn.gate == "clamped_swiglu":
        return x / (1 + np.exp(-ffn.alpha * x))
    tanh = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    return {
        "silu": lambda: x / (1 + np.exp(-x)),
        "gelu_tanh": lambda: 0.5 * x * (1 + tanh),
        "relu": lambda: np.maximum(x, 0),
        "relu_squared": lambda: np.maximum(x, 0) ** 2,
    }[ffn.activation]()
