"""Chooses numerics classes for who asked for a preset and not for a class: layer by layer, from
what every holder of the layer offers and takes.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING

from dflash_moe.topology import HOST, Topology
from dflash_moe.topology.numerics import CLASSES, DEFAULT_NUMERICS, takes_weights

if TYPE_CHECKING:
    from dflash_moe.model.spec import LayerSpec
    from dflash_moe.placement.shards import Placement, Shard

FAST = "fast"
# The words of `activations` that the preset tries, in this order, before the default.
_WORDS = ("int8", "bf16")


@dataclass(frozen=True, slots=True)
class Offer:
    """What one holder computes: the classes that it offers, and its kernel set or the architecture
    of its card. `stated` is its class where its `activations` are stated.
    """

    classes: tuple[str, ...]
    architecture: str
    stated: str | None = None


def is_stated(topology: Topology, holder: str) -> bool:
    """Says whether the topology states the `activations` of a worker, or of the host."""
    return (topology.host if holder == HOST else topology.worker(holder)).activations is not None


def choose_classes(layers: Sequence[LayerSpec], placement: Placement, offers: Mapping[str, Offer]) -> Placement:
    """Returns the placement with the classes of the preset: in each layer the first class that all
    holders offer, those that stand in for others too, and that takes the weights of each, where one
    holder's stated class binds the others. A layer without such a class keeps its classes.
    """
    chosen = []
    for layer, shards in zip(layers, placement.layers, strict=True):
        numerics = _shared_class(layer, shards, offers)
        chosen.append(tuple(replace(shard, numerics=numerics or shard.numerics) for shard in shards))
    return replace(placement, layers=tuple(chosen))


def _shared_class(layer: LayerSpec, shards: Sequence[Shard], offers: Mapping[str, Offer]) -> str | None:
    holders = dict.fromkeys(holder for shard in shards for holder in shard.holders)
    stated = {offer.stated for holder in holders if (offer := offers[holder]).stated is not None}
    wanted = sorted(stated) if stated else [*preferred(offers.values()), DEFAULT_NUMERICS]
    for name in (name for name in wanted if name is not None):
        is_offered = all(name in offers[holder].classes for holder in holders)
        if is_offered and all(takes_weights(name, layer.resident_dtype(shard.weights)) for shard in shards):
            return name
    return None


def preferred(offers: Iterable[Offer]) -> list[str]:
    """Returns the classes of the preset that some holder offers, best first. A class whose bits are
    an architecture's is among them only where all holders that offer it have one architecture:
    otherwise a result would depend on which of them has a layer.
    """
    kinds: dict[str, set[str]] = {}
    for offer in offers:
        for name in offer.classes:
            kinds.setdefault(name, set()).add(offer.architecture)
    return [
        name
        for word in _WORDS
        for name, facts in CLASSES.items()
        if facts.activations == word and name in kinds and not (facts.is_bounded and len(kinds[name]) > 1)
    ]


def dense_class(offer: Offer, weight_format: str) -> str:
    """Returns the class of the host's own matrices that are kept in this format."""
    wanted = preferred([offer]) if offer.stated is None else [offer.stated]
    return next((name for name in wanted if takes_weights(name, weight_format)), DEFAULT_NUMERICS)


@functools.cache
def class_errors() -> Mapping[str, float]:
    """Returns by class the rms change of the experts' output over its standard deviation, as
    bench/campaigns/class_errors.py has recorded it (docs/numerics.md).
    """
    text = resources.files(__package__).joinpath("class_errors.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def describe(preset: str, placement: Placement, topology: Topology, dense: Sequence[str] = ()) -> str:
    """Returns the line of the start: which classes the layers have got, what each moves, which of
    `dense` the host's own matrices get by their formats, and which stated keys have won. It is
    empty for the preset exact where nobody rounds.
    """
    classes = [" and ".join(sorted({shard.numerics for shard in shards})) for shards in placement.layers]
    counts = {name: classes.count(name) for name in dict.fromkeys(classes)}
    if preset != FAST and set(counts) <= {DEFAULT_NUMERICS}:
        return ""
    parts = [f"{name} in {count} of {len(classes)} layers ({_error_text(name)})" for name, count in counts.items()]
    if dense:
        parts.append(
            "the host's own matrices by their formats " + " or ".join(f"{name} ({_error_text(name)})" for name in dense)
        )
    won = [name for name in (HOST, *(worker.name for worker in topology.workers)) if is_stated(topology, name)]
    keys = ", ".join("host.activations" if name == HOST else f"activations of {name}" for name in won)
    return f"preset {preset}: {', '.join(parts)}" + (f"; stated and kept: {keys}" if keys else "")


def _error_text(name: str) -> str:
    if name not in CLASSES or name == DEFAULT_NUMERICS:
        return "exact" if name == DEFAULT_NUMERICS else "several classes"
    found = class_errors().get(name)
    return f"rms {100 * found:.2g}% of the output" if found is not None else "no error recorded"
