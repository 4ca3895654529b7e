"""Where a tensor lies in a checkpoint's files, and in which of the formats that files have.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScaleInfo:
    """Scales that lie apart from the values they belong to: one element per block of the values."""

    file: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: file (index into `Checkpoint.files`), byte offset in it, dtype by the
    file format's name, shape.

    The last dimension varies fastest. `scales` is there where the values mean nothing without them.
    """

    file: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    scales: ScaleInfo | None = None
