"""Records where a tensor lies in the files of a checkpoint, and in which of the formats that files
have.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ScaleInfo:
    """Scales that lie apart from their values, with one element for each block of the values."""

    file: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int

    def entries(self, first: int, count: int) -> ScaleInfo:
        """Returns where `count` entries of the first dimension lie."""
        size = self.num_bytes // self.shape[0]
        return replace(self, offset=self.offset + first * size, shape=(count, *self.shape[1:]), num_bytes=count * size)


@dataclass(frozen=True, slots=True)
class PackedInfo:
    """How four-bit integers lie in words of 32 bits, and what belongs to them beside their scales.

    `packing` is `pack_quantized`, `gptq` or `awq` (compute::Packing), and `group` is how many
    inputs share a scale. `zeros` are packed zero points, to which `zero_bias` is added; without
    them all are 8. `shape` and `g_idx` are tensors that must say what the others say.
    """

    packing: str
    group: int
    zeros: ScaleInfo | None = None
    zero_bias: int = 0
    shape: ScaleInfo | None = None
    g_idx: ScaleInfo | None = None


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: the file (an index into `Checkpoint.files`), the byte offset in it, the
    dtype by the name that the file format has for it, and the shape.

    The last dimension varies fastest. `scales` are there where the values mean nothing without
    them.
    """

    file: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    scales: ScaleInfo | None = None
    packed: PackedInfo | None = None

    def entries(self, first: int, count: int) -> TensorInfo:
        """Returns where `count` entries of the first dimension lie, and the scales of these. Each
        entry must have bytes and scales of its own.
        """
        size = self.num_bytes // self.shape[0]
        return replace(
            self, offset=self.offset + first * size, shape=(count, *self.shape[1:]), num_bytes=count * size,
            scales=None if self.scales is None else self.scales.entries(first, count),
        )  # fmt: skip
