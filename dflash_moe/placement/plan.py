"""Plans the placement of every expert. Each holder gets one shard of a layer, and the shards of a
layer are numbered by their smallest expert; a shard map that is imposed (imposed.py) may give a
holder several.

A plan depends only on the sizes of layers and on the topology, so that it exists before any weight
is read or any worker started.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence

from dflash_moe.config import format_bytes
from dflash_moe.errors import TopologyError
from dflash_moe.placement import imposed, policies
from dflash_moe.placement.formats import check_formats
from dflash_moe.placement.replicas import with_replicas
from dflash_moe.placement.shards import PlacedLayer, Placement, Shard
from dflash_moe.topology import HOST, Topology, WorkerSpec

log = logging.getLogger(__name__)

# The expert ids of one layer by holder.
Assignment = Mapping[str, Sequence[int]]


def plan_placement(layers: Sequence[PlacedLayer], topology: Topology) -> Placement:
    """Places every expert of `layers` by the topology's policy. The same inputs always give the
    same shards.

    Raises UnsupportedError for weights in a format that their holder has no kernels for, and
    TopologyError (`file:line:`) for an expert that is placed nowhere or twice, naming layer,
    expert and workers, and for a worker or a host budget that lacks memory, with the numbers.
    """
    weights = {worker.name: worker.weights for worker in topology.workers}
    if topology.placement.imposed is not None:
        shards = imposed.assign(layers, topology, topology.placement.imposed)
    else:
        numerics = {holder: topology.numerics_of(holder) for holder in (HOST, *weights)}
        shards = tuple(_shards_of_layer(found, weights, numerics) for found in policies.assign(layers, topology))
    kinds = {"auto", *weights.values(), *(shard.weights for found in shards for shard in found)}
    sizes = tuple({kept: layer.resident_bytes(kept) for kept in kinds} for layer in layers)
    placement = with_replicas(layers, Placement(shards, sizes), topology)
    unpacked = check_formats(layers, placement, topology)
    placement = _with_layouts(placement, topology, unpacked)
    _check_memory(layers, placement, topology)
    return placement


def _with_layouts(placement: Placement, topology: Topology, unpacked: Mapping[str, str]) -> Placement:
    """Marks the shards of holders that compute from the mapped checkpoint, because their topology
    says so, for lack of memory, or because a format cannot be packed: `unpacked` gives such a
    format by holder.

    With `weights_layout: auto` a worker packs where that fits `memory`. One that makes integers at
    load or computes on a card always packs. One with `stored` packs too, as far as formats are
    concerned: where its packed weights come from is between it and its disk. Memory for a layer at
    least is room for slots.
    """
    needed = placement.bytes_by_holder()
    mapped, slots = {HOST} & unpacked.keys(), set()
    for worker in topology.workers:
        lacks_memory = worker.memory is not None and needed.get(worker.name, 0) > worker.memory
        may_map = worker.weights_layout in ("auto", "stored") and worker.weights == "auto" and worker.backend == "cpu"
        if worker.weights_layout == "mapped" or worker.name in unpacked or (may_map and lacks_memory):
            mapped.add(worker.name)
            if lacks_memory and worker.weights_layout != "mapped" and worker.name not in unpacked:
                if (largest := placement.largest_layer(worker.name)) <= (worker.memory or 0):
                    slots.add(worker.name)
                elif worker.weights_layout == "stored":
                    raise TopologyError(
                        f"{topology.source}:{worker.line}: worker {worker.name} has memory: "
                        f"{format_bytes(worker.memory or 0)}, and its experts of one layer need {format_bytes(largest)}, "
                        "which a call may need at once; give it that"
                    )
            level = logging.WARNING if lacks_memory or worker.name in unpacked else logging.INFO
            wanted, has_slots = needed.get(worker.name, 0), worker.name in slots
            log.log(level, "%s", _mapped_text(worker, wanted, unpacked.get(worker.name), has_slots=has_slots))
    return dataclasses.replace(placement, mapped=frozenset(mapped), slots=frozenset(slots))


def _mapped_text(worker: WorkerSpec, needed: int, unpacked: str | None, *, has_slots: bool) -> str:
    if has_slots:
        return (
            f"worker {worker.name} has memory: {format_bytes(worker.memory or 0)} for experts that need "
            f"{format_bytes(needed)}; the others are read as calls need them, from panels on disk or where none are kept "
            "from the mapped checkpoint"
        )
    why = "as weights_layout says"
    if unpacked is not None:
        why = f"for it has weights in {unpacked}, which no kernel reads"
    elif worker.weights_layout == "auto":
        why = f"for its packed experts need {format_bytes(needed)} and it has memory: {format_bytes(worker.memory or 0)}"
    return f"worker {worker.name} computes from the mapped checkpoint, {why}; every call packs anew what it needs"


def _shards_of_layer(assignment: Assignment, weights: Mapping[str, str], numerics: Mapping[str, str]) -> tuple[Shard, ...]:
    lists = sorted((tuple(sorted(experts)), holder) for holder, experts in assignment.items() if experts)
    return tuple(
        Shard(shard_id, holder, experts, weights.get(holder, "auto"), numerics[holder])
        for shard_id, (experts, holder) in enumerate(lists)
    )


def _check_memory(layers: Sequence[PlacedLayer], placement: Placement, topology: Topology) -> None:
    needed = placement.bytes_by_holder()
    for worker in topology.workers:
        if worker.memory is not None and needed.get(worker.name, 0) > worker.memory:
            text = _shortfall(layers, placement, worker, needed[worker.name])
            raise TopologyError(f"{topology.source}:{worker.line}: {text}")


def _shortfall(layers: Sequence[PlacedLayer], placement: Placement, worker: WorkerSpec, needed: int) -> str:
    """Returns the message for a worker that got more experts than it has memory for. Each number
    has the largest unit that fits it.
    """
    memory = worker.memory or 0
    counts = sorted({len(shard.experts) for _, shard in placement.shards_of(worker.name)})
    span = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    held = [at for at, _ in placement.shards_of(worker.name)]
    fits = memory // sum(layers[at].resident_bytes(worker.weights) for at in held)
    return (
        f"worker {worker.name} needs {format_bytes(needed)} for {len(held)} layers x {span} experts but has "
        f"memory: {format_bytes(memory)}; short by {format_bytes(needed - memory)}; it fits {fits} experts a layer. "
        f"Give it more memory, add a worker, or let the host keep some (host.experts.memory)"
    )
