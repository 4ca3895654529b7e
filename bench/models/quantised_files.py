"""Writes FP8 and MXFP4 checkpoints as they are published, from a small float checkpoint. Only tests
use it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.checkpoint_files import SINGLE_NAME
from dflash_moe.model.formats.dequantize import E2M1, E4M3
from dflash_moe.model.formats.weight_formats import FP8_BLOCK, MXFP4_BLOCK

Array = np.ndarray[Any, Any]

_FP8_WEIGHTS = re.compile(r".*(self_attn\.(\w+_proj|kv_a_proj_with_mqa)|mlp\.(experts\.\d+\.)?(gate|up|down)_proj)\.weight")
_MXFP4_WEIGHTS = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")

_FLOAT_SCHEME = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}}
_FP8_METHODS: dict[str, dict[str, Any]] = {
    "squares": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]},
    "outputs": {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": _FLOAT_SCHEME}},
    "tensor": {"quant_method": "fp8", "activation_scheme": "static"},
}


def write_fp8(source: Path, directory: Path, *, scales: str = "squares") -> Path:
    """Writes the checkpoint with its linear weights in e4m3. Returns `directory`.

    `scales` are per `squares` of 128 in float32, as DeepSeek and Qwen publish them; per `outputs`
    in bf16, as compressed-tensors does; or one per `tensor` in float32 with a static scale of
    activations.
    """
    made: dict[str, tuple[str, Array]] = {}
    checkpoint = Checkpoint.open(source)
    for name in checkpoint.tensors:
        value = checkpoint.values(name)
        if not _FP8_WEIGHTS.fullmatch(name):
            made[name] = ("F32", value)
        elif scales == "squares":
            codes, found = quantise_fp8(value)
            made |= {name: ("F8_E4M3", codes), f"{name}_scale_inv": ("F32", found)}
        elif scales == "outputs":
            codes, found = quantise_fp8_rows(value)
            made |= {name: ("F8_E4M3", codes), f"{name}_scale": ("BF16", (found.view(np.uint32) >> 16).astype(np.uint16))}
        else:
            codes, found = quantise_fp8_rows(value.reshape(1, -1))
            made |= {name: ("F8_E4M3", codes.reshape(value.shape)), f"{name}_scale": ("F32", found.reshape(()))}
            made[name.removesuffix("weight") + "input_scale"] = ("F32", np.ones((), np.float32))
    return write_quantised(source, directory, made, _FP8_METHODS[scales])


def quantise_fp8_rows(values: Array) -> tuple[Array, Array]:
    """Quantises values [outputs, inputs] to codes in uint8 of the same shape, and scales in float32
    [outputs, 1] that bf16 holds.
    """
    numbers, names = _e4m3_ascending()
    bits = (np.abs(values).max(axis=1, keepdims=True) / 440 + np.float32(1e-9)).astype(np.float32).view(np.uint32)
    scales = (bits & np.uint32(0xFFFF0000)).view(np.float32)
    return names[_nearest(numbers, values / scales)].astype(np.uint8), scales


def _e4m3_ascending() -> tuple[Array, Array]:
    """Returns the finite numbers of e4m3 in ascending order, and their codes."""
    codes = np.flatnonzero(np.isfinite(E4M3))
    order = np.argsort(E4M3[codes], kind="stable")
    return E4M3[codes][order], codes[order]


def write_mxfp4(source: Path, directory: Path) -> Path:
    """Writes the gpt_oss checkpoint with its experts in MXFP4, as OpenAI publishes it. Returns
    `directory`.
    """
    made: dict[str, tuple[str, Array]] = {}
    checkpoint = Checkpoint.open(source)
    for name in checkpoint.tensors:
        value = checkpoint.values(name)
        if _MXFP4_WEIGHTS.fullmatch(name):
            blocks, scales = quantise_mxfp4(np.ascontiguousarray(value.transpose(0, 2, 1)))
            made |= {f"{name}_blocks": ("U8", blocks), f"{name}_scales": ("U8", scales)}
        else:
            made[name] = ("F32", value)
    return write_quantised(source, directory, made, {"quant_method": "mxfp4"})


def quantise_fp8(values: Array) -> tuple[Array, Array]:
    """Quantises values [outputs, inputs] to codes in uint8 of the same shape, and a float32 scale
    for each square. The largest of a square becomes 448, and all others the nearest code.
    """
    outputs, inputs = values.shape
    squares = (-(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK))
    scales = np.empty(squares, np.float32)
    codes = np.empty(values.shape, np.uint8)
    numbers, names = _e4m3_ascending()
    for row, column in np.ndindex(squares):
        part = np.s_[row * FP8_BLOCK : (row + 1) * FP8_BLOCK, column * FP8_BLOCK : (column + 1) * FP8_BLOCK]
        scales[row, column] = np.abs(values[part]).max() / 448 or 1.0
        codes[part] = names[_nearest(numbers, values[part] / scales[row, column])]
    return codes, scales


def quantise_mxfp4(values: Array) -> tuple[Array, Array]:
    """Quantises values [..., inputs] to blocks in uint8 [..., groups, 16] and scales in uint8
    [..., groups].
    """
    groups = values.reshape(*values.shape[:-1], -1, MXFP4_BLOCK)
    largest = np.abs(groups).max(axis=-1)
    # The largest magnitude of e2m1 is 6.
    exponents = np.ceil(np.log2(np.maximum(largest, 1e-30) / 6)).astype(np.int64)
    order = np.argsort(E2M1, kind="stable")
    codes = order[_nearest(E2M1[order], groups / np.exp2(exponents)[..., None].astype(np.float32))].astype(np.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).astype(np.uint8)


def _nearest(numbers: Array, values: Array) -> Array:
    """Returns for each value the index of the nearest of the ascending `numbers`."""
    above = np.clip(np.searchsorted(numbers, values), 1, len(numbers) - 1)
    return above - (values - numbers[above - 1] < numbers[above] - values)


def write_quantised(source: Path, directory: Path, tensors: dict[str, tuple[str, Array]], method: dict[str, Any]) -> Path:
    """Writes tensors, each with its dtype by the name that safetensors has, and the configuration
    and tokenizer of `source` with `method` as its `quantization_config`. Returns `directory`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": method}), encoding="utf-8")
    for path in source.iterdir():
        if path.name.startswith(("tokenizer", "special", "generation")):
            (directory / path.name).write_bytes(path.read_bytes())
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, value) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    text = json.dumps(header).encode()
    with (directory / SINGLE_NAME).open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, value in tensors.values():
            stream.write(np.ascontiguousarray(value).tobytes())
    return directory
