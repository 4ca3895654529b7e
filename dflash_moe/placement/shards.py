"""What a placement consists of: layers with experts to place, and the shards they become.

A shard is the unit of reduction: the host adds shards in ascending id, so swapping two holders
changes no result.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from dflash_moe.topology.numerics import DEFAULT_NUMERICS


class PlacedLayer(Protocol):
    """What placement needs to know of a layer with routed experts."""

    @property
    def index(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def num_experts(self) -> int: ...
    def resident_bytes(self, weights: str) -> int:
        """Of one expert at a worker with this `weights`."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Experts of one layer that are computed and summed together. `holder` is a worker's name or
    HOST.

    `weights` and `numerics` (the class it computes in) as that says. `layout`: packed in the
    holder's memory, or mapped: it computes from the checkpoint's pages and needs none.
    """

    shard_id: int
    holder: str
    experts: tuple[int, ...]  # ascending
    weights: str = "auto"
    numerics: str = DEFAULT_NUMERICS
    layout: str = "packed"


@dataclass(frozen=True, slots=True)
class Placement:
    """`layers[i]` are the shards of the i-th layer, ascending in shard id; every expert is in
    exactly one.

    `expert_bytes[i]` are those of one expert of that layer, by the `weights` of the shards that
    hold it.
    """

    layers: tuple[tuple[Shard, ...], ...]
    expert_bytes: tuple[Mapping[str, int], ...]

    def bytes_by_holder(self) -> dict[str, int]:
        """Weight bytes in memory by holder, for the holders that have experts."""
        found: dict[str, int] = {}
        for shards, sizes in zip(self.layers, self.expert_bytes, strict=True):
            for shard in shards:
                size = sizes[shard.weights] if shard.layout == "packed" else 0
                found[shard.holder] = found.get(shard.holder, 0) + len(shard.experts) * size
        return found

    def shards_of(self, holder: str) -> tuple[tuple[int, Shard], ...]:
        """(position of the layer, shard) of one holder."""
        return tuple((at, shard) for at, shards in enumerate(self.layers) for shard in shards if shard.holder == holder)
