"""Records where a tensor lies in the files of a checkpoint, and in which of the formats that files
have.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScaleInfo:
    """Scales that lie apart from their values, with one element for each block of the values."""

    file: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


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
