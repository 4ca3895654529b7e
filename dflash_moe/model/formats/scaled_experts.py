"""Multiplies an expert's matrix by its scale while the expert is loaded, for checkpoints that keep
one factor per expert beside the matrices.

The program that wrote such a file multiplies the matrix's products instead. In exact arithmetic
that is the same; here every weight is rounded once more, by at most half a unit of its last place.
Only float32 weights are multiplied: a narrower format would lose bits, and blocks would have to be
made anew.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import fcntl
import os
from typing import Any

from dflash_moe.errors import UnsupportedError


def scaled_source(source: Any, factor: float) -> Any:
    """Returns a matrix as `_core` takes it with the f32 values of `source` times `factor`, in
    memory of its own: the mapping of an anonymous file, which goes when the source does.

    `source` must have its rows one after another. Raises UnsupportedError where it has not, or
    where the system gives no memory.
    """
    import numpy as np

    from dflash_moe import _core

    file, offset, format_name, outputs, inputs, output_stride, input_stride = source
    if (format_name, output_stride, input_stride) != ("f32", inputs, 1):
        raise UnsupportedError(
            f"a scale per expert on {format_name} weights with steps of {output_stride} and {input_stride}; "
            "it is applied to f32 weights with their rows one after another"
        )
    values = np.frombuffer(file.read(offset, outputs * inputs * 4), np.float32) * np.float32(factor)
    try:
        descriptor = os.memfd_create("scaled expert", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with open(descriptor, "wb", closefd=False) as out:
                out.write(values.tobytes())
            # Nobody need look in each call whether it has changed.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            mapped = _core.MappedFile(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UnsupportedError(f"an expert's scaled weights need {values.nbytes} bytes: {error.strerror}") from None
    return mapped, 0, "f32", outputs, inputs, inputs, 1
