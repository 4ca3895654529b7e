"""Gives every shard further holders: workers that load the same experts and stand in for the first
one when it is lost or late. Replicas change no shard, so that they change no bit.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash_moe.config import format_bytes
from dflash_moe.errors import TopologyError
from dflash_moe.placement.preset import FAST, is_stated
from dflash_moe.topology import HOST, Topology, WorkerSpec

if TYPE_CHECKING:
    from dflash_moe.placement.shards import PlacedLayer, Placement, Shard


def with_replicas(layers: Sequence[PlacedLayer], placement: Placement, topology: Topology) -> Placement:
    """Returns the placement in which every shard of a worker has `placement.replicas` holders: the
    workers after its own in the order of the topology, those without room left out. Shards at the
    host have no others, since they live and die with it. A worker that computes from the mapped
    checkpoint, as its topology says, needs no room.

    Raises TopologyError where there are too few workers, naming memory and shard where that is why,
    and for workers that keep other formats or compute in other classes.
    """
    wanted = topology.placement.replicas
    if wanted == 1:
        return placement
    if wanted > len(topology.workers):
        raise _error(topology, f"placement.replicas is {wanted}, and there are {len(topology.workers)} workers to hold them")
    used = placement.bytes_by_holder()
    found = []
    for layer, shards in zip(layers, placement.layers, strict=True):
        placed = []
        for shard in shards:
            others: list[str] = []
            size = len(shard.experts) * layer.resident_bytes(shard.weights)
            for worker in _after(topology, shard.holder) if shard.holder != HOST else ():
                if len(others) == wanted - 1:
                    break
                has_bound = worker.memory is not None and worker.weights_layout != "mapped"
                if has_bound and used.get(worker.name, 0) + size > (worker.memory or 0):
                    continue
                _check_alike(layer, shard, worker, topology)
                used[worker.name] = used.get(worker.name, 0) + size
                others.append(worker.name)
            if shard.holder != HOST and len(others) < wanted - 1:
                raise _error(topology, _shortfall(layer, shard, size, used, topology))
            placed.append(dataclasses.replace(shard, replicas=tuple(others)))
        found.append(tuple(placed))
    return dataclasses.replace(placement, layers=tuple(found))


def _after(topology: Topology, holder: str) -> tuple[WorkerSpec, ...]:
    """Returns the other workers, beginning with the one after `holder`, so that the shards of one
    that is lost are spread.
    """
    names = [worker.name for worker in topology.workers]
    at = names.index(holder)
    return topology.workers[at + 1 :] + topology.workers[:at]


def _check_alike(layer: PlacedLayer, shard: Shard, worker: WorkerSpec, topology: Topology) -> None:
    numerics = topology.numerics_of(worker.name)
    # A preset or a receipt gives all holders one class, once they have said which they compute, and
    # then it is checked (numerics.check_replicas). Two that state theirs keep them.
    are_stated = is_stated(topology, shard.holder) and is_stated(topology, worker.name)
    is_open = topology.placement.imposed is not None or (topology.preset == FAST and not are_stated)
    for field, own, other in (("weights", shard.weights, worker.weights), ("numerics", shard.numerics, numerics)):
        if own != other and not (field == "numerics" and is_open):
            raise _error(
                topology,
                f"layer {layer.index} ({layer.name}), shard {shard.shard_id}: its holders disagree in {field}: worker "
                f"{shard.holder} has {own}, worker {worker.name} {other}; holders of one shard compute the same bits: make "
                "them alike, or write placement.replicas: 1",
            )


def _shortfall(layer: PlacedLayer, shard: Shard, size: int, used: dict[str, int], topology: Topology) -> str:
    rooms = ", ".join(
        f"{worker.name} has {format_bytes(max(0, worker.memory - used.get(worker.name, 0)))} of memory left"
        for worker in _after(topology, shard.holder) if worker.memory is not None and worker.weights_layout != "mapped"
    )  # fmt: skip
    return (
        f"placement.replicas is {topology.placement.replicas}: layer {layer.index} ({layer.name}), shard {shard.shard_id} "
        f"needs {format_bytes(size)} at another worker than {shard.holder}, and {rooms}; give them more memory, have them "
        "compute from the mapped checkpoint (weights_layout: mapped), or write fewer replicas"
    )


def _error(topology: Topology, text: str) -> TopologyError:
    return TopologyError(f"{topology.source}:{topology.placement.line or 1}: {text}")
