"""A short checksum of a tensor's content, with which two programs that have the same file see that
they do, without reading it.

The supervisor of a program takes it from the workers' checkpoint, and the program's side from the
bytes that it is given when it loads the tensor (csrc/c_interface). Both must take the same pieces.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os
from collections.abc import Callable

from dflash_moe import _core
from dflash_moe.errors import CheckpointError
from dflash_moe.model.checkpoint import Checkpoint

NUM_PIECES = 16
PIECE_BYTES = 256
SAMPLE_BYTES = NUM_PIECES * PIECE_BYTES


def piece_offsets(num_bytes: int) -> tuple[int, ...]:
    """Returns where the pieces begin in a tensor of more than SAMPLE_BYTES: the first at its begin,
    the last at its end, the others between them at equal steps, rounded down.
    """
    return tuple((num_bytes - PIECE_BYTES) * piece // (NUM_PIECES - 1) for piece in range(NUM_PIECES))


def sample_of(num_bytes: int, read: Callable[[int, int], bytes]) -> int:
    """Returns the payload checksum (csrc/base/checksum.h) of the pieces one after another, or of
    all where the tensor has at most SAMPLE_BYTES. `read` takes an offset in the tensor and a
    number of bytes.
    """
    if num_bytes <= SAMPLE_BYTES:
        return _core.checksum(read(0, num_bytes))
    return _core.checksum(b"".join(read(offset, PIECE_BYTES) for offset in piece_offsets(num_bytes)))


def tensor_sample(checkpoint: Checkpoint, name: str) -> int:
    """Returns the sample of a tensor of a GGUF checkpoint, a number of 32 bits.

    Raises CheckpointError where the tensor is missing, the file cannot be read, or the checkpoint
    is a stub and holds a page in the tensor's place.
    """
    info = checkpoint.stored.get(name)
    if info is None:
        raise CheckpointError(f"checkpoint {checkpoint.path}: tensor {name!r} is missing")
    checkpoint.refuse_stubbed(name)
    path = checkpoint.files[info.file]
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:

            def read(offset: int, num_bytes: int) -> bytes:
                data = os.pread(descriptor, num_bytes, info.offset + offset)
                if len(data) != num_bytes:
                    raise CheckpointError(f"{path}: tensor {name!r} ends early; the file was cut while it was open")
                return data

            return sample_of(info.num_bytes, read)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
