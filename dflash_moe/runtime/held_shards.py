"""The placement as the holders see it: the shards that each of them loads and answers for.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_moe import _core
from dflash_moe.model.checkpoint import shard_fingerprint

if TYPE_CHECKING:
    from dflash_moe.model.spec import LayerSpec, ModelSpec
    from dflash_moe.placement import Placement


@dataclass(frozen=True, slots=True)
class HeldShard:
    """One shard at one holder, with everything that loading it and calling it need."""

    layer: LayerSpec
    shard_id: int
    experts: tuple[int, ...]
    # The holder keeps the weights in this format, which can differ from the checkpoint's.
    weight_dtype: str
    weights_fingerprint: int
    numerics: str
    layout: str


def shards_by_holder(spec: ModelSpec, placement: Placement) -> dict[str, list[HeldShard]]:
    """Returns the shards of every holder that has any, by its name, in the order of the layers."""
    held: dict[str, list[HeldShard]] = {}
    for layer, shards in zip(spec.layers, placement.layers, strict=True):
        for shard in shards:
            experts = tuple(shard.experts)
            weight_dtype = layer.weight_dtype if shard.weights == "auto" else layer.resident_dtype(shard.weights)
            fingerprint = shard_fingerprint(spec.fingerprint, layer.name, experts, weight_dtype, shard.numerics)
            held.setdefault(shard.holder, []).append(
                HeldShard(layer, shard.shard_id, experts, weight_dtype, fingerprint, shard.numerics, shard.layout)
            )
    return held


def shapes_of(shards: Sequence[HeldShard]) -> list[_core.ShardShape]:
    """Returns the shapes for which the slots of a holder of these shards must be wide enough."""
    return [
        _core.ShardShape(held.layer.ffn.in_size, held.layer.ffn.out_size, held.layer.top_k, len(held.experts))
        for held in shards
    ]
