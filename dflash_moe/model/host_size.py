"""How many bytes the host's own part of a model takes: all weights but routed experts, and the keys
and values of one token. Plan, inspection and documents have these numbers from here alone.

Nothing is loaded. Where a configuration leaves something open, the answer is too large and never
too small.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_moe.model.formats.stored_tensor import TensorInfo
from dflash_moe.model.formats.weight_formats import FLOATS, FORMATS, STORED_NAMES, WeightFormat

if TYPE_CHECKING:
    from dflash_moe.model.architecture import Architecture
    from dflash_moe.model.checkpoint import Checkpoint

# A token's keys and values of one layer are also there in float32 while attention computes in
# plain operators.
_FLOAT_BYTES = 4
# Layers of this kind keep a state of fixed size and no keys.
_WITHOUT_KEYS = "linear_attention"


@dataclass(frozen=True, slots=True)
class DenseSize:
    """The weights of a model without its routed experts.

    The processor keeps `packed_values` of them as the checkpoint stores them, quantised, in
    `packed_bytes`. It keeps the `other_values` in the dtype in which the model computes, and torch
    keeps all of them so.
    """

    packed_bytes: int
    packed_values: int
    other_values: int

    def kept_bytes(self, item_bytes: int) -> int:
        """Returns the bytes at the processor, where a number of the model takes `item_bytes`."""
        return self.packed_bytes + self.other_values * item_bytes

    def torch_bytes(self, item_bytes: int) -> int:
        """Returns the bytes where torch's operators compute, as they do on a card."""
        return (self.packed_values + self.other_values) * item_bytes


@dataclass(frozen=True, slots=True)
class HostSize:
    """A token takes `kv_values` numbers in all layers together; to attend over it,
    `gathered_values` more are there in one layer at a time. `max_positions` is 0 where the
    configuration sets no limit.
    """

    dense: DenseSize
    kv_values: int
    gathered_values: int
    max_positions: int

    def gathered_bytes(self, item_bytes: int) -> int:
        """Returns the bytes of a token that torch's attention reads, with its float32 copy."""
        return self.gathered_values * (item_bytes + _FLOAT_BYTES)


def host_size(dense: DenseSize, text: Any) -> HostSize:
    """Returns the sizes of the host's part, of which `text` is the configuration: an object that
    has the fields of transformers.
    """
    per_layer, gathered = _values_of_layer(text)
    positions = int(getattr(text, "max_position_embeddings", 0) or 0)
    return HostSize(dense, _num_layers(text) * per_layer, gathered, positions)


def dense_size(architecture: Architecture, checkpoint: Checkpoint) -> DenseSize:
    """Returns what the weights of the model take, of which the processor packs what
    `dense_tensors.py` finds.
    """
    from dflash_moe.model.dense_tensors import is_plain, stored_latents, stored_matrices

    # Buffers such as the biases of routers are among them, and tied ones are there once.
    state = {id(value): value.numel() for value in architecture.model.state_dict(keep_vars=True).values()}
    for experts in architecture.experts.values():
        for value in experts.state_dict(keep_vars=True).values():
            state.pop(id(value), None)
    packed: list[TensorInfo] = []
    if not is_plain(checkpoint):
        packed = [checkpoint.tensors[one.name] for one in stored_matrices(architecture.model, checkpoint).values()]
        for one in stored_latents(architecture.model, checkpoint).values():
            packed += [checkpoint.tensors[one.keys], checkpoint.tensors[one.values]]
    return _joined(packed, sum(state.values()))


def dense_size_of_tensors(tensors: dict[str, TensorInfo], remade: frozenset[str]) -> DenseSize:
    """Returns the same from the tensors of a checkpoint that are the host's. The names in `remade`
    are of those that the loader makes anew, in the dtype in which the model computes.
    """
    packed = [info for name, info in tensors.items() if name not in remade and _is_packed(info)]
    return _joined(packed, sum(math.prod(info.shape) for info in tensors.values()))


def _joined(packed: list[TensorInfo], num_values: int) -> DenseSize:
    values = sum(math.prod(info.shape) for info in packed)
    num_bytes = sum(_format_of(info).resident_bytes(math.prod(info.shape[:-1]), info.shape[-1]) for info in packed)
    return DenseSize(num_bytes, values, num_values - values)


def _is_packed(info: TensorInfo) -> bool:
    """Says whether a tensor is a quantised matrix, or the matrices of some heads, that the
    processor's kernels read.
    """
    name = STORED_NAMES.get(info.dtype, "")
    return name in FORMATS and name not in FLOATS and len(info.shape) > 1 and bool(FORMATS[name].has_panels)


def _format_of(info: TensorInfo) -> WeightFormat:
    return FORMATS[STORED_NAMES[info.dtype]]


def _num_layers(text: Any) -> int:
    kinds = getattr(text, "layer_types", None)
    if kinds:
        return sum(kind != _WITHOUT_KEYS for kind in kinds)
    return _number(text, "num_hidden_layers") or 1


def _values_of_layer(text: Any) -> tuple[int, int]:
    """Returns how many numbers a layer stores of a token, and how many attention reads of it, which
    is more where latents are expanded (MLA).
    """
    heads = _number(text, "num_attention_heads") or 1
    latent = _number(text, "kv_lora_rank")
    if latent:
        rotated = _number(text, "qk_rope_head_dim")
        keys = _number(text, "qk_nope_head_dim") + rotated
        return latent + rotated, heads * (keys + (_number(text, "v_head_dim") or keys))
    size = _number(text, "head_dim") or -(-_number(text, "hidden_size") // heads)
    widest = max(size, _number(text, "global_head_dim"))
    values = 2 * widest * (_number(text, "num_key_value_heads") or heads)
    return values, values


def _number(text: Any, field: str) -> int:
    found = getattr(text, field, None)
    return found if type(found) is int and found > 0 else 0
