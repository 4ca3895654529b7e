"""Which shards the host's own processor can stand in for, with the bits of their worker, and why
not the others.

It computes from the mapped checkpoint, so that only weights which a checkpoint has are there to
compute with, and only in a class that its kernel set has.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dflash_moe import _core
from dflash_moe.config.remedies import fallback_is_off
from dflash_moe.errors import UnsupportedError
from dflash_moe.topology import HOST, Topology
from dflash_moe.topology.numerics import possible_classes

if TYPE_CHECKING:
    from dflash_moe.config import Settings
    from dflash_moe.placement.shards import PlacedLayer, Placement, Shard


def host_kernel_set(settings: Settings) -> str:
    """Returns the kernel set that the host's processor computes with."""
    return _core.parse_isa(settings.cpu_isa or _core.best_isa())


def class_gap(numerics: str, isa: str) -> str:
    """Returns why kernel set `isa` does not compute the bits of a class, empty where it does. A
    class that a card still has to decide is taken for what the processor could compute of it.
    """
    offered = _core.numerics_classes(isa)
    if any(name in offered for name in possible_classes(numerics)):
        return ""
    return f"class {' or '.join(possible_classes(numerics))}, which the host's kernel set {isa} does not compute"


def shard_gap(layer: PlacedLayer, shard: Shard, isa: str) -> str:
    """Returns why the host's processor cannot give the bits of a shard, empty where it can."""
    kept, stored = layer.resident_dtype(shard.weights), layer.resident_dtype("auto")
    if kept != stored:
        return f"weights: {shard.weights}, which its worker makes of {stored} at load, so that no checkpoint has them"
    return class_gap(shard.numerics, isa)


def gaps(
    layers: Sequence[PlacedLayer], placement: Placement, topology: Topology, isa: str
) -> Iterator[tuple[PlacedLayer, Shard, str]]:
    """Yields every shard that the host's processor cannot stand in for, with the reason. Those in
    this process are left out, for they live and die with it.
    """
    for layer, shards in zip(layers, placement.layers, strict=True):
        for shard in shards:
            if is_in_this_process(topology, shard.holder):
                continue
            if reason := shard_gap(layer, shard, isa):
                yield layer, shard, reason


def is_in_this_process(topology: Topology, holder: str) -> bool:
    """Whether a holder of experts is no process of its own."""
    return holder == HOST or topology.worker(holder).parsed_address.kind == "loopback"


def check_fallback(layers: Sequence[PlacedLayer], placement: Placement, topology: Topology, settings: Settings) -> None:
    """Raises UnsupportedError, naming layer, shard, worker and class or format, where a fallback
    was asked for by name (`host.fallback: mapped`) that cannot compute the bits of every worker.
    """
    if settings.host_fallback != "mapped" or fallback_is_off(settings):
        return
    found = next(gaps(layers, placement, topology, host_kernel_set(settings)), None)
    if found is None:
        return
    layer, shard, reason = found
    raise UnsupportedError(
        f"{topology.source}:{topology.host.line or 1}: host.fallback: mapped cannot compute layer {layer.index} "
        f"({layer.name}), shard {shard.shard_id}: worker {shard.holder} has {reason}; leave host.fallback out, under which the "
        "host stands in where it can, or write host.fallback: none"
    )
