"""Reads and checks the header of a GGUF file (versions 2 and 3, little-endian): metadata, and where
each tensor lies.

Any bytes give a header or a CheckpointError. Lengths and counts are compared with the bytes left in
the file before anything is allocated for them, so that nothing larger than the file ever is. No
weights are touched.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_moe.errors import CheckpointError
from dflash_moe.model.formats.stored_tensor import TensorInfo
from dflash_moe.named_files import open_named

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
# The format itself has this bound, and that of keys below.
MAX_DIMENSIONS = 4
MAX_EXTENT = 1 << 48
# The format bounds a tensor's name by 64 bytes; files in use keep to that.
MAX_NAME_BYTES = 256
MAX_KEY_BYTES = 1 << 16
# Files in use have no arrays in arrays; the bound limits the recursion.
MAX_NESTING = 4
# A list of numbers is kept up to this length: settings per layer are shorter, the scores of a
# vocabulary longer.
MAX_KEPT_ITEMS = 4096

# Each type number of ggml stands for a name, the values of a block and the bytes of a block. Types
# that no kernel reads are here as well, because their tensors take their place in the file.
BLOCK_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("GGUF_MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip

# Metadata types of fixed size are read by these struct formats.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q").unpack_from
# The smallest metadata entry has a key length, a type and a value of one byte.
_LEAST_ENTRY_BYTES = 8 + 4 + 1
# The smallest tensor entry has a name length, a number of dimensions, a type and an offset.
_LEAST_TENSOR_BYTES = 8 + 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a file says about itself. `metadata` has numbers, texts and short lists of numbers; of a
    list of texts, or a long one, it has the length.
    """

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    # The header takes so many bytes, and what is before the table of tensors so many.
    num_bytes: int
    metadata_end: int


def read_gguf_header(path: Path, file: int) -> GgufHeader:
    """Reads the header of one file, which is number `file` in the checkpoint. Raises
    CheckpointError naming the file and the tensor or key that is wrong.
    """
    try:
        with open_named(path) as stream:
            if not os.fstat(stream.fileno()).st_size:
                raise CheckpointError(f"{path}: the file is empty; download or copy it again")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def is_gguf(path: Path) -> bool:
    """Says whether the file at `path` calls itself GGUF, by its name or its first bytes."""
    if path.suffix == ".gguf":
        return path.is_file()
    try:
        with open_named(path) as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


class _Reader:
    """A position in the mapped file. Every read is checked against what is left."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0

    def header(self, file: int) -> GgufHeader:
        if self.size < 24 or self.data[:4] != MAGIC:
            raise self._wrong(
                f"found {self.size} bytes that do not begin with GGUF; it is truncated or not a GGUF file - download or copy "
                "it again"
            )
        self.at = 4
        version = self._number("I", "version")
        if version not in VERSIONS:
            is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            found = "a big-endian file" if is_swapped else f"version {version}"
            raise self._wrong(f"found {found}; little-endian files of versions 2 and 3 are read")
        num_tensors = self._count("number of tensors", _LEAST_TENSOR_BYTES)
        num_entries = self._count("number of metadata entries", _LEAST_ENTRY_BYTES)
        metadata = self._metadata(num_entries)
        metadata_end = self.at
        table = self._tensor_table(num_tensors)
        alignment = self._alignment(metadata)
        data_start = -(-self.at // alignment) * alignment
        tensors = {name: self._located(name, entry, data_start, alignment, file) for name, entry in table.items()}
        self._check_overlap(tensors)
        return GgufHeader(metadata, tensors, self.at, metadata_end)

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}")

    def _take(self, num_bytes: int, what: str) -> int:
        """Returns the position of the next `num_bytes` and moves past them."""
        if num_bytes > self.size - self.at:
            raise self._wrong(
                f"{what} needs {num_bytes} bytes at byte {self.at}, but the file has {self.size}; it is truncated or damaged - "
                "download or copy it again"
            )
        start = self.at
        self.at += num_bytes
        return start

    def _number(self, form: str, what: str) -> Any:
        form = "<" + form
        return struct.unpack_from(form, self.data, self._take(struct.calcsize(form), what))[0]

    def _count(self, what: str, least_bytes: int) -> int:
        """Reads a 64-bit count of things, each of which takes at least `least_bytes`."""
        count = int(self._number("Q", what))
        if count * least_bytes > self.size - self.at:
            raise self._wrong(
                f"{what} is {count}, more than a file of {self.size} bytes can hold; it is truncated or damaged - download or "
                "copy it again"
            )
        return count

    def _text(self, what: str, max_bytes: int | None = None) -> str:
        length = int(self._number("Q", f"length of {what}"))
        if max_bytes is not None and length > max_bytes:
            raise self._wrong(f"{what} has {length} bytes, allowed are {max_bytes}; the file is damaged")
        start = self._take(length, what)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self._wrong(f"{what} at byte {start} is not UTF-8 text; the file is damaged") from None

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for number in range(count):
            key = self._text(f"the key of metadata entry {number}", MAX_KEY_BYTES)
            if key in metadata:
                raise self._wrong(f"metadata key {key!r} appears twice")
            kind = self._number("I", f"the type of {key!r}")
            metadata[key] = self._value(f"metadata {key!r}", kind, MAX_NESTING)
        return metadata

    def _value(self, what: str, kind: int, depth: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind], what)
        if kind == _TEXT:
            return self._text(what)
        if kind != _ARRAY or depth == 0:
            raise self._wrong(f"{what} has type {kind}{' nested too deeply' if kind == _ARRAY else ''}, which no GGUF file has")
        item = self._number("I", f"the type of the items of {what}")
        if item in _SCALARS:
            item_bytes = struct.calcsize("<" + _SCALARS[item])
            count = self._count(f"the length of {what}", item_bytes)
            start = self._take(count * item_bytes, what)
            return list(struct.unpack_from(f"<{count}{_SCALARS[item]}", self.data, start)) if count <= MAX_KEPT_ITEMS else count
        count = self._count(f"the length of {what}", 8 if item == _TEXT else 12)
        if item == _TEXT:
            self._skip_texts(count, what)
            return count
        return [self._value(f"an item of {what}", item, depth - 1) for _ in range(count)]

    def _skip_texts(self, count: int, what: str) -> None:
        """Moves past a list of texts. A vocabulary has 10^5 and each start reads it several times,
        so that reading a length is no call of ours.
        """
        before, at, last = self.at, self.at, self.size - 8
        for _ in range(count):
            if at > last:
                break
            before, at = at, at + 8 + _LENGTH(self.data, at)[0]
        else:
            if at <= self.size:
                self.at = at
                return
        # This text is not whole; reading it says how.
        self.at = before if at > self.size else at
        self._take(int(self._number("Q", f"the length of a text of {what}")), f"a text of {what}")

    def _tensor_table(self, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
        """Reads the shape (the last dimension varies fastest), the type number and the offset in
        the data of each tensor, by its name.
        """
        table: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for number in range(count):
            name = self._text(f"the name of tensor {number}", MAX_NAME_BYTES)
            where = f"tensor {name!r}"
            if name in table:
                raise self._wrong(f"{where} appears twice")
            num_dimensions = self._number("I", f"{where}: number of dimensions")
            if not 1 <= num_dimensions <= MAX_DIMENSIONS:
                raise self._wrong(f"{where}: found {num_dimensions} dimensions, allowed are 1 to {MAX_DIMENSIONS}")
            extents = [int(self._number("Q", f"{where}: shape")) for _ in range(num_dimensions)]
            if not all(1 <= extent <= MAX_EXTENT for extent in extents):
                raise self._wrong(f"{where}: shape is {extents[::-1]}, allowed are extents of 1 to {MAX_EXTENT}")
            kind = self._number("I", f"{where}: type")
            table[name] = (tuple(reversed(extents)), kind, int(self._number("Q", f"{where}: offset")))
        return table

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._wrong(f"general.alignment is {alignment!r}, allowed are powers of two from 8 to {MAX_ALIGNMENT}")
        return alignment

    def _located(self, name: str, entry: tuple[tuple[int, ...], int, int], start: int, alignment: int, file: int) -> TensorInfo:
        shape, kind, offset = entry
        where = f"tensor {name!r}"
        if kind not in BLOCK_TYPES:
            known = ", ".join(name for name, _, _ in BLOCK_TYPES.values())
            raise self._wrong(f"{where}: type {kind} is not known; known are {known}")
        type_name, block, block_bytes = BLOCK_TYPES[kind]
        if shape[-1] % block:
            raise self._wrong(f"{where}: rows of {shape[-1]} values cannot be cut into {type_name} blocks of {block}")
        num_bytes = block_bytes
        for extent in (*shape[:-1], shape[-1] // block):
            num_bytes *= extent
        if offset % alignment:
            raise self._wrong(f"{where}: its offset {offset} is not a multiple of the alignment {alignment}")
        if start + offset + num_bytes > self.size:
            raise self._wrong(
                f"{where}: ends at byte {start + offset + num_bytes}, but the file has {self.size}; it is truncated - "
                "download or copy it again"
            )
        return TensorInfo(file, start + offset, type_name, shape, num_bytes)

    def _check_overlap(self, tensors: dict[str, TensorInfo]) -> None:
        ordered = sorted((info.offset, info.offset + info.num_bytes, name) for name, info in tensors.items())
        for (_, end, name), (begin, _, other) in zip(ordered, ordered[1:], strict=False):
            if begin < end:
                raise self._wrong(f"tensors {name!r} and {other!r} overlap; the header is damaged")
