"""Joins values and the scales that safetensors keep apart from them into one tensor each, for FP8
and for MXFP4.

FP8 has `X` in F8_E4M3 [..., outputs, inputs], and `X_scale_inv` or `X_scale` in F32, BF16 or F16
with a scale for each square of 128 x 128 (DeepSeek, Qwen), for each output or for all. A value is
code * scale whatever the name says. Static scales of activations (`input_scale`) are not used:
activations are rounded here by the numerics class alone.

MXFP4 (gpt-oss) has `X_blocks` in U8 [..., outputs, groups, 16], and `X_scales` in U8 [..., outputs,
groups]. A block has 32 values of a row, the low nibble first, which are multiplied by
2^(scale - 127). The joined tensor is `X` [..., outputs, inputs].
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dflash_moe.errors import CheckpointError
from dflash_moe.model.formats.stored_tensor import ScaleInfo, TensorInfo
from dflash_moe.model.formats.weight_formats import FP8_BLOCK, MXFP4_BLOCK

FP8_SCALES = ("_scale_inv", "_scale")
# A static scale of activations, which nothing here uses.
INPUT_SCALE = "input_scale"
_SCALE_DTYPES = ("F32", "BF16", "F16")
MXFP4_VALUES, MXFP4_SCALES = "_blocks", "_scales"


def join_scales(stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Returns the tensors joined with their scales. What is no pair stays as it is. Raises
    CheckpointError where a pair contradicts itself.
    """
    joined = dict(stored)
    for name, info in stored.items():
        if info.dtype == "F8_E4M3":
            _join_fp8(stored, joined, name, info)
            continue
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


def _join_fp8(stored: Mapping[str, TensorInfo], joined: dict[str, TensorInfo], name: str, info: TensorInfo) -> None:
    for ending in FP8_SCALES:
        scales = stored.get(name + ending)
        shape = None if scales is None or scales.dtype not in _SCALE_DTYPES else _grid(info.shape, scales.shape)
        if scales is None or shape is None:
            continue
        del joined[name + ending]
        is_square = shape[-2:] == _squares(info.shape)
        as_published = is_square and scales.dtype == "F32"
        joined[name] = _with_scales(info, "FP8_B128" if as_published else "FP8", info.shape, replace(scales, shape=shape))
        return


def _squares(shape: tuple[int, ...]) -> tuple[int, int]:
    return -(-shape[-2] // FP8_BLOCK), -(-shape[-1] // FP8_BLOCK)


def _grid(values: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the shape of the scales as [..., rows, columns], where rows are squares, outputs or
    one; None where they are of no kind that is read.
    """
    if len(values) < 2:
        return None
    outer, outputs = values[:-2], values[-2]
    for rows, columns in (_squares(values), (outputs, 1), (1, 1)):
        if scales == (*outer, rows, columns):
            return scales
        if columns == 1 and not outer and scales in ((rows,), ()) and (rows == 1 or scales == (rows,)):
            return rows, columns
    return None


def _with_scales(values: TensorInfo, dtype: str, shape: tuple[int, ...], scales: TensorInfo) -> TensorInfo:
    apart = ScaleInfo(scales.file, scales.offset, scales.dtype, scales.shape, scales.num_bytes)
    return TensorInfo(values.file, values.offset, dtype, shape, values.num_bytes, apart)
