"""Makes random valid blocks of the quantised weight formats, for formats to which no Python package
can quantise.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_moe.model.formats.weight_formats import FORMATS

# A block has its float16 factors at these bytes, and an exponent at the byte of _EXPONENT.
_FACTORS = {"q8_0": (0,), "q4_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "iq4_nl": (0,), "iq4_xs": (0,)}
_FACTORS |= {"q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q3_k": (108,), "q2_k": (80, 82)}
# The factor of the minima is this multiple of the factor of the codes, which centres the values on
# 0.
_MIDDLE = {"q4_k": 7.5, "q5_k": 15.5, "q4_1": -7.5, "q5_1": -15.5, "q2_k": 1.5}
# Weights deviate by this multiple of the factor of the codes.
_DEVIATION = {"q4_1": 5.6, "q5_0": 9.6, "q5_1": 11.3, "q3_k": 45.2, "q2_k": 14.9}
_EXPONENT = {"gguf_mxfp4": 0}
# The types of one to three bits have one factor, at this byte, and a root mean square of so many
# factors. With the factor that makes, weights have a deviation of 0.02 where `spread` is 0.01.
_LOW_BITS = {
    "iq3_xxs": (0, 148), "iq3_s": (0, 137), "iq2_xxs": (0, 54), "iq2_xs": (0, 54), "iq2_s": (0, 54), "iq1_s": (0, 7.2),
    "tq1_0": (52, 0.82), "tq2_0": (64, 1.22),
}  # fmt: skip
# The first word of int4_zp is a float32 scale with the zero point in its five lowest bits.
_WORD = "int4_zp"


def random_blocks(
    format_name: str, rows: int, inputs: int, *, seed: int = 0, spread: float = 0.01
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns uint8 [rows, bytes of a row]. Every bit is random except those of the factors, which
    are finite and about `spread`; in the formats of `_DEVIATION` they are such that the weights
    deviate by about 2 * `spread`.
    """
    shape = FORMATS[format_name]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows, inputs // shape.block, shape.block_bytes), dtype=np.uint8)
    size = 2 * spread / _DEVIATION[format_name] if format_name in _DEVIATION else spread
    for offset in _FACTORS.get(format_name, ()):
        scale = _MIDDLE.get(format_name, 1.0) if offset in (2, 82) else 1.0
        factors = (generator.uniform(0.5, 1.5, blocks.shape[:2]) * size * scale).astype(np.float16)
        blocks[..., offset : offset + 2] = factors[..., None].view(np.uint8)
    if format_name in _LOW_BITS:
        at, size = _LOW_BITS[format_name]
        factors = (generator.uniform(0.5, 1.5, blocks.shape[:2]) * 2 * spread / size).astype(np.float16)
        blocks[..., at : at + 2] = factors[..., None].view(np.uint8)
    if format_name == "iq1_m":
        bits = (generator.uniform(0.5, 1.5, blocks.shape[:2]) * 2 * spread / 7.2).astype(np.float16).view(np.uint16)
        quarters = (bits[..., None] >> np.array([0, 4, 8, 12], np.uint16) & 15).astype(np.uint8) << 4
        blocks[..., 49:56:2] = blocks[..., 49:56:2] & 15 | quarters
    if format_name == "nvfp4":
        # Scales of 1 to 5 times 2^-9.
        blocks[..., :4] = generator.integers(1, 6, (*blocks.shape[:2], 4), dtype=np.uint8)
    if format_name in _EXPONENT:
        blocks[..., _EXPONENT[format_name]] = generator.integers(118, 124, blocks.shape[:2], dtype=np.uint8)
    if format_name == _WORD:
        scales = (generator.uniform(0.5, 1.5, blocks.shape[:2]) * spread).astype(np.float16).astype(np.float32)
        zeros = generator.integers(0, 16, blocks.shape[:2], dtype=np.uint32)
        blocks[..., :4] = (scales.view(np.uint32) | zeros)[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)
