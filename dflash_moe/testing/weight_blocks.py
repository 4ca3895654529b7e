"""Makes random valid blocks of the quantised weight formats, for formats to which no Python package
can quantise.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_moe.model.weight_formats import FORMATS

# A block has its float16 factors at these bytes, and an exponent at the byte of _EXPONENT.
_FACTORS = {"q8_0": (0,), "q4_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "iq4_nl": (0,), "iq4_xs": (0,)}
# The factor of the minima is this multiple of the factor of the codes, which centres the values on
# 0.
_MIDDLE = {"q4_k": 7.5, "q5_k": 15.5}
_EXPONENT = {"gguf_mxfp4": 0}


def random_blocks(
    format_name: str, rows: int, inputs: int, *, seed: int = 0, spread: float = 0.01
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns uint8 [rows, bytes of a row]. Every bit is random except those of the factors, which
    are finite and about `spread`.
    """
    shape = FORMATS[format_name]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows, inputs // shape.block, shape.block_bytes), dtype=np.uint8)
    for offset in _FACTORS.get(format_name, ()):
        scale = _MIDDLE.get(format_name, 1.0) if offset == 2 else 1.0
        factors = (generator.uniform(0.5, 1.5, blocks.shape[:2]) * spread * scale).astype(np.float16)
        blocks[..., offset : offset + 2] = factors[..., None].view(np.uint8)
    if format_name in _EXPONENT:
        blocks[..., _EXPONENT[format_name]] = generator.integers(118, 124, blocks.shape[:2], dtype=np.uint8)
    return blocks.reshape(rows, -1)
