"""Words of packed four-bit integers and the weights that they mean, worked out by hand: three
blocks of eight outputs for each of AWQ, both versions of GPTQ, and compressed-tensors.

In a word, nibble 0 is the lowest hexadecimal digit, the one on the right: 0x76543210 has the
nibbles 0, 1, 2 ... 7 in this order.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """Words, scales and zero points in the shapes of their tensors, and weights [outputs,
    inputs].
    """

    words: list[list[int]]
    scales: list[list[float]]
    zeros: list[list[int]] | None
    weights: list[list[float]]


# AWQ. A row of words is one input, and nibbles 0 .. 7 belong to outputs 0, 2, 4, 6, 1, 3, 5, 7. So
# 0x76543210 gives outputs 0 .. 7 the codes 0, 4, 1, 5, 2, 6, 3, 7.
AWQ = (
    # All zero points are 8 and all scales 0.5. The codes of input 0 are those above; less 8 they
    # are -8 -4 -7 -3 -6 -2 -5 -1. 0xfedcba98 has the same nibbles plus 8, so that input 1 has the
    # codes less 8 of 0 4 1 5 2 6 3 7.
    Block(
        [[0x76543210], [0xFEDCBA98]],
        [[0.5] * 8],
        [[0x88888888]],
        [[-4.0, 0.0], [-2.0, 2.0], [-3.5, 0.5], [-1.5, 2.5], [-3.0, 1.0], [-1.0, 3.0], [-2.5, 1.5], [-0.5, 3.5]],
    ),
    # Zero points have the same order: 0 4 1 5 2 6 3 7. Input 0 has code 15 throughout and input 1
    # has 0, and the scale is 0.25: a quarter of 15 - zero, and a quarter of -zero.
    Block(
        [[0xFFFFFFFF], [0x00000000]],
        [[0.25] * 8],
        [[0x76543210]],
        [[3.75, 0.0], [2.75, -1.0], [3.5, -0.25], [2.5, -1.25], [3.25, -0.5], [2.25, -1.5], [3.0, -0.75], [2.0, -1.75]],
    ),
    # Nibble 0 of the zero points is 15, for output 0, whose scale is -1: its codes 1 and 0 become
    # 14 and 15. Nibble 7 of input 1 is 8, for output 7 with scale 8: 64. All else is 0.
    Block(
        [[0x00000001], [0x80000000]],
        [[-1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]],
        [[0x0000000F]],
        [[14.0, 15.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 64.0]],
    ),
)

# Eight outputs of eight inputs, whose codes less 8 are halved.
_WORDS = [0x76543210, 0x88888888, 0xFFFFFFFF, 0x00000000, 0x10000000, 0x0000000F, 0x80808080, 0x12345678]
_HALVES = [
    # The codes are 0 .. 7.
    [-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5],
    [0.0] * 8,
    # The codes are 15, and 15 - 8 = 7.
    [3.5] * 8,
    [-4.0] * 8,
    # The highest nibble is input 7.
    [-4.0, -4.0, -4.0, -4.0, -4.0, -4.0, -4.0, -3.5],
    # The lowest nibble is input 0.
    [3.5, -4.0, -4.0, -4.0, -4.0, -4.0, -4.0, -4.0],
    # Nibbles from the right: 0 8 0 8 0 8 0 8.
    [-4.0, 0.0, -4.0, 0.0, -4.0, 0.0, -4.0, 0.0],
    # Nibbles from the right: 8 7 6 5 4 3 2 1.
    [0.0, -0.5, -1.0, -1.5, -2.0, -2.5, -3.0, -3.5],
]

# GPTQ, first version. A word is one output with its inputs ascending. Zero points are stored less
# 1.
GPTQ = (
    # The stored 7 stands for 8.
    Block([_WORDS], [[0.5] * 8], [[0x77777777]], _HALVES),
    # Output o stores o and means o + 1. The codes are 9 and the scales 2: 2 * (8 - o).
    Block(
        [[0x99999999] * 8],
        [[2.0] * 8],
        [[0x76543210]],
        [[16.0] * 8, [14.0] * 8, [12.0] * 8, [10.0] * 8, [8.0] * 8, [6.0] * 8, [4.0] * 8, [2.0] * 8],
    ),
    # Outputs 0 .. 6 store 0 and mean 1; output 7 stores 15 and means 16. Input 0 has code 15, the
    # others have 0.
    Block(
        [[0x0000000F] * 8],
        [[1.0] * 8],
        [[0xF0000000]],
        [[14.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0]] * 7 + [[-1.0, -16.0, -16.0, -16.0, -16.0, -16.0, -16.0, -16.0]],
    ),
)

# GPTQ, second version: zero points are stored as they are.
GPTQ_V2 = (
    Block([_WORDS], [[0.5] * 8], [[0x88888888]], _HALVES),
    # 2 * (9 - o).
    Block(
        [[0x99999999] * 8],
        [[2.0] * 8],
        [[0x76543210]],
        [[18.0] * 8, [16.0] * 8, [14.0] * 8, [12.0] * 8, [10.0] * 8, [8.0] * 8, [6.0] * 8, [4.0] * 8],
    ),
    # Outputs 0 .. 6 mean 0, and output 7 means 15.
    Block(
        [[0x0000000F] * 8],
        [[1.0] * 8],
        [[0xF0000000]],
        [[15.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]] * 7 + [[0.0, -15.0, -15.0, -15.0, -15.0, -15.0, -15.0, -15.0]],
    ),
)

# compressed-tensors. A row of words is one output with its inputs ascending, and a word of zero
# points has eight outputs.
COMPRESSED = (
    # Without zero points a code stands for code - 8.
    Block([[word] for word in _WORDS], [[0.5]] * 8, None, _HALVES),
    # Output o has zero point o: 2 * (9 - o).
    Block(
        [[0x99999999]] * 8,
        [[2.0]] * 8,
        [[0x76543210]],
        [[18.0] * 8, [16.0] * 8, [14.0] * 8, [12.0] * 8, [10.0] * 8, [8.0] * 8, [6.0] * 8, [4.0] * 8],
    ),
    # Input i has code 15 - i, and output o zero point 8 + o: (7 - i - o) / 8.
    Block(
        [[0x89ABCDEF]] * 8,
        [[0.125]] * 8,
        [[0xFEDCBA98]],
        [
            [0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0],
            [0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0, -0.125],
            [0.625, 0.5, 0.375, 0.25, 0.125, 0.0, -0.125, -0.25],
            [0.5, 0.375, 0.25, 0.125, 0.0, -0.125, -0.25, -0.375],
            [0.375, 0.25, 0.125, 0.0, -0.125, -0.25, -0.375, -0.5],
            [0.25, 0.125, 0.0, -0.125, -0.25, -0.375, -0.5, -0.625],
            [0.125, 0.0, -0.125, -0.25, -0.375, -0.5, -0.625, -0.75],
            [0.0, -0.125, -0.25, -0.375, -0.5, -0.625, -0.75, -0.875],
        ],
    ),
)

BLOCKS = {"awq": AWQ, "gptq": GPTQ, "gptq_v2": GPTQ_V2, "compressed-tensors": COMPRESSED}
