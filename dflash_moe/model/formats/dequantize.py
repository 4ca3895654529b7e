"""Dequantises every weight format to float32 in NumPy, for the host's weights and as a check. It is
written from the formats' own descriptions.

It is independent of the kernels' dequantisers on purpose, because `verify` and tests hold the two
against each other. The function of a format takes raw blocks as uint8 [rows, blocks, bytes] and
gives float32 [rows, blocks, values]. Every product and difference is rounded once.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dflash_moe.errors import UnsupportedError
from dflash_moe.model.formats.dequantize_low_bits import LOW_BIT_RULES
from dflash_moe.model.formats.weight_formats import FLOATS, FORMATS, FP8_BLOCK, MXFP4_BLOCK

Array = np.ndarray[Any, Any]

# The values of e2m1 have a sign, two bits of exponent and one of mantissa.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# These are the non-linear 4-bit levels of the IQ4 types of llama.cpp.
IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def dequantize(format_name: str, data: Array, outputs: int, inputs: int, scales: Array | None = None) -> Array:
    """Returns a matrix in `format_name` as float32 [outputs, inputs]. `data` are its bytes in uint8
    of any shape, with rows one after another.

    `scales` are given where they lie apart: for FP8 float32 [ceil(outputs / 128),
    ceil(inputs / 128)], [outputs, 1] or [1, 1]; for MXFP4 uint8 [outputs, inputs / 32]. Raises
    UnsupportedError for a format without a rule here.
    """
    data = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
    if format_name in FLOATS:
        return widened(format_name, data).reshape(outputs, inputs)
    if format_name == "fp8_e4m3_b128" and scales is not None:
        return _fp8(data.reshape(outputs, inputs), scales)
    if format_name == "mxfp4" and scales is not None:
        return _mxfp4(data.reshape(outputs, inputs // MXFP4_BLOCK, MXFP4_BLOCK // 2), scales).reshape(outputs, inputs)
    rule = _BLOCK_RULES.get(format_name)
    if rule is None:
        raise UnsupportedError(f"weights in format {format_name} cannot be dequantised; known: {', '.join(FORMATS)}")
    shape = FORMATS[format_name]
    return rule(data.reshape(outputs, inputs // shape.block, shape.block_bytes)).reshape(outputs, inputs)


def widened(format_name: str, data: Array) -> Array:
    """Returns floats as float32 in memory of its own. `data` are their bytes in uint8."""
    if format_name == "f32":
        return np.array(data.view(np.float32))
    if format_name == "f16":
        return np.asarray(data.view(np.float16), np.float32)
    bits: Array = data.view(np.uint16).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32)


def quantize_int(values: Array, bits: int) -> tuple[Array, Array]:
    """Quantises values to integers in int8 [outputs, inputs] and float32 scales [outputs, groups],
    in groups of 32 inputs, as `weights: int8` and `int4` mean.

    A scale is the largest magnitude / (2^(bits-1) - 1), and an integer is value / scale rounded
    half to even. A group of zeros has scale 0.
    """
    outputs, inputs = values.shape
    limit = np.float32(2 ** (bits - 1) - 1)
    groups = np.zeros((outputs, -(-inputs // 32) * 32), np.float32)
    groups[:, :inputs] = values
    groups = groups.reshape(outputs, -1, 32)
    scales = np.abs(groups).max(axis=2) / limit
    divisors = np.where(scales == 0, np.float32(1), scales)
    integers = np.clip(np.rint(groups / divisors[:, :, None]), -limit, limit).astype(np.int8)
    return integers.reshape(outputs, -1)[:, :inputs], scales


def requantized(values: Array, format_name: str) -> Array:
    """Returns the numbers with which a worker computes that keeps `values` [outputs, inputs] as
    int8_g32 or int4_g32.
    """
    integers, scales = quantize_int(values, 8 if format_name == "int8_g32" else 4)
    wide = np.repeat(scales, 32, axis=1)[:, : values.shape[1]]
    held: Array = integers.astype(np.float32) * wide
    return held


def e8m0(exponents: Array) -> Array:
    """Returns 2^(e - 127) in float32. An exponent of 255 is NaN."""
    bits = exponents.astype(np.uint32) << 23
    # 2^-127 is a subnormal number, which the shift does not give.
    bits = np.where(exponents == 0, np.uint32(1 << 22), bits)
    return np.where(exponents == 255, np.uint32(0x7FC00000), bits).astype(np.uint32).view(np.float32)


def _e4m3_values() -> Array:
    """Returns the numbers of all 256 codes of FP8 e4m3. Only 0x7f and 0xff are NaN, and none is
    infinite.
    """
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    normal = (1 + mantissas / 8) * 2.0 ** (exponents - 7)
    values = np.where(exponents == 0, mantissas / 8 * 2.0**-6, normal)
    values = np.where(codes & 127 == 127, np.nan, values)
    return np.where(codes & 128, -values, values).astype(np.float32)


E4M3 = _e4m3_values()


def _fp8(codes: Array, scales: Array) -> Array:
    if scales.shape in ((codes.shape[0], 1), (1, 1)):
        return np.asarray(E4M3[codes] * scales.astype(np.float32))
    wide = np.repeat(np.repeat(scales.astype(np.float32), FP8_BLOCK, axis=0), FP8_BLOCK, axis=1)
    return np.asarray(E4M3[codes] * wide[: codes.shape[0], : codes.shape[1]])


def _mxfp4(blocks: Array, scales: Array) -> Array:
    """Dequantises MXFP4, in which the low nibble holds value 2i and the high one value 2i + 1."""
    pairs = np.stack([E2M1[blocks & 15], E2M1[blocks >> 4]], axis=-1)
    return pairs.reshape(*blocks.shape[:2], -1) * e8m0(scales)[:, :, None]


def _f16(data: Array) -> Array:
    """Returns the float16 in bytes [rows, blocks, 2] as float32 [rows, blocks, 1]."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _nibbles(data: Array) -> Array:
    """Returns all low nibbles, followed by all high ones."""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def _q8_0(blocks: Array) -> Array:
    return np.ascontiguousarray(blocks[..., 2:]).view(np.int8).astype(np.float32) * _f16(blocks[..., :2])


def _q4_0(blocks: Array) -> Array:
    return (_nibbles(blocks[..., 2:]).astype(np.float32) - 8) * _f16(blocks[..., :2])


def _iq4_nl(blocks: Array) -> Array:
    return IQ4_LEVELS[_nibbles(blocks[..., 2:])] * _f16(blocks[..., :2])


def _gguf_mxfp4(blocks: Array) -> Array:
    return E2M1[_nibbles(blocks[..., 1:])] * e8m0(blocks[..., :1])


def _k_scales(packed: Array) -> tuple[Array, Array]:
    """Unpacks eight 6-bit scales and eight 6-bit minima from 12 bytes (Q4_K, Q5_K)."""
    low, middle, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6) << 4], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6) << 4], axis=-1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _k_affine(blocks: Array, codes: Array) -> Array:
    """Returns (d * scale) * code - (dmin * minimum) for eight groups of 32 codes."""
    scales, minima = _k_scales(blocks[..., 4:16])
    factor, offset = _f16(blocks[..., :2]) * scales, _f16(blocks[..., 2:4]) * minima
    values: Array = factor[..., None] * codes.astype(np.float32) - offset[..., None]
    return values.reshape(*blocks.shape[:2], 256)


def _q4_k(blocks: Array) -> Array:
    codes = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 1, 32) >> np.array([0, 4], np.uint8).reshape(2, 1)
    return _k_affine(blocks, (codes & 15).reshape(*blocks.shape[:2], 8, 32))


def _q5_k(blocks: Array) -> Array:
    low = blocks[..., 48:].reshape(*blocks.shape[:2], 4, 1, 32) >> np.array([0, 4], np.uint8).reshape(2, 1)
    high = blocks[..., 16:48].reshape(*blocks.shape[:2], 1, 32) >> np.arange(8, dtype=np.uint8).reshape(8, 1)
    return _k_affine(blocks, (low & 15).reshape(*blocks.shape[:2], 8, 32) | (high & 1) << 4)


def _q6_k(blocks: Array) -> Array:
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 1, 64) >> np.array([0, 4], np.uint8).reshape(2, 1)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    codes = (low & 15).reshape(*blocks.shape[:2], 16, 16) | (high & 3).reshape(*blocks.shape[:2], 16, 16) << 4
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32) * _f16(blocks[..., 208:210])
    # A code of 32 and a negative scale give a negative zero; adding zero makes it positive.
    weights = scales[..., None] * (codes.astype(np.float32) - 32) + np.float32(0)
    return np.asarray(weights, np.float32).reshape(*blocks.shape[:2], 256)


def _iq4_xs(blocks: Array) -> Array:
    low = blocks[..., 4:8].reshape(*blocks.shape[:2], 4, 1) >> np.array([0, 4], np.uint8)
    high_bits = np.ascontiguousarray(blocks[..., 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
    scales = (low & 15).reshape(*blocks.shape[:2], 8) | (high_bits & 3).astype(np.uint8) << 4
    factors = _f16(blocks[..., :2]) * (scales.astype(np.float32) - 32)
    levels = IQ4_LEVELS[_nibbles(blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16))]
    return (factors[..., None] * levels).reshape(*blocks.shape[:2], 256)


def _with_fifth_bits(nibbles: Array, fifth: Array) -> Array:
    """Returns codes of five bits, the fifth of which are the bits of 4 bytes."""
    bits = np.unpackbits(np.ascontiguousarray(fifth), axis=-1, bitorder="little")
    codes: Array = (_nibbles(nibbles) | bits << 4).astype(np.float32)
    return codes


def _q4_1(blocks: Array) -> Array:
    return _f16(blocks[..., :2]) * _nibbles(blocks[..., 4:]).astype(np.float32) + _f16(blocks[..., 2:4])


def _q5_0(blocks: Array) -> Array:
    return (_with_fifth_bits(blocks[..., 6:], blocks[..., 2:6]) - 16) * _f16(blocks[..., :2])


def _q5_1(blocks: Array) -> Array:
    return _f16(blocks[..., :2]) * _with_fifth_bits(blocks[..., 8:], blocks[..., 4:8]) + _f16(blocks[..., 2:4])


def _bit_pairs(data: Array) -> Array:
    """Returns the 256 two-bit codes in 64 bytes: of each 32 bytes, all lowest pairs come first."""
    pairs = data.reshape(*data.shape[:2], 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    return (pairs & 3).reshape(*data.shape[:2], 16, 16)


def _q3_k(blocks: Array) -> Array:
    thirds = blocks[..., None, :32] >> np.arange(8, dtype=np.uint8).reshape(8, 1) & 1
    codes = _bit_pairs(blocks[..., 32:96]) | thirds.reshape(*blocks.shape[:2], 16, 16) << 2
    low = blocks[..., None, 96:104] >> np.array([0, 4], np.uint8).reshape(2, 1) & 15
    high = blocks[..., None, 104:108] >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1) & 3
    scales = low.reshape(*blocks.shape[:2], 16) | high.reshape(*blocks.shape[:2], 16) << 4
    factors = _f16(blocks[..., 108:]) * (scales.astype(np.float32) - 32)
    values: Array = factors[..., None] * (codes.astype(np.float32) - 4)
    return values.reshape(*blocks.shape[:2], 256)


def _q2_k(blocks: Array) -> Array:
    scales, codes = blocks[..., :16], _bit_pairs(blocks[..., 16:80])
    factors = _f16(blocks[..., 80:82]) * (scales & 15).astype(np.float32)
    offsets = _f16(blocks[..., 82:]) * (scales >> 4).astype(np.float32)
    values: Array = factors[..., None] * codes.astype(np.float32) - offsets[..., None]
    return values.reshape(*blocks.shape[:2], 256)


def _int4_zp(blocks: Array) -> Array:
    """Returns (code - zero) * scale, which is exact. The word before the 16 bytes of codes is the
    float32 scale, in whose five lowest bits the zero point lies.
    """
    words = np.ascontiguousarray(blocks[..., :4]).view(np.uint32)
    codes = np.stack([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1).reshape(*blocks.shape[:2], 32)
    zeros = (words & 31).astype(np.float32)
    # A code equal to the zero point and a negative scale give a negative zero; adding zero makes it
    # positive.
    values: Array = (codes.astype(np.float32) - zeros) * (words & ~np.uint32(31)).view(np.float32) + np.float32(0)
    return values


_BLOCK_RULES: dict[str, Callable[[Array], Array]] = {
    "q8_0": _q8_0, "q4_0": _q4_0, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, "gguf_mxfp4": _gguf_mxfp4, "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
    "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q3_k": _q3_k, "q2_k": _q2_k,
    **LOW_BIT_RULES,
    "int4_zp": _int4_zp,
}  # fmt: skip
