"""The placement as the holders see it: the shards that each of them loads and answers for.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    # Another holder is the shard's first; this one stands in for it.
    is_replica: bool = False


def shards_by_holder(spec: ModelSpec, placement: Placement) -> dict[str, list[HeldShard]]:
    """Returns the shards of every holder that has any, by its name, in the order of the layers. A
    shard with replicas is listed at each of its holders.
    """
    held: dict[str, list[HeldShard]] = {}
    for layer, shards in zip(spec.layers, placement.layers, strict=True):
        for shard in shards:
            experts = tuple(shard.experts)
            weight_dtype = layer.weight_dtype if shard.weights == "auto" else layer.resident_dtype(shard.weights)
            fingerprint = shard_fingerprint(spec.fingerprint, layer.name, experts, weight_dtype, shard.numerics)
            for holder in shard.holders:
                layout = placement.layout_of(holder)
                one = HeldShard(layer, shard.shard_id, experts, weight_dtype, fingerprint, shard.numerics, layout)
                held.setdefault(holder, []).append(replace(one, is_replica=holder != shard.holder))
    return held


def holders_by_shard(spec: ModelSpec, placement: Placement) -> dict[tuple[int, int], tuple[str, ...]]:
    """Returns the holders of every shard, by (index of the layer, id of the shard), preferred
    first.
    """
    return {
        (layer.index, shard.shard_id): shard.holders
        for layer, shards in zip(spec.layers, placement.layers, strict=True)
        for shard in shards
    }


def shapes_of(shards: Sequence[HeldShard]) -> list[_core.ShardShape]:
    """Returns the shapes for which the slots of a holder of these shards must be wide enough."""
    return [
        _core.ShardShape(held.layer.ffn.in_size, held.layer.ffn.out_size, held.layer.top_k, len(held.experts))
        for held in shards
    ]
