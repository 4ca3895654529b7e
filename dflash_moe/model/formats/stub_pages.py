"""The pages of a stub: a GGUF file of the full size in which each expert's bytes are a hole but for
one page that says so.

A program that has given its experts to workers needs no byte of them, only a file in which all
other tensors lie where they lay. The page holds NaN in every format that our kernels read, so that
a program that computes with it by mistake shows it, and a header that names what was there. In
each tensor whose name contains `_exps.` and that has two dimensions or more, expert e has the bytes
[F, F + num_bytes / num_experts). Its region is the first page of 4096 bytes of the file that lies
wholly in them, or all of them where there is none. The region is filled with 0xFF; where it has 512
bytes or more it begins with the magic, the fingerprint of the whole checkpoint (32 bytes), the
expert and the length of the name (u32 little-endian each) and the tensor's name.

MXFP4 and NVFP4 are the exceptions to NaN. Of MXFP4 ggml reads the scale 0xFF as 2^128 and has no
NaN in this format (ours is NaN, as the format's standard says). The codes 0xF beside it stand for
-6, and the product overflows to minus infinity where ggml widens a block. Where it multiplies
blocks by inputs in q8_0 the result is NaN for inputs of 0.1 and more, and of a magnitude of 10^37
for inputs of 0.001. NVFP4 has no NaN at all; its page stands for weights of -2880.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_moe.errors import CheckpointError
from dflash_moe.model.formats.stored_tensor import TensorInfo

MAGIC = b"DFLASH-MOE-STUB1"
PAGE_BYTES = 4096
# A shorter region has no room for a header beside what makes a program's result NaN.
LEAST_MARKED_BYTES = 512
FINGERPRINT_BYTES = 32
MAX_NAME_BYTES = 256
# No worker takes more experts of a layer; the bound limits how many pages are compared.
MAX_EXPERTS = (1 << 16) - 1
_FILL = b"\xff"
_EXPERTS = "_exps."


@dataclass(frozen=True, slots=True)
class Stub:
    """What a stub says of itself: the fingerprint of the full file in hexadecimal, and the tensors
    of which it holds pages only.
    """

    fingerprint: str
    tensors: frozenset[str]


def holds_experts(name: str, info: TensorInfo) -> bool:
    """Says whether a stub can have pages in place of this tensor."""
    is_small = info.shape[0] <= MAX_EXPERTS and len(name.encode()) <= MAX_NAME_BYTES
    return _EXPERTS in name and len(info.shape) >= 2 and is_small


def region(info: TensorInfo, expert: int) -> tuple[int, int]:
    """Returns where the region of an expert begins in its file, and how many bytes it has."""
    num_bytes = info.num_bytes // info.shape[0]
    begin = info.offset + expert * num_bytes
    page = -(-begin // PAGE_BYTES) * PAGE_BYTES
    if page + PAGE_BYTES <= begin + num_bytes:
        return page, PAGE_BYTES
    return begin, num_bytes


def page(fingerprint: str, name: str, expert: int, num_bytes: int) -> bytes:
    """Returns the content of a region of `num_bytes`."""
    if num_bytes < LEAST_MARKED_BYTES:
        return _FILL * num_bytes
    text = name.encode()
    numbers = expert.to_bytes(4, "little") + len(text).to_bytes(4, "little")
    return (MAGIC + bytes.fromhex(fingerprint) + numbers + text).ljust(num_bytes, _FILL)


def find_stub(files: Sequence[Path], tensors: Mapping[str, TensorInfo]) -> Stub | None:
    """Returns what these files say of themselves where they are a stub, else None.

    A file that is no stub is read at one place per tensor of experts. Of a stub every page is
    compared. Raises CheckpointError naming the tensor and the expert whose page is not what it must
    be.
    """
    candidates = {name: info for name, info in tensors.items() if holds_experts(name, info)}
    descriptors: dict[int, int] = {}
    try:
        for index in sorted({info.file for info in candidates.values()}):
            descriptors[index] = os.open(files[index], os.O_RDONLY | os.O_CLOEXEC)
        return _Pages(files, descriptors).stub(candidates)
    except OSError as error:
        raise CheckpointError(f"{error.filename or files[0]}: cannot be read: {error.strerror or error}") from None
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


class _Pages:
    """Reads and compares pages in open files."""

    def __init__(self, files: Sequence[Path], descriptors: Mapping[int, int]) -> None:
        self._files = files
        self._descriptors = descriptors

    def stub(self, candidates: Mapping[str, TensorInfo]) -> Stub | None:
        marked = [name for name, info in candidates.items() if self._is_marked(info, 0)]
        if not marked:
            return None
        start = len(MAGIC)
        first = self._read(candidates[marked[0]], 0)
        fingerprint = first[start : start + FINGERPRINT_BYTES].hex()
        for name in marked:
            self._compare(name, candidates[name], fingerprint)
        stubbed = set(marked)
        for name in candidates.keys() - stubbed:
            info = candidates[name]
            if region(info, 0)[1] < LEAST_MARKED_BYTES:
                # It has no header, and belongs to a stub if it is filled.
                if self._read(info, 0) == page(fingerprint, name, 0, region(info, 0)[1]):
                    self._compare(name, info, fingerprint)
                    stubbed.add(name)
                continue
            for expert in range(1, info.shape[0]):
                if self._is_marked(info, expert):
                    raise self._damaged(name, info, 0)
        return Stub(fingerprint, frozenset(stubbed))

    def _read(self, info: TensorInfo, expert: int, num_bytes: int | None = None) -> bytes:
        begin, length = region(info, expert)
        return os.pread(self._descriptors[info.file], length if num_bytes is None else min(num_bytes, length), begin)

    def _is_marked(self, info: TensorInfo, expert: int) -> bool:
        return region(info, expert)[1] >= LEAST_MARKED_BYTES and self._read(info, expert, len(MAGIC)) == MAGIC

    def _compare(self, name: str, info: TensorInfo, fingerprint: str) -> None:
        for expert in range(info.shape[0]):
            if self._read(info, expert) != page(fingerprint, name, expert, region(info, expert)[1]):
                raise self._damaged(name, info, expert)

    def _damaged(self, name: str, info: TensorInfo, expert: int) -> CheckpointError:
        return CheckpointError(
            f"{self._files[info.file]}: it is a stub, but its page for expert {expert} of tensor {name!r} is damaged; "
            "make it again with `dflash-moe model stub`"
        )
