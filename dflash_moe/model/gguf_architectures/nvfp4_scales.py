"""Refuses GGUF files whose NVFP4 tensors have a further scale each.

llama.cpp multiplies what such a tensor gives by the numbers in a tensor of its own. No reader here
applies those, so that the model would compute with wrong numbers.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_moe.errors import UnsupportedError

if TYPE_CHECKING:
    from dflash_moe.model.checkpoint import Checkpoint

_WEIGHT, _SCALE = ".weight", ".scale"


def check_nvfp4_scales(checkpoint: Checkpoint) -> None:
    """Raises UnsupportedError naming the first tensor in NVFP4 that has one of scales beside it."""
    for name, info in checkpoint.stored.items():
        scale = name.removesuffix(_WEIGHT) + _SCALE
        if info.dtype == "NVFP4" and scale in checkpoint.stored:
            raise UnsupportedError(
                f"{checkpoint.files[info.file]}: tensor {name!r} has format NVFP4 with a further scale in {scale!r}, which is "
                "not applied here; use a file in another format"
            )
