"""Finds the matrices of a host's own layers in a quantised checkpoint, where they lie as they are
stored, so that they can be packed without being dequantised first.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_moe.model.expert_tensors import matrix_source, slice_source
from dflash_moe.model.formats.dequantize import dequantize
from dflash_moe.model.formats.weight_formats import FLOATS, FORMATS, STORED_NAMES
from dflash_moe.model.tensor_names import Conversion

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


@dataclass(frozen=True, slots=True)
class StoredLatents:
    """The matrices by which an MLA layer's heads read latents, as a checkpoint stores them: `keys`
    [num_heads, latent, nope] and `values` [num_heads, value, latent] are names of tensors, and
    `formats` theirs.
    """

    checkpoint: Checkpoint
    keys: str
    values: str
    formats: tuple[str, str]

    def key_sources(self) -> list[tuple[Any, ...]]:
        """Returns [latent, nope] of each head as the core packs it."""
        return self._sources(self.keys)

    def value_sources(self) -> list[tuple[Any, ...]]:
        """Returns [value, latent] of each head as the core packs it."""
        return self._sources(self.values)

    def joined(self) -> np.ndarray[Any, Any]:
        """Returns the weight of kv_b_proj, float32 [num_heads * (nope + value), latent], by the
        NumPy dequantisers.
        """
        keys, values = self.checkpoint.values(self.keys), self.checkpoint.values(self.values)
        return np.concatenate([keys.transpose(0, 2, 1), values], axis=1).reshape(-1, values.shape[2])

    def _sources(self, name: str) -> list[tuple[Any, ...]]:
        num_heads, outputs, inputs = self.checkpoint.tensors[name].shape
        return [slice_source(self.checkpoint, name, head, outputs, inputs) for head in range(num_heads)]


def is_plain(checkpoint: Checkpoint) -> bool:
    """Says whether the loader of transformers takes the files as they are."""
    return checkpoint.metadata is None and all(info.scales is None for info in checkpoint.tensors.values())


def stored_latents(model: Any, checkpoint: Checkpoint) -> dict[str, StoredLatents]:
    """Returns by the name of the attention module what a GGUF checkpoint stores quantised for
    absorbed attention, apart for keys and values. Others, stored as floats or as one matrix, are
    not among them; the loader joins or keeps these.
    """
    found = {}
    for target, recipe in Conversion.of(model, checkpoint).recipes.items() if checkpoint.metadata is not None else ():
        owner, _, leaf = target.rpartition(".kv_b_proj.")
        if leaf != "weight" or recipe.converter is None:
            continue
        keys, values = (recipe.sources[pattern][0] for pattern in recipe.converter.source_patterns)
        formats = tuple(STORED_NAMES.get(checkpoint.tensors[name].dtype, "") for name in (keys, values))
        if all(name in FORMATS and name not in FLOATS for name in formats):
            found[owner] = StoredLatents(checkpoint, keys, values, (formats[0], formats[1]))
    return found


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
        if not FORMATS[format_name].has_panels:
            continue
        source = matrix_source(checkpoint, names[0], outputs, inputs)
        found[target] = StoredMatrix(checkpoint, names[0], format_name, source, outputs, inputs)
    return found
