"""The NumPy dequantisers of GGUF's types of one to three bits: those with grids, IQ1, and ternary
ones.

As in `dequantize.py`, a function takes raw blocks as uint8 [rows, blocks, bytes] and gives float32
[rows, blocks, 256]. Factors of groups are exact products; a weight is rounded once.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from dflash_moe.model.formats.grid_sets import grid

Array = np.ndarray[Any, Any]

_grid = cache(grid)
_NIBBLES = np.array([0, 4], np.uint8)


def _f16(data: Array) -> Array:
    """Returns the float16 in bytes [rows, blocks, 2] as float32 [rows, blocks, 1]."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _words(data: Array, dtype: type) -> Array:
    return np.ascontiguousarray(data).view(dtype)


def _bits(data: Array, width: int) -> Array:
    """Cuts every byte into fields of `width` bits, the lowest first, along the last axis."""
    fields = data[..., None] >> np.arange(0, 8, width, dtype=np.uint8)
    return (fields & ((1 << width) - 1)).reshape(*data.shape[:-1], -1)


def _every_sign(seven: Array) -> Array:
    """Adds the eighth sign to seven: the number of negative values is even."""
    parity = seven ^ seven >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    return np.asarray(seven | (parity & 1) << 7, np.uint8)


def _weights(name: str, indices: Array, signs: Array, factors: Array) -> Array:
    """Returns factor * entry * sign. `signs` are a byte per eight values, and `factors` belong to
    equal runs of a block's values.
    """
    entries = _grid(name)[indices].reshape(*indices.shape[:2], factors.shape[-1], -1)
    products = (factors[..., None] * entries).reshape(*indices.shape[:2], 256)
    return np.asarray(products * np.where(_bits(signs, 1) != 0, np.float32(-1), np.float32(1)))


def _signs_and_scales(words: Array) -> tuple[Array, Array]:
    """Takes words [rows, blocks, 8] with four times seven signs and a scale in the top bits."""
    seven = words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & 127
    return _every_sign(seven.astype(np.uint8)).reshape(*words.shape[:2], 32), (words >> 28).astype(np.float32)


def _iq3_xxs(blocks: Array) -> Array:
    signs, scales = _signs_and_scales(_words(blocks[..., 66:98], np.uint32))
    factors = _f16(blocks[..., :2]) * (np.float32(0.5) + scales) * np.float32(0.5)
    return _weights("iq3_xxs", blocks[..., 2:66], signs, factors)


def _iq3_s(blocks: Array) -> Array:
    indices = blocks[..., 2:66] | _bits(blocks[..., 66:74], 1).astype(np.uint16) << 8
    factors = _f16(blocks[..., :2]) * (1 + 2 * _bits(blocks[..., 106:110], 4).astype(np.float32))
    return _weights("iq3_s", indices, blocks[..., 74:106], factors)


def _iq2_xxs(blocks: Array) -> Array:
    groups = blocks[..., 2:].reshape(*blocks.shape[:2], 8, 8)
    signs, scales = _signs_and_scales(_words(groups[..., 4:], np.uint32)[..., 0])
    factors = _f16(blocks[..., :2]) * (np.float32(0.5) + scales) * np.float32(0.25)
    return _weights("iq2_xxs", groups[..., :4].reshape(*blocks.shape[:2], 32), signs, factors)


def _iq2_factors(blocks: Array, scales: Array) -> Array:
    return np.asarray(_f16(blocks[..., :2]) * (np.float32(0.5) + _bits(scales, 4).astype(np.float32)) * np.float32(0.25))


def _iq2_xs(blocks: Array) -> Array:
    both = _words(blocks[..., 2:66], np.uint16)
    signs = _every_sign((both >> 9).astype(np.uint8))
    return _weights("iq2_xs", both & 511, signs, _iq2_factors(blocks, blocks[..., 66:74]))


def _iq2_s(blocks: Array) -> Array:
    indices = blocks[..., 2:34] | _bits(blocks[..., 66:74], 2).astype(np.uint16) << 8
    return _weights("iq2_s", indices, blocks[..., 34:66], _iq2_factors(blocks, blocks[..., 74:82]))


def _iq1(indices: Array, is_down: Array, factors: Array) -> Array:
    """Returns factor * (entry + delta) with a delta of 0.125 per eight values, down or up."""
    delta = np.where(is_down, np.float32(-0.125), np.float32(0.125))
    moved = _grid("iq1")[indices] + delta[..., None]
    return np.asarray(factors[..., None] * moved).reshape(*indices.shape[:2], 256)


def _iq1_s(blocks: Array) -> Array:
    high = _words(blocks[..., 34:50], np.uint16)
    upper = (high[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(*blocks.shape[:2], 32)
    factors = _f16(blocks[..., :2]) * (2 * (high >> 12 & 7) + 1).astype(np.float32)
    return _iq1(blocks[..., 2:34] | upper << 8, np.repeat(high >> 15 != 0, 4, axis=-1), np.repeat(factors, 4, axis=-1))


def _iq1_m(blocks: Array) -> Array:
    words = _words(blocks[..., 48:56], np.uint16)
    parts = words >> 12 << np.array([0, 4, 8, 12], np.uint16)
    scale = np.bitwise_or.reduce(parts, axis=-1).astype(np.uint16).view(np.float16).astype(np.float32)
    scales = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(*blocks.shape[:2], 16)
    factors = scale[..., None] * (2 * scales + 1).astype(np.float32)
    high = _bits(blocks[..., 32:48], 4)
    indices = blocks[..., :32] | (high & 7).astype(np.uint16) << 8
    return _iq1(indices, high & 8 != 0, np.repeat(factors, 2, axis=-1))


def _digits(data: Array, count: int) -> Array:
    """Returns the first `count` base-3 digits of bytes, less one: all first ones, then all second
    ones.
    """
    powers = 3 ** np.arange(count, dtype=np.uint16)
    turned = (data[..., None, :] * powers[:, None]).astype(np.uint8)
    return ((turned.astype(np.uint16) * 3 >> 8).astype(np.float32) - 1).reshape(*data.shape[:2], -1)


def _tq1_0(blocks: Array) -> Array:
    runs = (_digits(blocks[..., :32], 5), _digits(blocks[..., 32:48], 5), _digits(blocks[..., 48:52], 4))
    return np.asarray(_f16(blocks[..., 52:54]) * np.concatenate(runs, axis=-1))


def _tq2_0(blocks: Array) -> Array:
    codes = blocks[..., :64].reshape(*blocks.shape[:2], 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1) & 3
    return np.asarray(_f16(blocks[..., 64:66]) * (codes.reshape(*blocks.shape[:2], 256).astype(np.float32) - 1))


def _nvfp4(blocks: Array) -> Array:
    """Dequantises NVFP4, whose blocks have 64 values, with unsigned e4m3 scales for 16 each."""
    scales = blocks[..., :4]
    exponents, mantissas = (scales >> 3 & 15).astype(np.int32), (scales & 7).astype(np.float32)
    significands = np.where(exponents == 0, mantissas, mantissas + 8)
    factors = np.ldexp(significands, np.maximum(exponents, 1) - 11).astype(np.float32)
    factors = np.where(scales == 0x7F, np.float32(0), factors)
    nibbles = blocks[..., 4:].reshape(*blocks.shape[:2], 4, 1, 8) >> _NIBBLES.reshape(2, 1) & 15
    values = _DOUBLED_E2M1[nibbles.reshape(*blocks.shape[:2], 4, 16)]
    return np.asarray(factors[..., None] * values).reshape(*blocks.shape[:2], 64)


# The values of e2m1 times two, which are integers and have no negative zero.
_DOUBLED_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)

LOW_BIT_RULES: dict[str, Callable[[Array], Array]] = {
    "iq3_xxs": _iq3_xxs, "iq3_s": _iq3_s, "iq2_xxs": _iq2_xxs, "iq2_xs": _iq2_xs, "iq2_s": _iq2_s, "iq1_s": _iq1_s,
    "iq1_m": _iq1_m, "tq1_0": _tq1_0, "tq2_0": _tq2_0, "nvfp4": _nvfp4,
}  # fmt: skip
