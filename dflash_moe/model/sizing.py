"""What a plan must know of a checkpoint before anything is loaded: the layers with routed experts,
and what the host's own part takes.

A GGUF file of an architecture that is described here says all of it itself, so that neither torch
nor transformers is imported. For other checkpoints the model is built on the meta device, which
imports both. What both ways find is the same; a test compares them.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from dflash_moe.model.architecture import load_architecture
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.gguf_architectures.gguf_experts import EXPERTS, experts_of
from dflash_moe.model.gguf_architectures.reading import ARCHITECTURES, gguf_settings
from dflash_moe.model.gguf_architectures.record import GgufArchitecture, GgufFile
from dflash_moe.model.host_size import HostSize, dense_size, dense_size_of_tensors, host_size
from dflash_moe.model.spec import LayerSpec, spec_of, stored_dtype

# Tensors with these names are tables of angles, which transformers computes itself.
_TABLES = "rope_"


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """`layers` are those with routed experts, and the model runs in `dtype`. Of layers that were
    found without the model's own code only sizes, formats and formulas are those of its spec.
    """

    path: Path
    layers: tuple[LayerSpec, ...]
    dtype: str
    host: HostSize


def model_sizes(checkpoint: Checkpoint) -> ModelSizes:
    """Returns the sizes of a model. Errors are those of `model_spec`."""
    record = _record(checkpoint)
    if record is not None and (found := _sizes_of_file(checkpoint, record)) is not None:
        return found
    architecture = load_architecture(checkpoint)
    spec = spec_of(checkpoint, architecture)
    size = host_size(dense_size(architecture, checkpoint), architecture.config.get_text_config())
    return ModelSizes(checkpoint.path, spec.layers, spec.dtype, size)


def _record(checkpoint: Checkpoint) -> GgufArchitecture | None:
    return ARCHITECTURES.get(str((checkpoint.metadata or {}).get("general.architecture")))


def _sizes_of_file(checkpoint: Checkpoint, record: GgufArchitecture) -> ModelSizes | None:
    """Returns what the file says of itself, None where workers cannot compute a layer: the model's
    own code then says why, or how.
    """
    settings = gguf_settings(checkpoint)
    file = GgufFile(checkpoint, str(checkpoint.config()["general.architecture"]))
    own = {name: info for name, info in checkpoint.tensors.items() if file.layer_of(name) < file.num_layers()}
    found = experts_of(checkpoint)
    if any(name in own for name in found.left_out):
        return None
    layers = tuple(layer for layer in found.spec.layers if layer.index < file.num_layers())
    if not layers:
        return None
    dense = {name: info for name, info in own.items() if EXPERTS not in name and not name.startswith(_TABLES)}
    remade = frozenset(name for name in dense if name.split(".")[-2] in record.remade)
    size = host_size(dense_size_of_tensors(dense, remade), SimpleNamespace(**settings))
    return ModelSizes(checkpoint.path, layers, stored_dtype(checkpoint, layers[0].ffn), size)
