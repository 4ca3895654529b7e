"""Names an expert by the bytes that a checkpoint has for it, so that panels which were packed from
other files are known to be of the same weights.

The digest is BLAKE3 over the expert's tensors in the order of `FfnSpec`: of each its key there, its
dtype and shape, and its bytes as they lie in the file. It is taken of what is stored and not of the
values, so that equal weights in another layout have another name.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blake3 import blake3

from dflash_moe.errors import CheckpointError
from dflash_moe.model.ffn import TENSOR_KEYS

if TYPE_CHECKING:
    from dflash_moe.model.checkpoint import Checkpoint
    from dflash_moe.model.ffn import FfnSpec, TensorPattern
    from dflash_moe.model.formats.stored_tensor import ScaleInfo, TensorInfo

# What is read between two looks at whether to stop: a millisecond of hashing.
_STEP_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class _Slice:
    """Bytes of a file, and the line that goes before them into the digest."""

    line: str
    file: int
    offset: int
    num_bytes: int


def source_digest(checkpoint: Checkpoint, ffn: FfnSpec, expert_id: int, is_over: Callable[[], bool]) -> str | None:
    """Returns the digest of an expert in hexadecimal, None where `is_over` said so first. It reads
    the files and maps nothing. Raises CheckpointError for a file that cannot be read.
    """
    digest = blake3()
    for piece in _slices(checkpoint, ffn, expert_id):
        digest.update(piece.line.encode())
        path = checkpoint.files[piece.file]
        try:
            with open(path, "rb", buffering=0) as file:
                at, end = piece.offset, piece.offset + piece.num_bytes
                while at < end:
                    if is_over():
                        return None
                    read = os.pread(file.fileno(), min(_STEP_BYTES, end - at), at)
                    if not read:
                        raise CheckpointError(f"{path}: ends at byte {at}, its header promises {end}; copy it again")
                    digest.update(read)
                    at += len(read)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def num_experts(checkpoint: Checkpoint, ffn: FfnSpec) -> int:
    """Returns how many experts the layer has in the checkpoint."""
    pattern = ffn.up_tensor
    if pattern.is_packed:
        info = checkpoint.tensors.get(pattern.name)
        return info.shape[0] if info is not None else 0
    count = 0
    while pattern.tensor_name(count) in checkpoint.tensors:
        count += 1
    return count


def _slices(checkpoint: Checkpoint, ffn: FfnSpec, expert_id: int) -> Iterator[_Slice]:
    for key in TENSOR_KEYS:
        pattern: TensorPattern | None = getattr(ffn, key)
        if pattern is None:
            continue
        info = checkpoint.tensors.get(pattern.tensor_name(expert_id))
        if info is None:
            raise CheckpointError(f"checkpoint {checkpoint.path}: tensor {pattern.tensor_name(expert_id)!r} is missing")
        place = f"{key} {pattern.part} {pattern.is_transposed}"
        yield _part(place, info, info.shape[0] if pattern.is_packed else 0, expert_id)
        apart = [("scales", info.scales)]
        if (packed := info.packed) is not None:
            place += f" {packed.packing} {packed.group} {packed.zero_bias}"
            apart += [("zeros", packed.zeros), ("shape", packed.shape), ("g_idx", packed.g_idx)]
        for name, found in apart:
            if found is not None:
                # Scales of a tensor that packs all experts are a row for each of them.
                yield _part(f"{place} {name}", found, info.shape[0] if pattern.is_packed else 0, expert_id)


def _part(place: str, info: TensorInfo | ScaleInfo, num_rows: int, row: int) -> _Slice:
    """Returns the part of expert `row` where the first dimension is that of `num_rows` experts, and
    otherwise the whole.
    """
    if not num_rows or not info.shape or info.shape[0] != num_rows:
        return _Slice(f"{place} {info.dtype} {list(info.shape)}\n", info.file, info.offset, info.num_bytes)
    size = info.num_bytes // num_rows
    return _Slice(f"{place} {info.dtype} {list(info.shape[1:])}\n", info.file, info.offset + row * size, size)
