"""Checks the numerics classes of a placement: which of them meet in one layer, and whether each
takes the weights it gets.

Two holders compute equal bits only within one class. So under `numerics: exact` all holders of a
layer have the same class, and a result does not depend on which of them holds an expert.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from dflash_moe import _core
from dflash_moe.errors import ConfigError, TopologyError, UnsupportedError
from dflash_moe.topology import HOST, Topology
from dflash_moe.topology.numerics import CLASSES, possible_classes, takes_weights

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dflash_moe.model.spec import LayerSpec
    from dflash_moe.placement.preset import Offer
    from dflash_moe.placement.shards import PlacedLayer, Placement, Shard

log = logging.getLogger(__name__)


def holder_classes(placement: Placement) -> dict[str, str]:
    """Returns the class of each holder that has experts, by its name. Several, which a preset may
    choose for layers of unlike formats, are separated by commas.
    """
    found: dict[str, dict[str, None]] = {}
    for shard in (shard for shards in placement.layers for shard in shards):
        found.setdefault(shard.holder, {})[shard.numerics] = None
    return {holder: ", ".join(classes) for holder, classes in found.items()}


def mixed_layers(placement: Placement) -> tuple[int, ...]:
    """Returns the positions of the layers whose experts are computed in more than one class,
    whatever class the cards will turn out to have.
    """
    return tuple(at for at, shards in enumerate(placement.layers) if are_mixed(shard.numerics for shard in shards))


def are_mixed(classes: Iterable[str]) -> bool:
    """Says whether holders of these classes can have no class in common. A class that a card still
    has to decide counts as each that it may become.
    """
    return not set.intersection(*(set(possible_classes(numerics)) for numerics in classes))


def settle_classes(placement: Placement, classes: Mapping[str, str]) -> Placement:
    """Returns the placement with the classes that the holders stated once their cards were open.
    `classes` gives them by holder.
    """
    settled = (tuple(replace(shard, numerics=classes[shard.holder]) for shard in shards) for shards in placement.layers)
    return replace(placement, layers=tuple(settled))


def describe_numerics(layers: Sequence[LayerSpec], placement: Placement, policy: str) -> dict[str, Any]:
    """Returns what `stats()` reports: `policy` (the setting), `classes` by holder, and
    `mixed_layers`, the indices of the layers that are computed in several classes.
    """
    mixed = [layers[at].index for at in mixed_layers(placement)]
    return {"policy": policy, "classes": holder_classes(placement), "mixed_layers": mixed}


def check_classes(layers: Sequence[LayerSpec], placement: Placement, topology: Topology, policy: str) -> None:
    """Checks the classes of a placement, before any worker starts and again once cards have settled
    theirs. `policy` is the setting `numerics`: exact, or close, which only warns of mixed layers.

    Raises TopologyError naming two holders of a layer and their classes, and UnsupportedError for
    weights that a class does not take.
    """
    mixed = mixed_layers(placement)
    if mixed and policy == "exact":
        layer = layers[mixed[0]]
        one, other = _unlike_shards(placement.layers[mixed[0]])
        place = max(_line(topology, one.holder), _line(topology, other.holder))
        raise TopologyError(
            f"{topology.source}:{place}: layer {layer.index} ({layer.name}): {_named(one)} computes in "
            f"{_class_text(one)} and {_named(other)} in {_class_text(other)}; give both `activations` of one class, or allow "
            "it with `numerics: close` (--numerics close): results then depend on which of them holds an expert"
        )
    if mixed:
        classes = ", ".join(f"{holder} {numerics}" for holder, numerics in holder_classes(placement).items())
        log.warning("numerics close: %d of %d layers are computed in several classes: %s", len(mixed), len(layers), classes)
    for layer, shards in zip(layers, placement.layers, strict=True):
        for shard in shards:
            _check_format(layer, shard, topology)


def check_architectures(holders: Mapping[str, tuple[str, str]], policy: str) -> None:
    """Checks the architectures of all holders that have said what they compute on. `holders` gives
    (class, architecture) by name, the latter empty for one that has not.

    Cards of two generations add the products of one instruction in orders of their own, so that a
    bounded class has other bits on each of them (decisions 15 and 19). Raises ConfigError naming
    two holders of such a class on unlike architectures, unless `policy` is close, which warns.
    """
    first: dict[str, tuple[str, str]] = {}
    for name, (numerics, architecture) in holders.items():
        if not architecture or numerics not in CLASSES or not CLASSES[numerics].is_bounded:
            continue
        other, known = first.setdefault(numerics, (name, architecture))
        if known == architecture:
            continue
        found = f"{numerics} on {known} (worker {other}) and on {architecture} (worker {name}) has not the same bits"
        if policy == "exact":
            raise ConfigError(
                f"{found}; give both `activations: f32` or int8, or allow it with `numerics: close` (--numerics close)"
            )
        log.warning("numerics close: %s", found)


def check_replicas(layers: Sequence[PlacedLayer], placement: Placement, offers: Mapping[str, Offer]) -> None:
    """Checks that whoever stands in for the first holder of a shard computes the same bits, once
    they have said what they compute. `offers` gives that by name; who has said nothing yet has no
    architecture there, and is checked when it has.

    `numerics: close` allows no exception: which holder answers is a matter of microseconds, so that
    one and the same run would have other bits each time. Raises UnsupportedError naming layer,
    shard, both holders and what each has.
    """
    known = {name: offer for name, offer in offers.items() if offer.architecture}
    for layer, shards in zip(layers, placement.layers, strict=True):
        for shard in shards:
            first, numerics = known.get(shard.holder), shard.numerics
            is_bounded = numerics in CLASSES and CLASSES[numerics].is_bounded
            for name in (name for name in shard.replicas if name in known):
                offer = known[name]
                where = f"layer {layer.index} ({layer.name}), shard {shard.shard_id}: its holders disagree in"
                if numerics not in offer.classes:
                    raise UnsupportedError(
                        f"{where} numerics: worker {shard.holder} has {numerics}, worker {name} ({offer.architecture}) offers "
                        f"{', '.join(offer.classes)}; give both `activations: f32` or int8, or write placement.replicas: 1"
                    )
                if is_bounded and first is not None and first.architecture != offer.architecture:
                    raise UnsupportedError(
                        f"{where} architecture: worker {shard.holder} has {first.architecture}, worker {name} "
                        f"{offer.architecture}, on which {numerics} has other bits; give both `activations: f32` or int8, or "
                        "write placement.replicas: 1"
                    )


def _check_format(layer: LayerSpec, shard: Shard, topology: Topology) -> None:
    kept = layer.resident_dtype(shard.weights)
    try:
        for numerics in possible_classes(shard.numerics):
            _core.check_numerics(numerics, kept)
    except UnsupportedError as error:
        remedies = ["`activations: f32`"]
        if shard.holder != HOST and takes_weights(shard.numerics, layer.resident_dtype("int8")):
            remedies.insert(0, "`weights: int8`")
        asked = topology.activations_of(shard.holder)
        raise UnsupportedError(
            f"{topology.source}:{_line(topology, shard.holder)}: {_named(shard)} has activations: {asked}, and layer "
            f"{layer.index} ({layer.name}) has weights in {kept}: {error}; give it {' or '.join(remedies)}"
        ) from None


def _unlike_shards(shards: Sequence[Shard]) -> tuple[Shard, Shard]:
    """Returns the first two shards of a mixed layer that cannot be of one class."""
    return next(pair for pair in combinations(shards, 2) if are_mixed(shard.numerics for shard in pair))


def _class_text(shard: Shard) -> str:
    possible = possible_classes(shard.numerics)
    return shard.numerics if possible == (shard.numerics,) else f"its card's {' or '.join(possible)}"


def _named(shard: Shard) -> str:
    return "the host" if shard.holder == HOST else f"worker {shard.holder}"


def _line(topology: Topology, holder: str) -> int:
    return (topology.host.line if holder == HOST else topology.worker(holder).line) or 1
