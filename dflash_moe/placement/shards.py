"""The parts of a placement: layers with experts to place, and the shards that these become.

A shard is the unit of reduction. The host adds the shards of a layer in the order of their ids, so
that swapping two holders changes no result.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from dflash_moe.topology.numerics import DEFAULT_NUMERICS


class PlacedLayer(Protocol):
    """What placement needs to know of a layer with routed experts. `index` and `name` are those of
    the layer table, and `num_experts` counts its routed experts.
    """

    @property
    def index(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def num_experts(self) -> int: ...
    def resident_bytes(self, weights: str) -> int:
        """Returns the bytes in memory of one expert at a worker with this setting of `weights`."""

    def resident_dtype(self, weights: str) -> str:
        """Returns the format that a worker keeps with this setting of `weights`."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Experts of one layer that are computed and summed together. `holder` is a worker's name or
    HOST, and `experts` are their ids in ascending order. `replicas` are the workers that hold them
    too and stand in for `holder`, preferred first.

    `weights` is that setting of the holder, and `numerics` the class that it computes in.
    """

    shard_id: int
    holder: str
    experts: tuple[int, ...]
    weights: str = "auto"
    numerics: str = DEFAULT_NUMERICS
    replicas: tuple[str, ...] = ()

    @property
    def holders(self) -> tuple[str, ...]:
        """All workers that hold the shard, the first one first."""
        return (self.holder, *self.replicas)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where every expert is. `layers[i]` are the shards of the i-th layer with routed experts, in
    ascending order of their ids, and every expert is in exactly one of them.

    `expert_bytes[i]` are the bytes of one expert of that layer, by the `weights` of its holder.
    `mapped` are the holders that compute from the pages of the mapped checkpoint and need no memory
    of their own; all others have packed their weights. Those in `slots` would be mapped for lack of
    memory alone: where panels are kept on disk, they have the slots that their memory is room for.
    """

    layers: tuple[tuple[Shard, ...], ...]
    expert_bytes: tuple[Mapping[str, int], ...]
    mapped: frozenset[str] = frozenset()
    slots: frozenset[str] = frozenset()

    def bytes_by_holder(self) -> dict[str, int]:
        """Returns the bytes of weights in memory of each holder that has experts, 0 for those that
        compute from the mapped checkpoint.
        """
        found: dict[str, int] = {}
        for shards, sizes in zip(self.layers, self.expert_bytes, strict=True):
            for shard in shards:
                for holder in shard.holders:
                    size = 0 if holder in self.mapped else sizes[shard.weights]
                    found[holder] = found.get(holder, 0) + len(shard.experts) * size
        return found

    def largest_layer(self, holder: str) -> int:
        """Returns the bytes that one layer's experts take at most where a holder packs them."""
        return max(
            sum(len(shard.experts) * sizes[shard.weights] for shard in shards if holder in shard.holders)
            for shards, sizes in zip(self.layers, self.expert_bytes, strict=True)
        )

    def layout_of(self, holder: str) -> str:
        """Returns `packed` or `mapped`, which is that of all shards of a holder."""
        return "mapped" if holder in self.mapped else "packed"

    def shards_of(self, holder: str) -> tuple[tuple[int, Shard], ...]:
        """Returns (position of the layer, shard) for every shard of one holder."""
        return tuple((at, shard) for at, shards in enumerate(self.layers) for shard in shards if shard.holder == holder)
