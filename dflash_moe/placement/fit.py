"""Fits a model to one machine without a topology: where attention goes, and where the experts of
each layer. It moves whole layers, so that the experts of a layer are one shard wherever they are.

It is pure arithmetic: what a model takes and what a machine has come from the caller
(forward/fitted.py). The bits of a result do not depend on how many layers fit a card (decision 46).
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from dflash_moe.config import MemoryBudget, format_bytes
from dflash_moe.errors import ConfigError
from dflash_moe.topology import ExpertSelection, HostSpec, PlacementSpec, Topology, WorkerSpec
from dflash_moe.topology.topology import FITTED

# So much stays free on each card and of the machine's memory: for the driver, for torch, for what
# was estimated, and for what a step computes with. That is 288 MiB at most for each forward of
# experts under way (csrc/compute/cpu/cpu_layer.cc), of which a step in two halves has two, and
# 72 MiB for each linear layer under way, however many layers the model has.
MARGIN_BYTES = 1 << 30
# Memory is left for requests of so many tokens where nobody says how many.
DEFAULT_CONTEXT = 8192
# The KV cache gets this part of what is free after the weights where nobody says otherwise.
KV_PART = 4
PROCESSOR = "cpu"
# The layout of a place whose memory has a part of its experts at a time.
SLOTS = "slots"
# Panels take at most so many times what the experts take in memory: rows are filled up to whole
# panels, and pieces to whole pages.
PANELS_SIZE = 1.05


@dataclass(frozen=True, slots=True)
class FitLayer:
    """The routed experts of one layer. `memory_bytes` are those of all of them, packed, or as they
    are stored where no kernel reads their format packed. A token reads `token_bytes` of them.
    """

    index: int
    num_experts: int
    memory_bytes: int
    can_pack: bool = True
    token_bytes: int = 0


@dataclass(frozen=True, slots=True)
class HostNeeds:
    """What the host's own part of the model takes at one device: its weights, and keys and values
    of one token.
    """

    dense_bytes: int
    kv_token_bytes: int

    def with_context(self, tokens: int) -> int:
        """Returns the bytes of the weights and of a KV cache of so many tokens."""
        return self.dense_bytes + tokens * self.kv_token_bytes


@dataclass(frozen=True, slots=True)
class Card:
    """One card. `device` is its name in a topology (cuda:0) and `label` its name for people.

    `layer_bytes[i]` are the bytes of the i-th layer's experts on it, None where it does not compute
    with their format. `no_host` says why attention cannot run there, and is empty where it can.
    """

    device: str
    label: str
    free_bytes: int
    layer_bytes: tuple[int | None, ...]
    no_host: str = ""
    # A simulated card, for tests, imitates one of this vendor.
    simulate: str | None = None

    @property
    def name(self) -> str:
        """The name of its worker."""
        return self.device.replace(":", "")


@dataclass(frozen=True, slots=True)
class Machine:
    """What is free on this machine: its cards from the fastest on, bytes of memory with control
    groups counted, and cores. Of the memory a server's front will take `front_bytes`.
    """

    cards: tuple[Card, ...]
    memory_bytes: int
    cores: int
    front_bytes: int = 0

    @property
    def model_bytes(self) -> int:
        """The memory that is free for the model."""
        return self.memory_bytes - self.front_bytes


@dataclass(frozen=True, slots=True)
class FitModel:
    """What a model takes. `on_card` and `in_memory` are the needs of its host there, and
    `max_positions` is 0 where the model sets no limit.
    """

    name: str
    formats: str
    layers: tuple[FitLayer, ...]
    in_memory: HostNeeds
    on_card: HostNeeds
    max_positions: int

    def needs(self, host: Card | None) -> HostNeeds:
        """Returns the needs of its host on a card, or on the processor where that is None."""
        return self.in_memory if host is None else self.on_card


@dataclass(frozen=True, slots=True)
class FitWishes:
    """What somebody asked for; None leaves it to the fit."""

    layers_on_cards: int | None = None
    max_context: int | None = None
    # The bytes of the KV cache, where they are stated.
    kv_bytes: int | None = None
    # The bytes of panels that this machine's store has room for, 0 where none are kept.
    panel_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where the experts of some layers are. `layers` ascend, and `num_bytes` is what they take of
    `free_bytes`, which is what was there for experts. With layout `slots` that is all of it, and
    less than the experts take.
    """

    name: str
    card: Card | None
    layers: tuple[int, ...]
    num_bytes: int
    free_bytes: int
    layout: str = "packed"


@dataclass(frozen=True, slots=True)
class Fit:
    """A model fitted to a machine. `host` is the card of attention, None for the processor.
    `kv_bytes` are those of the keys and values of one request of `context` tokens, or what was
    stated. `places` are those that have experts, from the fastest on.
    """

    topology: Topology
    host: Card | None
    context: int
    kv_bytes: int
    places: tuple[Place, ...]

    @property
    def layers_on_cards(self) -> int:
        """The number of layers whose experts are on cards."""
        return sum(len(place.layers) for place in self.places if place.card is not None)


def fit(model: FitModel, machine: Machine, wishes: FitWishes | None = None) -> Fit:
    """Fits the model to the machine. Attention, keys and values go to the fastest card that has
    room for them, else to the processor. Experts go, from the last layer backwards, to the cards
    from the fastest on, then to memory, and those that are left stay in the mapped file. Where the
    store on disk has room for panels of all that memory and file would hold, memory is slots for
    any of those layers instead.

    Raises ConfigError with the shortfall and what would fit.
    """
    wishes = wishes or FitWishes()
    _check_wish(model, machine, wishes)
    context = wishes.max_context or min(model.max_positions or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    host = _host(model, machine, context, wishes.kv_bytes)
    kv_bytes = _kv_bytes(model.needs(host), context, wishes.kv_bytes)
    rooms = [(card, card.free_bytes - MARGIN_BYTES) for card in machine.cards]
    taken = model.needs(host).dense_bytes + kv_bytes
    rooms = [(card, room - (taken if card is host else 0)) for card, room in rooms]
    left = list(range(len(model.layers)))[::-1]
    places = []
    limit = len(left) if wishes.layers_on_cards is None else wishes.layers_on_cards
    for card, room in rooms:
        held = _fill(left, [size if size is not None else -1 for size in card.layer_bytes], room, limit)
        limit -= len(held)
        places.append(_place(card.name, card, model, held, room))
        left = [at for at in left if at not in held]
    if wishes.layers_on_cards is not None and limit > 0:
        raise _too_many(model, machine, rooms, places, wishes.layers_on_cards)
    memory = machine.model_bytes - MARGIN_BYTES - (taken if host is None else 0)
    held = _fill(left, [layer.memory_bytes if layer.can_pack else -1 for layer in model.layers], memory, len(left))
    slots = [at for at in left if model.layers[at].can_pack]
    if _takes_slots(model, slots, held, memory, wishes.panel_bytes):
        held = slots
        places.append(replace(_place("memory", None, model, held, memory, SLOTS), num_bytes=memory))
    else:
        places.append(_place("memory", None, model, held, memory))
    left = [at for at in left if at not in held]
    places.append(_place("mapped", None, model, left, 0, "mapped"))
    # A quarter of what is free is the engine's default; bytes are stated only where that is less.
    is_stated = wishes.kv_bytes is None and kv_bytes > (kv_bytes + _unused(host, places)) // KV_PART
    found = tuple(place for place in places if place.layers)
    topology = _topology(model, machine, host, kv_bytes if is_stated else None, found, wishes)
    return Fit(topology, host, context, kv_bytes, found)


def _takes_slots(model: FitModel, slots: Sequence[int], packed: Sequence[int], memory: int, panel_bytes: int) -> bool:
    """Says whether layers that could be packed, but not all of which fit, get slots: there must be
    memory for the experts of one layer, and disk for panels of all.
    """
    sizes = [model.layers[at].memory_bytes for at in slots]
    return len(slots) > len(packed) and max(sizes) <= memory and PANELS_SIZE * sum(sizes) <= panel_bytes


def _check_wish(model: FitModel, machine: Machine, wishes: FitWishes) -> None:
    asked = wishes.layers_on_cards
    if asked is None:
        return
    if asked > len(model.layers):
        raise ConfigError(
            f"--experts-on-card {asked}: the model has {len(model.layers)} layers with experts; "
            f"give 0..{len(model.layers)}, or auto"
        )
    if asked and not machine.cards:
        raise ConfigError(
            f"--experts-on-card {asked}: no card that could be used was found here (`dflash-moe doctor` says why); leave the "
            "option out, or give 0"
        )


def _kv_bytes(needs: HostNeeds, context: int, stated: int | None) -> int:
    return context * needs.kv_token_bytes if stated is None else stated


def _host(model: FitModel, machine: Machine, context: int, kv_bytes: int | None) -> Card | None:
    """Returns the first card that can run attention and has room for it, None for the processor.
    Raises ConfigError where that has none either.
    """
    for card in machine.cards:
        needed = model.on_card.dense_bytes + _kv_bytes(model.on_card, context, kv_bytes)
        if not card.no_host and needed + MARGIN_BYTES <= card.free_bytes:
            return card
    needed = model.in_memory.dense_bytes + _kv_bytes(model.in_memory, context, kv_bytes)
    if needed + MARGIN_BYTES > machine.model_bytes:
        raise _too_large(model, machine, context, needed, kv_bytes)
    return None


def _fill(order: Sequence[int], sizes: Sequence[int], room: int, limit: int) -> list[int]:
    """Returns the positions of the layers that a place takes: one after another in `order`, until
    one does not fit or there are `limit` of them. A layer whose size is negative is passed over.
    """
    held: list[int] = []
    for at in order:
        if sizes[at] < 0:
            continue
        if len(held) == limit or sizes[at] > room:
            break
        held.append(at)
        room -= sizes[at]
    return held


def _place(name: str, card: Card | None, model: FitModel, held: Sequence[int], room: int, layout: str = "packed") -> Place:
    sizes = [layer.memory_bytes for layer in model.layers] if card is None else [size or 0 for size in card.layer_bytes]
    held = sorted(held)
    return Place(name, card, tuple(held), sum(sizes[at] for at in held), max(0, room), layout)


def _unused(host: Card | None, places: Sequence[Place]) -> int:
    """Returns the bytes that are left where the KV cache is."""
    return next(place.free_bytes - place.num_bytes for place in places if place.card is host and place.layout != "mapped")


def _topology(
    model: FitModel, machine: Machine, host: Card | None, kv_bytes: int | None, places: Sequence[Place], wishes: FitWishes
) -> Topology:
    # One thread of the host feeds a card; all others compute the experts that are in memory.
    threads = machine.cores if host is None else max(1, machine.cores - 1)
    workers = tuple(_worker(model, place, host, threads) for place in places)
    spec = HostSpec(PROCESSOR, threads) if host is None else HostSpec(host.device, simulate=host.simulate)
    engine: dict[str, Any] = {} if kv_bytes is None else {"kv_memory": MemoryBudget(kv_bytes)}
    if wishes.max_context is not None:
        engine["max_context"] = wishes.max_context
    return Topology(workers, spec, placement=PlacementSpec("explicit"), source=FITTED, engine=MappingProxyType(engine))


def _worker(model: FitModel, place: Place, host: Card | None, threads: int) -> WorkerSpec:
    """Returns the worker of a place. What computes on the host's own device is inside its process:
    processes take turns on a card, and on the processor one pool of threads does everything.
    """
    experts = ExpertSelection(
        MappingProxyType({str(model.layers[at].index): tuple(range(model.layers[at].num_experts)) for at in place.layers})
    )
    address = "loopback" if place.card is host else None
    if place.card is None:
        # What was found to fit is packed under auto too, which unlike packed also uses panels that
        # are kept on disk.
        layout = "mapped" if place.layout == "mapped" else "auto"
        own = None if host is None else threads
        memory = place.num_bytes if place.layout == SLOTS else None
        return WorkerSpec(place.name, threads=own, address=address, experts=experts, weights_layout=layout, memory=memory)
    backend, _, number = place.card.device.partition(":")
    device = None if place.card.simulate else int(number)
    return WorkerSpec(place.name, backend, device=device, address=address, experts=experts, simulate=place.card.simulate)


def _too_many(
    model: FitModel, machine: Machine, rooms: Sequence[tuple[Card, int]], places: Sequence[Place], asked: int
) -> ConfigError:
    """Makes the error for more layers than the cards hold. The shortfall is that of the layers that
    are left, counted as the fastest card would hold them.
    """
    fitting = sum(len(place.layers) for place in places)
    held = {at for place in places for at in place.layers}
    takes = [at for at in range(len(model.layers))[::-1] if any(card.layer_bytes[at] is not None for card in machine.cards)]
    if len(takes) < asked:
        return ConfigError(
            f"--experts-on-card {asked}: cards here compute with the formats of {len(takes)} of {len(model.layers)} layers "
            f"({model.formats}); give 0..{fitting}, or auto"
        )
    missing = [at for at in takes if at not in held][: asked - fitting]
    sizes = [next((card.layer_bytes[at] or 0 for card in machine.cards if card.layer_bytes[at]), 0) for at in missing]
    unused = max(room - place.num_bytes for (_, room), place in zip(rooms, places, strict=True))
    short = max(1, sum(sizes) - max(0, unused))
    return ConfigError(
        f"--experts-on-card {asked}: the cards hold {fitting} layers beside what else is on them and "
        f"{format_bytes(MARGIN_BYTES)} that stay free; {asked - fitting} more are short by {format_bytes(short)}; "
        f"give 0..{fitting}, auto, or a smaller --max-context"
    )


def _too_large(model: FitModel, machine: Machine, context: int, needed: int, kv_bytes: int | None) -> ConfigError:
    """Makes the error for a host's own part that has no room. It names what would have: a smaller
    context for these weights, and smaller weights for this context.
    """
    needs, room = model.in_memory, machine.model_bytes - MARGIN_BYTES
    tokens = (room - needs.dense_bytes) // max(1, needs.kv_token_bytes)
    kv = kv_bytes if kv_bytes is not None else context * needs.kv_token_bytes
    remedies = []
    if kv_bytes is None and tokens > 0:
        remedies.append(f"--max-context {tokens}")
    elif kv_bytes is not None and room > needs.dense_bytes:
        remedies.append(f"engine.kv_memory of {format_bytes(room - needs.dense_bytes)}")
    if room > kv:
        remedies.append(f"a smaller quantisation, whose weights beside the experts take at most {format_bytes(room - kv)}")
    remedies.append(f"{format_bytes(needed + MARGIN_BYTES - machine.model_bytes)} more of free memory")
    front = f", of which the server's front takes {format_bytes(machine.front_bytes)}" if machine.front_bytes else ""
    return ConfigError(
        f"{model.name} is too large for this machine even with all experts in the mapped file: its other weights take "
        f"{format_bytes(needs.dense_bytes)} and its keys and values of {context:,} tokens {format_bytes(kv)}, beside "
        f"{format_bytes(MARGIN_BYTES)} that stays free; {format_bytes(machine.memory_bytes)} of memory are free{front}: "
        f"{format_bytes(needed + MARGIN_BYTES - machine.model_bytes)} short; what would fit: {', or '.join(remedies)}"
    )
