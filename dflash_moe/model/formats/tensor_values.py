"""Reads tensors of a checkpoint as NumPy arrays: for the host's own weights, and for comparisons.

Workers on a processor never do. They pack from the mapped file, and start without NumPy, whose
import would be a third of their start.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_moe.model.formats.dequantize import dequantize, widened
from dflash_moe.model.formats.packed_integers import integer_weights
from dflash_moe.model.formats.stored_tensor import ScaleInfo, TensorInfo
from dflash_moe.model.formats.weight_formats import STORED_NAMES


def read_values(files: Sequence[Path], info: TensorInfo) -> np.ndarray[Any, Any]:
    """Returns a whole tensor of a checkpoint with these files in float32, whatever its format.
    Packed integers were checked before (`packed_tensors.check_packed`). Errors are those of
    `dequantize`.
    """
    if info.packed is not None:
        return _integers(files, info)
    format_name = STORED_NAMES.get(info.dtype, info.dtype)
    *outer, inputs = info.shape if len(info.shape) > 1 else (1, *info.shape)
    squares = 1
    if info.dtype in ("FP8_B128", "FP8"):
        # Scales belong to parts of one matrix, so that every expert is taken by itself.
        squares, outer = int(np.prod(outer[:-1])), outer[-1:]
    outputs = int(np.prod(outer))
    data = np.array_split(read_bytes(files, info), squares)
    whole = None if info.scales is None else _scales(files, info.scales, squares, outputs)
    scales = [None] * squares if whole is None else np.array_split(whole, squares)
    made = [dequantize(format_name, part, outputs, inputs, own) for part, own in zip(data, scales, strict=True)]
    return np.concatenate(made).reshape(info.shape)


def read_bytes(files: Sequence[Path], info: TensorInfo | ScaleInfo) -> np.ndarray[Any, Any]:
    """Returns the bytes of a tensor as they lie in its file, which is mapped as long as the array
    lives.
    """
    if not info.num_bytes:
        # An empty tensor cannot be mapped.
        return np.empty(0, np.uint8)
    return np.memmap(files[info.file], np.uint8, "r", info.offset, (info.num_bytes,))


def _integers(files: Sequence[Path], info: TensorInfo) -> np.ndarray[Any, Any]:
    packed, scales = info.packed, info.scales
    assert packed is not None
    assert scales is not None
    is_awq, outputs = packed.packing == "awq", info.shape[0]
    columns = {"awq": outputs // 8, "gptq": outputs}.get(packed.packing, info.shape[1] // 8)
    words = read_bytes(files, info).view(np.int32).reshape(info.shape[1] if is_awq else -1, columns)
    zeros = packed.zeros
    wide_zeros = None if zeros is None else read_bytes(files, zeros).view(np.int32).reshape(zeros.shape)
    wide = widened(STORED_NAMES[scales.dtype], read_bytes(files, scales)).reshape(scales.shape)
    return integer_weights(packed.packing, words, wide, wide_zeros, packed.zero_bias)


def _scales(files: Sequence[Path], scales: ScaleInfo, squares: int, outputs: int) -> np.ndarray[Any, Any]:
    if scales.dtype == "U8":
        return read_bytes(files, scales).reshape(outputs, scales.shape[-1])
    values = widened(STORED_NAMES[scales.dtype], read_bytes(files, scales))
    return values.reshape(squares * scales.shape[-2], scales.shape[-1])
