"""Hands torch tensors of the processor to the core as addresses, and checks what an address cannot
say.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import torch

from dflash_moe.errors import UnsupportedError

DTYPE_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

# Address, bytes from row to row, dtype, and number of rows: what operators of the core take.
Rows = tuple[int, int, str, int]


def rows_of(tensor: torch.Tensor) -> Rows:
    """Returns a tensor [..., width] as rows: a dense one, or a matrix whose rows lie apart with
    adjacent values. The caller keeps the tensor alive. Raises UnsupportedError for a tensor of a
    device or of another dtype.
    """
    name = DTYPE_NAMES.get(tensor.dtype)
    if name is None or not tensor.is_cpu:
        raise UnsupportedError(f"a host operator got {tensor.dtype} on {tensor.device}, expected f32, f16 or bf16 on cpu")
    width = tensor.shape[-1]
    stride = tensor.stride(0) if tensor.ndim == 2 else width
    return tensor.data_ptr(), stride * tensor.element_size(), name, tensor.numel() // width if width else 0


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor`, or a dense copy of it where it is not."""
    return tensor if tensor.is_contiguous() else tensor.contiguous()
