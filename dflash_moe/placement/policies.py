"""The placement policies even, memory and explicit, and the experts that the host keeps first.

Each policy returns for every layer the expert ids of each holder. Unless they are listed, ids are
contiguous, because neighbouring ids read neighbouring bytes of the checkpoint.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash_moe.config import format_bytes
from dflash_moe.errors import TopologyError
from dflash_moe.topology import HOST, Topology, WorkerSpec

if TYPE_CHECKING:
    from dflash_moe.placement.shards import PlacedLayer


def assign(layers: Sequence[PlacedLayer], topology: Topology) -> list[dict[str, Sequence[int]]]:
    """Returns the expert ids of each holder for every layer, by `topology.placement.policy`. Raises
    TopologyError.
    """
    if topology.placement.policy == "explicit":
        return _explicit(layers, topology)
    kept = _kept_at_host(layers, topology)
    if topology.placement.policy == "memory":
        counts = _counts_by_memory(layers, topology, kept)
    else:
        counts = [_even_counts(layer.num_experts - num_kept, topology) for layer, num_kept in zip(layers, kept, strict=True)]
    return [_ranges(num_kept, numbers) for num_kept, numbers in zip(kept, counts, strict=True)]


def host_budget(layers: Sequence[PlacedLayer], topology: Topology) -> int:
    """Returns the bytes of routed experts that may stay at the host. A percentage is one of the
    bytes of all routed experts.
    """
    return topology.host.experts_memory.resolve(sum(layer.num_experts * layer.resident_bytes("auto") for layer in layers))


def _kept_at_host(layers: Sequence[PlacedLayer], topology: Topology) -> list[int]:
    """Returns for each layer how many experts fit into the host's budget. Every layer in turn gets
    one more while that fits, so that layers of equal size differ by at most one.
    """
    budget = host_budget(layers, topology)
    kept = [0] * len(layers)
    open_layers = list(range(len(layers)))
    while open_layers:
        still_open = []
        for at in open_layers:
            if kept[at] < layers[at].num_experts and layers[at].resident_bytes("auto") <= budget:
                kept[at] += 1
                budget -= layers[at].resident_bytes("auto")
                still_open.append(at)
        open_layers = still_open
    return kept


def _even_counts(num_experts: int, topology: Topology) -> dict[str, int]:
    share, extra = divmod(num_experts, len(topology.workers))
    return {worker.name: share + (at < extra) for at, worker in enumerate(topology.workers)}


def _counts_by_memory(layers: Sequence[PlacedLayer], topology: Topology, kept: Sequence[int]) -> list[dict[str, int]]:
    """Shares every layer in proportion to the memory that each worker has left, so that all workers
    fill up together. Returns the count of each worker for every layer.
    """
    left = {worker.name: worker.memory or 0 for worker in topology.workers}
    sizes = [{worker.name: layer.resident_bytes(worker.weights) for worker in topology.workers} for layer in layers]
    numbers = [layer.num_experts - at_host for layer, at_host in zip(layers, kept, strict=True)]
    needed = sum(number * min(size.values()) for number, size in zip(numbers, sizes, strict=True))
    if needed > sum(left.values()):
        raise _memory_error(needed, topology)
    counts = []
    for number, size in zip(numbers, sizes, strict=True):
        shares = _shares(number, left, size)
        if shares is None:
            raise _memory_error(needed, topology)
        for name, count in shares.items():
            left[name] -= count * size[name]
        counts.append(shares)
    return counts


def _shares(num_experts: int, left: dict[str, int], size: dict[str, int]) -> dict[str, int] | None:
    """Returns how many experts of one layer each worker gets, in proportion to how many fit into
    its `left` bytes, or None when they do not fit. `size` is that of one expert at each worker.
    """
    # The scale keeps the proportions whole numbers, so that no rounding decides who gets more.
    scale = math.prod(set(size.values()))

    def room(name: str, count: int) -> int:
        return (left[name] - count * size[name]) * (scale // size[name])

    total = sum(room(name, 0) for name in left)
    shares = {name: min(num_experts * room(name, 0) // total, left[name] // size[name]) if total else 0 for name in left}
    for _ in range(num_experts - sum(shares.values())):
        # max() returns the first of equals, so that the plan is the same every time.
        name = max(left, key=lambda name: room(name, shares[name]))
        if left[name] - shares[name] * size[name] < size[name]:
            return None
        shares[name] += 1
    return shares


def _memory_error(needed: int, topology: Topology) -> TopologyError:
    granted = sum(worker.memory or 0 for worker in topology.workers)
    each = ", ".join(f"{worker.name} {format_bytes(worker.memory or 0)}" for worker in topology.workers)
    short = f"short by {format_bytes(needed - granted)}" if needed > granted else "short because whole experts do not fill it"
    return TopologyError(
        f"{topology.source}:{topology.placement.line or 1}: the workers need {format_bytes(needed)} for their experts but "
        f"have memory: {format_bytes(granted)} ({each}); {short}. "
        f"Give them more memory, add a worker, or let the host keep some (host.experts.memory)"
    )


def _ranges(num_kept: int, counts: dict[str, int]) -> dict[str, Sequence[int]]:
    """Gives the host the first ids, and the workers the next ones in the order of the topology."""
    assignment: dict[str, Sequence[int]] = {HOST: range(num_kept)}
    first = num_kept
    for name, count in counts.items():
        assignment[name] = range(first, first + count)
        first += count
    return assignment


def _explicit(layers: Sequence[PlacedLayer], topology: Topology) -> list[dict[str, Sequence[int]]]:
    _check_named_layers(layers, topology)
    budget = host_budget(layers, topology)
    assigned = []
    for layer in layers:
        owners: dict[int, WorkerSpec] = {}
        assignment: dict[str, Sequence[int]] = {}
        for worker in topology.workers:
            assignment[worker.name] = _listed(layer, worker, topology)
            for expert in assignment[worker.name]:
                if (other := owners.setdefault(expert, worker)) is not worker:
                    raise TopologyError(
                        f"{topology.source}:{_line(worker)}: layer {layer.index} ({layer.name}): expert {expert} is placed "
                        f"on both {other.name} (line {_line(other)}) and {worker.name}; list it once"
                    )
        nowhere = [expert for expert in range(layer.num_experts) if expert not in owners]
        budget -= len(nowhere) * layer.resident_bytes("auto")
        if nowhere and budget < 0:
            raise _nowhere_error(layer, nowhere, topology)
        assigned.append(assignment | {HOST: nowhere})
    return assigned


def _listed(layer: PlacedLayer, worker: WorkerSpec, topology: Topology) -> Sequence[int]:
    if worker.experts is None:
        return ()
    try:
        return worker.experts.for_layer(layer.index, layer.num_experts)
    except ValueError as error:
        raise TopologyError(f"{topology.source}:{_line(worker)}: worker {worker.name}: {error}") from None


def _nowhere_error(layer: PlacedLayer, nowhere: Sequence[int], topology: Topology) -> TopologyError:
    has_budget = topology.host.experts_memory.resolve(layer.num_experts * layer.resident_bytes("auto")) > 0
    rest = f" (and {len(nowhere) - 1} more)" if len(nowhere) > 1 else ""
    names = ", ".join(worker.name for worker in topology.workers)
    why = "and the host's budget (host.experts.memory) is used up" if has_budget else "and the host keeps none"
    return TopologyError(
        f"{topology.source}:{topology.placement.line or 1}: layer {layer.index} ({layer.name}): expert {nowhere[0]}{rest} is "
        f"placed nowhere: no list of {names} has it, {why}"
    )


def _check_named_layers(layers: Sequence[PlacedLayer], topology: Topology) -> None:
    indices = {layer.index for layer in layers}
    for worker in topology.workers:
        for named in worker.experts.named_layers() if worker.experts else ():
            if named not in indices:
                known = f"{min(indices)}..{max(indices)}" if indices else "none"
                where = f"{topology.source}:{_line(worker)}: worker {worker.name}"
                raise TopologyError(f"{where}: layer {named} has no routed experts; layers that have: {known}")


def _line(worker: WorkerSpec) -> int:
    return worker.experts.line if worker.experts else worker.line
