"""Routing weights of a row as ComputeRow carries them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from dflash_moe.errors import ProtocolError


def bytes_of(weights: Sequence[float]) -> bytes:
    """Returns little-endian f32."""
    return struct.pack(f"<{len(weights)}f", *weights)


def floats_of(weights: bytes) -> tuple[float, ...]:
    """Returns what `bytes_of` was given, which f32 holds exactly. Raises ProtocolError for a part
    of a number.
    """
    if len(weights) % 4:
        raise ProtocolError(f"message ComputeRow: field weights: found {len(weights)} bytes, allowed is a multiple of 4")
    return struct.unpack(f"<{len(weights) // 4}f", weights)
