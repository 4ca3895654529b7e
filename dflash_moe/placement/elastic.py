"""Changes of who holds what while a runtime runs: which shards a worker that is added takes, and
who comes first among several holders. The shards stay what they are, so that no bit changes.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dflash_moe.config import format_bytes
from dflash_moe.errors import ConfigError
from dflash_moe.model.formats.weight_formats import mapped_only
from dflash_moe.topology import HOST

if TYPE_CHECKING:
    from dflash_moe.placement.shards import PlacedLayer, Placement, Shard
    from dflash_moe.topology import WorkerSpec

# A shard of a placement: the position of its layer, and its id.
Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A worker that is added: what it computes (`numerics` are the classes), and how many bytes its
    weights may take. None is not known yet.
    """

    spec: WorkerSpec
    numerics: Collection[str]
    room: int | None

    @property
    def is_mapped(self) -> bool:
        """Whether it computes from the mapped checkpoint, for which it needs no room."""
        return self.spec.weights_layout == "mapped"


def choose_shards(
    layers: Sequence[PlacedLayer],
    placement: Placement,
    newcomer: Newcomer,
    load: Mapping[Place, float],
    members: Collection[str],
) -> list[Place]:
    """Returns the shards that a newcomer shall hold, in the order in which it shall load them.

    With `experts` in its spec these are the shards of those experts, all of them. Otherwise they
    are as many as fit, first those that none of `members` holds, then those with the largest share
    of `load` for each holder.

    Raises ConfigError where it can hold none, or one that its spec lists: naming the shard and the
    memory, or the shard and the field in which its holders would disagree, with both values.
    """
    refused: dict[Place, str] = {}
    fitting: list[Place] = []
    listed = _listed(layers, placement, newcomer.spec)
    for at, shards in enumerate(placement.layers):
        for shard in shards:
            where = at, shard.shard_id
            if listed is not None and where not in listed:
                continue
            why = _unlike(layers[at], shard, newcomer)
            if why:
                refused[where] = f"{named(layers, where)}{why}"
            else:
                fitting.append(where)
    name = newcomer.spec.name
    if refused and (listed is not None or not fitting):
        raise ConfigError(f"worker {name} is not added: {next(iter(refused.values()))}")
    fitting.sort(key=lambda where: _urgency(_shard(placement, where), load.get(where, 0.0), members))
    chosen, left = [], newcomer.room
    for where in fitting:
        size = 0 if newcomer.is_mapped else bytes_of(layers, placement, where)
        if left is not None and size > left:
            if listed is not None:
                raise ConfigError(_shortfall(layers, newcomer, where, size, left))
            continue
        chosen.append(where)
        left = None if left is None else left - size
    if not chosen:
        where = fitting[0]
        raise ConfigError(_shortfall(layers, newcomer, where, bytes_of(layers, placement, where), newcomer.room or 0))
    return chosen


def bytes_of(layers: Sequence[PlacedLayer], placement: Placement, where: Place) -> int:
    """Returns the bytes that a shard takes in the memory of one holder."""
    shard = _shard(placement, where)
    return len(shard.experts) * layers[where[0]].resident_bytes(shard.weights)


def with_holder(
    placement: Placement, name: str, places: Iterable[Place], members: Collection[str], *, is_mapped: bool = False
) -> Placement:
    """Returns the placement in which `name` holds these shards too, last in their order, packed or
    mapped. It takes the place of holders that are not among `members` any more.
    """
    taken = set(places)

    def changed(at: int, shard: Shard) -> Shard:
        if (at, shard.shard_id) not in taken:
            return shard
        return _held_by(shard, (*(holder for holder in shard.holders if holder in members), name))

    others = placement.mapped - {name}
    return replace(_map(placement, changed), mapped=others | {name} if is_mapped else others)


def without_holder(placement: Placement, name: str) -> Placement:
    """Returns the placement in which `name` holds only what nobody else does."""

    def changed(_at: int, shard: Shard) -> Shard:
        others = tuple(holder for holder in shard.holders if holder != name)
        return _held_by(shard, others) if others else shard

    return _map(placement, changed)


def only_at(placement: Placement, name: str, ready: Collection[str]) -> list[Place]:
    """Returns the shards that `name` holds and none of the other `ready` members does."""
    return [
        (at, shard.shard_id)
        for at, shards in enumerate(placement.layers)
        for shard in shards
        if name in shard.holders and not any(holder in ready for holder in shard.holders if holder != name)
    ]


def balanced(placement: Placement, load: Mapping[Place, float]) -> Placement:
    """Returns the placement with another order of holders, in which those who come first in a layer
    have as equal shares of its `load` as can be had. Idle workers are asked in that order. Where
    nothing is gained, everybody keeps his place.
    """
    return replace(placement, layers=tuple(_balanced(at, shards, load) for at, shards in enumerate(placement.layers)))


def _balanced(at: int, shards: tuple[Shard, ...], load: Mapping[Place, float]) -> tuple[Shard, ...]:
    # By worker: the load of the shards that it is asked first for, and their number, which decides
    # while no load of the layer is known.
    taken: dict[str, tuple[float, int]] = {}
    first: dict[int, str] = {}
    # Shards with one holder have no choice and come first. Then the heaviest, each to the holder
    # with the least so far: the light ones that follow make up for the differences.
    for shard in sorted(shards, key=lambda one: (len(one.holders) > 1, -load.get((at, one.shard_id), 0.0), one.shard_id)):
        weight = load.get((at, shard.shard_id), 0.0)
        best = min(shard.holders, key=lambda name: (taken.get(name, (0.0, 0)), shard.holders.index(name)))
        before, count = taken.get(best, (0.0, 0))
        taken[best] = before + weight, count + 1
        first[shard.shard_id] = best
    return tuple(
        _held_by(shard, (first[shard.shard_id], *(name for name in shard.holders if name != first[shard.shard_id])))
        for shard in shards
    )


def _map(placement: Placement, change: Callable[[int, Shard], Shard]) -> Placement:
    layers = tuple(tuple(change(at, shard) for shard in shards) for at, shards in enumerate(placement.layers))
    return replace(placement, layers=layers)


def _held_by(shard: Shard, holders: Sequence[str]) -> Shard:
    return shard if shard.holders == tuple(holders) else replace(shard, holder=holders[0], replicas=tuple(holders[1:]))


def _shard(placement: Placement, where: Place) -> Shard:
    return next(shard for shard in placement.layers[where[0]] if shard.shard_id == where[1])


def _urgency(shard: Shard, load: float, members: Collection[str]) -> tuple[bool, float]:
    num_holders = sum(holder in members for holder in shard.holders)
    return num_holders > 0, -load / max(1, num_holders)


def _unlike(layer: PlacedLayer, shard: Shard, newcomer: Newcomer) -> str:
    """Says why the newcomer cannot stand in for the shard's holder; empty where it can."""
    spec, name = newcomer.spec, newcomer.spec.name
    if shard.holder == HOST:
        return " is computed in the host's own process, and has no other holder"
    unpacked = mapped_only(layer.resident_dtype(shard.weights))
    if unpacked and not newcomer.is_mapped:
        return f" has weights in {unpacked[0]}, which no kernel reads packed; say weights_layout: mapped"
    disagree = f": its holders would disagree in {{}}: worker {shard.holder} has {{}}, worker {name} {{}}"
    if shard.weights != spec.weights:
        return disagree.format("weights", shard.weights, spec.weights)
    if shard.numerics not in newcomer.numerics:
        return disagree.format("numerics", shard.numerics, ", ".join(newcomer.numerics))
    return ""


def _listed(layers: Sequence[PlacedLayer], placement: Placement, spec: WorkerSpec) -> set[Place] | None:
    """Returns the shards whose experts the spec lists, None where it lists none. Raises ConfigError
    for a part of a shard.
    """
    if spec.experts is None:
        return None
    found: set[Place] = set()
    for at, (layer, shards) in enumerate(zip(layers, placement.layers, strict=True)):
        try:
            experts = set(spec.experts.for_layer(layer.index, layer.num_experts))
        except ValueError as error:
            raise ConfigError(f"worker {spec.name} is not added: {error}") from None
        for shard in shards:
            part = experts.intersection(shard.experts)
            if part and len(part) < len(shard.experts):
                raise ConfigError(
                    f"worker {spec.name} is not added: it lists {len(part)} of the {len(shard.experts)} experts of "
                    f"{named(layers, (at, shard.shard_id))}; shards never change in a runtime: list all of them or none"
                )
            if part:
                found.add((at, shard.shard_id))
    if not found:
        raise ConfigError(f"worker {spec.name} is not added: it lists no experts of any layer")
    return found


def named(layers: Sequence[PlacedLayer], where: Place) -> str:
    """Names a shard for people."""
    return f"layer {layers[where[0]].index} ({layers[where[0]].name}), shard {where[1]}"


def _shortfall(layers: Sequence[PlacedLayer], newcomer: Newcomer, where: Place, size: int, left: int) -> str:
    return (
        f"worker {newcomer.spec.name} is not added: {named(layers, where)} needs {format_bytes(size)} of memory, and "
        f"{format_bytes(left)} are left there; give it more memory"
    )
