"""Gives shards that are fixed already to the holders of a topology. The shard map decides the bits
of a layer and a holder decides none, so that a run can be proven again on other machines.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dflash_moe.errors import ConfigError, UnsupportedError
from dflash_moe.placement.policies import host_budget
from dflash_moe.placement.shards import Shard
from dflash_moe.topology import HOST, Topology

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dflash_moe.placement.preset import Offer
    from dflash_moe.placement.shards import PlacedLayer, Placement
    from dflash_moe.topology.spec import ShardMap, ShardTerms


def impose(topology: Topology, shards: ShardMap, dense: Mapping[str, str] | None = None) -> Topology:
    """Returns the topology with this shard map in the place of its policy. Where the map says which
    classes, and `dense` the class of the host's own matrices by format, nobody's `activations`
    count.
    """
    workers = tuple(replace(worker, experts=None) for worker in topology.workers)
    host = topology.host
    if _says_classes(shards):
        workers = tuple(replace(worker, activations=None) for worker in workers)
        host = replace(host, activations=None)
    placement = replace(topology.placement, imposed=shards, dense=dense)
    return replace(topology, workers=workers, host=host, placement=placement)


def assign(layers: Sequence[PlacedLayer], topology: Topology, shards: ShardMap) -> tuple[tuple[Shard, ...], ...]:
    """Returns the shards with their holders. The host takes the first ones that fit its budget; a
    worker that has room is preferred, and among these the one with the fewest experts of the layer.

    Raises ConfigError for a map of another model.
    """
    check_map(layers, shards)
    budget = host_budget(layers, topology)
    left = {worker.name: worker.memory for worker in topology.workers}
    found = []
    for layer, listed in zip(layers, shards, strict=True):
        taken = dict.fromkeys(left, 0)
        row = []
        for shard_id, terms in enumerate(listed):
            num_bytes = len(terms.experts) * layer.resident_bytes(terms.weights)
            if num_bytes <= budget and terms.weights == "auto":
                holder, budget = HOST, budget - num_bytes
            else:
                holder = _worker_for(num_bytes, left, taken)
                taken[holder] += len(terms.experts)
                left[holder] = _without(left[holder], num_bytes)
            numerics = terms.numerics or topology.numerics_of(holder)
            row.append(Shard(shard_id, holder, terms.experts, terms.weights, numerics))
        found.append(tuple(row))
    return tuple(found)


def settle(placement: Placement, shards: ShardMap, offers: Mapping[str, Offer]) -> Placement:
    """Returns the placement with the classes of the map, where it says any, now that holders have
    said what they offer.

    Raises UnsupportedError where a holder does not compute a class, or has other bits in it because
    its card is of another kind.
    """
    if not _says_classes(shards):
        return placement
    settled = []
    for listed, placed in zip(shards, placement.layers, strict=True):
        for terms, shard in zip(listed, placed, strict=True):
            for holder in shard.holders:
                _check_offer(terms, holder, offers[holder])
        settled.append(tuple(replace(shard, numerics=terms.numerics) for terms, shard in zip(listed, placed, strict=True)))
    return replace(placement, layers=tuple(settled))


def _check_offer(terms: ShardTerms, holder: str, offer: Offer) -> None:
    who = "the host" if holder == HOST else f"worker {holder}"
    if terms.numerics not in offer.classes:
        raise UnsupportedError(
            f"numerics class {terms.numerics} is asked for, and {who} ({offer.architecture}) does not compute it; it offers "
            f"{', '.join(offer.classes)}"
        )
    if terms.architecture not in ("", offer.architecture):
        raise UnsupportedError(
            f"numerics class {terms.numerics} on {terms.architecture} is asked for, and {who} is a {offer.architecture}, on "
            "which it has other bits"
        )


def _says_classes(shards: ShardMap) -> bool:
    return any(terms.numerics for listed in shards for terms in listed)


def check_map(layers: Sequence[PlacedLayer], shards: ShardMap) -> None:
    """Checks that a map has every expert of every layer once. Raises ConfigError naming the
    layer.
    """
    if len(shards) != len(layers):
        raise ConfigError(f"the shard map has {len(shards)} layers with routed experts, the model has {len(layers)}")
    for layer, listed in zip(layers, shards, strict=True):
        experts = sorted(expert for terms in listed for expert in terms.experts)
        if experts != list(range(layer.num_experts)):
            raise ConfigError(
                f"the shard map does not have each of the experts 0-{layer.num_experts - 1} of layer {layer.index} "
                f"({layer.name}) once; it is of another model"
            )


def _worker_for(num_bytes: int, left: Mapping[str, int | None], taken: Mapping[str, int]) -> str:
    def rank(name: str) -> tuple[bool, int]:
        room = left[name]
        # One without room is a last resort: it may compute from the mapped checkpoint.
        return room is not None and room < num_bytes, taken[name]

    return min(left, key=rank)


def _without(left: int | None, num_bytes: int) -> int | None:
    return None if left is None else left - num_bytes
