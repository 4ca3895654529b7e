"""Reads and checks the header of a safetensors file, which says what tensors it has, where, and of
what shape. No weights are touched.

The file has a u64 little-endian length, a JSON map of that length, and then the data. A header is
believed only where it agrees with itself and with the file.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from dflash_moe.errors import CheckpointError, shown
from dflash_moe.model.formats.stored_tensor import TensorInfo
from dflash_moe.named_files import open_named

# The format itself has this bound.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 8
# No tensor is as long. Dimensions are checked one by one, so that their product cannot grow without
# bound before it is compared with the file.
MAX_EXTENT = 1 << 48

# An element of each dtype has so many bits. The length of a dtype that is not here cannot be
# checked, so that its tensors cannot be used.
DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


def read_header(path: Path, file: int) -> dict[str, TensorInfo]:
    """Returns the tensors of one file, which is number `file` in the checkpoint, by name. Raises
    CheckpointError naming the file and the tensor that is wrong.
    """
    try:
        with open_named(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise CheckpointError(
                    f"{path}: found {size} bytes, too few for a safetensors file; it is truncated or not one - download or "
                    "copy it again"
                )
            length = int.from_bytes(prefix, "little")
            if length > MAX_HEADER_BYTES or length > size - 8:
                raise CheckpointError(
                    f"{path}: found a header length of {length} bytes in a file of {size}, allowed are {MAX_HEADER_BYTES}; "
                    "the file is truncated or not a safetensors file - download or copy it again"
                )
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    return _tensors(path, file, _parse(path, text), 8 + length, size)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(f"{path}: tensor {twice!r} appears twice in the header")
        return found

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not JSON ({error}); the file is damaged") from None
    if type(header) is not dict:
        raise CheckpointError(f"{path}: the header is a {type(header).__name__}, expected a map of tensors")
    header.pop("__metadata__", None)
    return header


def _tensors(path: Path, file: int, header: dict[str, Any], data_start: int, size: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise CheckpointError(f"{path}: tensor {name!r}: its name is not text; the header is damaged")
        info = _tensor(f"{path}: tensor {name!r}", file, entry, data_start, size)
        tensors[name] = info
        if info.num_bytes:
            ranges.append((info.offset, info.offset + info.num_bytes, name))
    ranges.sort()
    for (_, end, name), (begin, _, other) in zip(ranges, ranges[1:], strict=False):
        if begin < end:
            raise CheckpointError(f"{path}: tensors {name!r} and {other!r} overlap; the header is damaged")
    return tensors


def _tensor(where: str, file: int, entry: Any, data_start: int, size: int) -> TensorInfo:
    if type(entry) is not dict:
        raise CheckpointError(f"{where}: found a {type(entry).__name__}, expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if type(dtype) is not str or not dtype.isascii():
        # The fingerprint holds the dtype as text.
        raise CheckpointError(f"{where}: dtype is {shown(dtype)}, expected a name")
    if type(shape) is not list or not _are_extents(shape, MAX_DIMENSIONS):
        raise CheckpointError(f"{where}: shape is {str(shape)[:80]}, expected at most {MAX_DIMENSIONS} non-negative integers")
    if type(offsets) is not list or not _are_extents(offsets, 2) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets is {str(offsets)[:80]}, expected [begin, end]")
    begin, end = offsets
    if end > size - data_start:
        raise CheckpointError(
            f"{where}: ends at byte {data_start + end}, but the file has {size}; it is truncated - download or copy it again"
        )
    bits = DTYPE_BITS.get(dtype)
    count = 1
    for extent in shape:
        count *= extent
    if bits is not None and count * bits != (end - begin) * 8:
        raise CheckpointError(f"{where}: {dtype} {list(shape)} does not have the {end - begin} bytes its data_offsets give")
    return TensorInfo(file, data_start + begin, dtype, tuple(shape), end - begin)


def _are_extents(values: list[Any], limit: int) -> bool:
    return len(values) <= limit and all(type(item) is int and 0 <= item <= MAX_EXTENT for item in values)
