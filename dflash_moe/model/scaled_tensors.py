"""Joins values and the scales that safetensors keep apart from them into one tensor each, for FP8
in squares of 128 and for MXFP4.

FP8 (DeepSeek, Qwen) has `X` in F8_E4M3 [..., outputs, inputs], and `X_scale_inv` in F32 with a
scale for each square of 128 x 128. A value is code * scale. MXFP4 (gpt-oss) has `X_blocks` in U8
[..., outputs, groups, 16], and `X_scales` in U8 [..., outputs, groups]. A block has 32 values of a
row, the low nibble first, which are multiplied by 2^(scale - 127). The joined tensor is `X` [...,
outputs, inputs].
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping

from dflash_moe.errors import CheckpointError
from dflash_moe.model.stored_tensor import ScaleInfo, TensorInfo
from dflash_moe.model.weight_formats import FP8_BLOCK, MXFP4_BLOCK

FP8_SCALES = "_scale_inv"
MXFP4_VALUES, MXFP4_SCALES = "_blocks", "_scales"


def join_scales(stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Returns the tensors joined with their scales. What is no pair stays as it is. Raises
    CheckpointError where a pair contradicts itself.
    """
    joined = dict(stored)
    for name, info in stored.items():
        scales = stored.get(name + FP8_SCALES)
        if info.dtype == "F8_E4M3" and scales is not None and scales.dtype == "F32" and _has_squares(info, scales):
            del joined[name + FP8_SCALES]
            joined[name] = _with_scales(info, "FP8_B128", info.shape, scales)
        base = name.removesuffix(MXFP4_VALUES)
        scales = stored.get(base + MXFP4_SCALES)
        if base == name or info.dtype != "U8" or scales is None or scales.dtype != "U8":
            continue
        if len(info.shape) < 3 or info.shape[-1] != MXFP4_BLOCK // 2 or info.shape[:-1] != scales.shape:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(info.shape)} and its scales {list(scales.shape)}; MXFP4 has "
                f"[..., groups, {MXFP4_BLOCK // 2}] and [..., groups]"
            )
        if base in stored:
            raise CheckpointError(f"tensor {base!r} is there twice: as such, and as MXFP4 {name!r}")
        del joined[name], joined[base + MXFP4_SCALES]
        joined[base] = _with_scales(info, "MXFP4", (*info.shape[:-2], info.shape[-2] * MXFP4_BLOCK), scales)
    return joined


def _has_squares(values: TensorInfo, scales: TensorInfo) -> bool:
    if len(values.shape) < 2:
        return False
    outputs, inputs = values.shape[-2:]
    return scales.shape == (*values.shape[:-2], -(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK))


def _with_scales(values: TensorInfo, dtype: str, shape: tuple[int, ...], scales: TensorInfo) -> TensorInfo:
    apart = ScaleInfo(scales.file, scales.offset, scales.dtype, scales.shape, scales.num_bytes)
    return TensorInfo(values.file, values.offset, dtype, shape, values.num_bytes, apart)
