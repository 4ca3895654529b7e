"""Writes checkpoints of four-bit integers as AutoAWQ, GPTQ's programs and compressed-tensors
publish them, from a small float checkpoint. Only tests use it.

It is written from the formats' descriptions and shares nothing with what reads them: codes are put
into words by shifts and sums here, one nibble after the other.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.models.quantised_files import write_quantised
from dflash_moe.model.checkpoint import Checkpoint

Array = np.ndarray[Any, Any]
# A tensor by the end of its name: its dtype in safetensors, and its values or their bits.
Parts = dict[str, tuple[str, Array]]

METHODS = ("awq", "gptq", "gptq_v2", "compressed-tensors")
_WEIGHTS = re.compile(r".*(self_attn\.\w+_proj|mlp\.(experts\.\d+\.|shared_expert\.)?(gate|up|down)_proj)\.weight")


def write_int4(source: Path, directory: Path, method: str, *, group: int = 32, is_symmetric: bool = False) -> Path:
    """Writes the checkpoint with its linear weights, but not its head, in 4 bits by `method`, one
    of METHODS. `group` inputs share a scale, or with -1 all of an output. Returns `directory`.
    """
    made: Parts = {}
    checkpoint = Checkpoint.open(source)
    for name in checkpoint.tensors:
        value = checkpoint.values(name)
        if not _WEIGHTS.fullmatch(name):
            made[name] = ("F32", value)
            continue
        codes, zeros, scales = quantise_int4(value, value.shape[1] if group == -1 else group, is_symmetric=is_symmetric)
        made |= {name.removesuffix("weight") + end: part for end, part in pack(method, codes, zeros, scales).items()}
        if method == "compressed-tensors":
            if is_symmetric:
                del made[f"{name}_zero_point"]
            made[f"{name}_shape"] = ("I64", np.array(value.shape, np.int64))
        elif method != "awq":
            share = value.shape[1] if group == -1 else group
            made[name.removesuffix("weight") + "g_idx"] = ("I32", np.arange(value.shape[1], dtype=np.int32) // share)
    return write_quantised(source, directory, made, quantization_of(method, group, is_symmetric=is_symmetric))


def quantization_of(method: str, group: int, *, is_symmetric: bool) -> dict[str, Any]:
    """Returns the `quantization_config` with which such files are published."""
    if method == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": not is_symmetric, "version": "gemm"}
    if method != "compressed-tensors":
        found = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": is_symmetric}
        return found | ({"checkpoint_format": method} if method == "gptq_v2" else {})
    weights = {"num_bits": 4, "type": "int", "symmetric": is_symmetric, "strategy": "channel" if group == -1 else "group"}
    weights["group_size"] = None if group == -1 else group
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": method, "format": "pack-quantized", "config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}


def quantise_int4(values: Array, group: int, *, is_symmetric: bool) -> tuple[Array, Array, Array]:
    """Quantises values [outputs, inputs] to codes in uint8 of the same shape, zero points in uint8
    and scales [outputs, inputs / group], which float16 holds. A value is about
    (code - zero) * scale.
    """
    groups = values.reshape(values.shape[0], -1, group)
    least, most = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
    if is_symmetric:
        most = np.maximum(most, -least)
        least = -most
    # Seven bits of mantissa, so that bf16 holds the scales too.
    bits = ((most - least) / 15 + np.float32(1e-4)).astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    scales = bits.view(np.float32)
    zeros = np.full(scales.shape, 8, np.uint8) if is_symmetric else np.clip(np.rint(-least / scales), 1, 15).astype(np.uint8)
    codes = np.clip(np.rint(groups / scales[:, :, None]) + zeros[:, :, None], 0, 15).astype(np.uint8)
    return codes.reshape(values.shape), zeros, scales


def pack(method: str, codes: Array, zeros: Array, scales: Array) -> Parts:
    """Returns the tensors of one matrix by the ends of their names. `codes` are [outputs, inputs],
    `zeros` and `scales` [outputs, groups].
    """
    if method == "compressed-tensors":
        bf16 = (np.ascontiguousarray(scales, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return {
            "weight_packed": ("I32", pack_rows(codes)),
            "weight_scale": ("BF16", bf16),
            "weight_zero_point": ("I32", pack_rows(zeros.T).T),
        }
    halves = ("F16", scales.T.astype(np.float16))
    if method == "awq":
        # Nibble i of a word, counted from the lowest bits, holds column 8 * word + order[i].
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {"qweight": ("I32", pack_rows(codes.T, order)), "qzeros": ("I32", pack_rows(zeros.T, order)), "scales": halves}
    less = 1 if method == "gptq" else 0
    return {"qweight": ("I32", pack_rows(codes).T), "qzeros": ("I32", pack_rows(zeros.T - np.uint8(less))), "scales": halves}


def pack_rows(codes: Array, order: Sequence[int] = range(8)) -> Array:
    """Packs each eight neighbours of a row [rows, columns] into an int32. What is missing to the
    last eight is 0.
    """
    rows, columns = codes.shape
    padded = np.zeros((rows, -(-columns // 8), 8), np.uint32)
    padded.reshape(rows, -1)[:, :columns] = codes
    words = np.zeros(padded.shape[:2], np.uint32)
    for nibble, column in enumerate(order):
        words += padded[:, :, column] * np.uint32(16**nibble)
    return words.view(np.int32)
