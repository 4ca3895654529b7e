"""Finds the matrices of a host's own layers in a quantised checkpoint, where they lie as they are
stored, so that they can be packed without being dequantised first.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_moe.model.dequantize import dequantize
from dflash_moe.model.expert_tensors import matrix_source
from dflash_moe.model.tensor_names import Conversion
from dflash_moe.model.weight_formats import FLOATS, FORMATS, STORED_NAMES

if TYPE_CHECKING:
    from dflash_moe.model.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix [outputs, inputs] as a checkpoint stores it. `source` is what the core packs."""

    checkpoint: Checkpoint
    name: str
    format_name: str
    source: tuple[Any, ...]
    outputs: int
    inputs: int

    def rows(self, chosen: Sequence[int]) -> np.ndarray[Any, Any]:
        """Returns the weights of some outputs in float32 [len(chosen), inputs], by the NumPy
        dequantisers that share no code with the kernels.
        """
        if self.checkpoint.tensors[self.name].scales is not None:
            # Scales belong to squares of outputs, so that rows are not dequantised alone.
            return self.checkpoint.values(self.name)[list(chosen)]
        data = self.checkpoint.raw(self.name).reshape(self.outputs, -1)[list(chosen)]
        return dequantize(self.format_name, data, len(chosen), self.inputs)


def stored_matrices(model: Any, checkpoint: Checkpoint) -> dict[str, StoredMatrix]:
    """Returns by parameter name the weights of linear layers and embeddings of `model`, which is on
    the meta device, that the checkpoint stores quantised, one tensor each and in the parameter's
    own shape. Others, which the loader joins, splits or turns, are not among them, nor what expands
    the latents of MLA, which is cut into heads.
    """
    from torch import nn

    shapes = {
        f"{name}.weight": tuple(module.weight.shape)
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, nn.Embedding) and not name.endswith(".kv_b_proj")
    }
    found = {}
    for target, recipe in Conversion.of(model, checkpoint).recipes.items():
        names = recipe.names()
        if recipe.converter is not None or len(names) != 1 or len(shapes.get(target, ())) != 2:
            continue
        info = checkpoint.tensors[names[0]]
        format_name = STORED_NAMES.get(info.dtype, "")
        outputs, inputs = shapes[target]
        if format_name not in FORMATS or format_name in FLOATS or tuple(info.shape) != (outputs, inputs):
            continue
        source = matrix_source(checkpoint, names[0], outputs, inputs)
        found[target] = StoredMatrix(checkpoint, names[0], format_name, source, outputs, inputs)
    return found
