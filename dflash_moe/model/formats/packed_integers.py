"""Unpacks the four-bit integers of AWQ, GPTQ and compressed-tensors to float32 in NumPy, from the
formats' own descriptions.

It is independent of the core's code on purpose, as model/formats/dequantize.py is. A weight is
(code - zero) * scale, which float32 holds exactly: five bits times the eleven of f16 or the eight
of bf16. The programs that wrote the files round the product once, to the dtype of the scale.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# A word of AWQ has the codes of eight outputs in this order, from its lowest bits on.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PLAIN_ORDER = tuple(range(8))
# Without zero points a code stands for code - 8.
SYMMETRIC_ZERO = 8


def unpack_words(words: Array, order: tuple[int, ...] = PLAIN_ORDER) -> Array:
    """Returns the codes of int32 or uint32 words [rows, columns] as uint8 [rows, 8 * columns].
    Nibble i of a word, counted from its lowest bits, is column 8 * word + order[i].
    """
    rows, columns = words.shape
    codes = np.empty((rows, columns, 8), np.uint8)
    for nibble, place in enumerate(order):
        codes[:, :, place] = (words.view(np.uint32) >> np.uint32(4 * nibble)) & np.uint32(15)
    return codes.reshape(rows, 8 * columns)


def integer_weights(packing: str, words: Array, scales: Array, zeros: Array | None, zero_bias: int) -> Array:
    """Returns the weights in float32 [outputs, inputs]. `words` and `zeros` are int32 in the shapes
    that model/formats/packed_tensors.py lists, and `scales` float32.
    """
    if packing == "pack_quantized":
        codes = unpack_words(words)
        groups = scales.T
        offsets = None if zeros is None else unpack_words(np.ascontiguousarray(zeros.T))[:, : codes.shape[0]]
    else:
        order = AWQ_ORDER if packing == "awq" else PLAIN_ORDER
        codes = unpack_words(words, order).T if packing == "awq" else unpack_words(np.ascontiguousarray(words.T))
        groups = scales
        offsets = None if zeros is None else unpack_words(zeros, order)
    outputs, inputs = codes.shape
    wide = np.full(groups.shape, SYMMETRIC_ZERO, np.uint8) if offsets is None else offsets + np.uint8(zero_bias)
    share = inputs // groups.shape[0]
    values = np.ascontiguousarray(codes).reshape(outputs, -1, share).astype(np.float32)
    values -= wide.T.astype(np.float32)[:, :, None]
    values *= groups.T[:, :, None]
    # A code equal to its zero point and a negative scale give a negative zero; adding zero makes it
    # positive.
    values += np.float32(0)
    return values.reshape(outputs, inputs)
