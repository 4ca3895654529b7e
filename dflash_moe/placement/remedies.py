"""Says of every shard who answers for its worker once that is lost, and why others do not.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from dflash_moe.config.remedies import brings_workers_back, fallback_is_off
from dflash_moe.config.values import HOST_FALLBACK, RECONNECT, REMEDIES, REPLICA, runs_of
from dflash_moe.placement.fallback import class_gap, host_kernel_set, is_in_this_process, shard_gap
from dflash_moe.topology import HOST, Topology

if TYPE_CHECKING:
    from dflash_moe.config import Settings
    from dflash_moe.placement.shards import PlacedLayer, Placement


def shard_remedies(layers: Sequence[PlacedLayer], placement: Placement, topology: Topology, settings: Settings) -> list[str]:
    """Returns a line for all layers in which the shard of a worker has the same remedies, such as
    "layers 0-47, w0: replica w1, reconnect (started again), host".
    """
    isa = host_kernel_set(settings)
    found: dict[tuple[str, str], list[int]] = {}
    for layer, shards in zip(layers, placement.layers, strict=True):
        for shard in shards:
            replica = f"replica {', '.join(shard.replicas)}" if shard.replicas else ""
            text = _text(shard.holder, replica, shard_gap(layer, shard, isa), topology, settings)
            indices = found.setdefault((shard.holder, text), [])
            indices += [layer.index] if layer.index not in indices[-1:] else []
    return [f"layers {_ranges(indices)}, {holder}: {text}" for (holder, text), indices in found.items()]


def worker_remedies(topology: Topology, settings: Settings) -> list[str]:
    """Returns the same by worker, for a topology without a model: workers that are alike share a
    line.
    """
    isa = host_kernel_set(settings)
    found: dict[str, list[str]] = {}
    for worker in topology.workers:
        gap = class_gap(topology.numerics_of(worker.name), isa)
        if worker.weights != "auto":
            gap = f"weights: {worker.weights}, which it makes at load, unless the checkpoint has them"
        replica = "replica" if topology.placement.replicas > 1 else ""
        found.setdefault(_text(worker.name, replica, gap, topology, settings), []).append(worker.name)
    return [f"{', '.join(names)}: {text}" for text, names in found.items()]


def _text(holder: str, replica: str, gap: str, topology: Topology, settings: Settings) -> str:
    if is_in_this_process(topology, holder):
        return "in the host's process, which is not lost alone"
    texts = {
        REPLICA: _replica(replica, topology, settings),
        RECONNECT: _reconnect(holder, topology, settings),
        HOST_FALLBACK: _host(gap, settings),
    }
    # What is left out of the order comes last, with that as its reason.
    ordered = (*settings.failure_order, *(word for word in REMEDIES if word not in settings.failure_order))
    return ", ".join(texts[word] for word in ordered)


def _replica(replica: str, topology: Topology, settings: Settings) -> str:
    if REPLICA not in settings.failure_order:
        return "no replica (failure.order has none)"
    return replica or f"no replica (placement.replicas is {topology.placement.replicas})"


def _reconnect(holder: str, topology: Topology, settings: Settings) -> str:
    if not brings_workers_back(settings):
        missing = "failure.restart is off" if not settings.restart else "failure.order has none"
        return f"no reconnect ({missing})"
    if topology.worker(holder).parsed_address.is_registered:
        return "reconnect (it registers again)"
    return "reconnect (started again)" if topology.worker(holder).is_started_by_host else "reconnect (dialled again)"


def _host(gap: str, settings: Settings) -> str:
    reason = fallback_is_off(settings) or gap
    return f"no {HOST} ({reason})" if reason else f"{HOST} (its processor, from the mapped checkpoint)"


def _ranges(indices: Iterable[int]) -> str:
    """Writes ascending indices as 0-15, 20."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs_of(indices))
