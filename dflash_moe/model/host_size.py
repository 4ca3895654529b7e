"""How many bytes the host's own part of a model takes: its dense weights, and the keys and values
of one token. Nothing is loaded; where a configuration leaves something open, the answer is too
large and never too small.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_moe.model.architecture import load_architecture

if TYPE_CHECKING:
    from dflash_moe.model.checkpoint import Checkpoint
    from dflash_moe.model.spec import ModelSpec

# A token's keys and values of one layer are also there in float32 while attention computes in
# plain operators.
_FLOAT_BYTES = 4
# Layers of this kind keep a state of fixed size and no keys.
_WITHOUT_KEYS = "linear_attention"


@dataclass(frozen=True, slots=True)
class HostSize:
    """`dense_values` are the numbers of all weights but routed experts, and `stored_bytes` what the
    checkpoint stores them in. A token takes `kv_values` numbers in all layers together; to attend
    over it, `gathered_values` more are there in one layer at a time. `max_positions` is 0 where the
    configuration sets no limit.
    """

    dense_values: int
    stored_bytes: int
    kv_values: int
    gathered_values: int
    max_positions: int

    def dense_bytes(self, item_bytes: int) -> int:
        """Returns the bytes of the dense weights where each takes `item_bytes`."""
        return self.dense_values * item_bytes

    def gathered_bytes(self, item_bytes: int) -> int:
        """Returns the bytes of a token that torch's attention reads, with its float32 copy."""
        return self.gathered_values * (item_bytes + _FLOAT_BYTES)


def host_size(checkpoint: Checkpoint, spec: ModelSpec) -> HostSize:
    """Returns the sizes of the host's part. Errors are those of `load_architecture`."""
    architecture = load_architecture(checkpoint)
    parameters = {id(value): value.numel() for value in architecture.model.parameters()}
    for experts in architecture.experts.values():
        for value in experts.parameters():
            parameters.pop(id(value), None)
    routed = sum(layer.num_experts * layer.expert_bytes for layer in spec.layers)
    stored = sum(info.num_bytes for info in checkpoint.stored.values())
    text = architecture.config.get_text_config()
    per_layer, gathered = _values_of_layer(text)
    positions = int(getattr(text, "max_position_embeddings", 0) or 0)
    kv_values = _num_layers(text) * per_layer
    return HostSize(sum(parameters.values()), max(0, stored - routed), kv_values, gathered, positions)


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
