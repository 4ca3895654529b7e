"""Says in at most eight lines what a fit has decided: what lies where and how much is left there,
what can be changed, and with which command it is written down as a topology. Other lines say how
fast it may be, and what the machine's cache of packed experts will hold.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dflash_moe.config import format_bytes
from dflash_moe.config.values import runs_of
from dflash_moe.placement.fit import SLOTS, Card, Fit, FitModel, Machine, Place

# Header, processor's memory, mapped file, advice and command take the other lines.
MAX_CARD_LINES = 3


def describe(model: FitModel, machine: Machine, found: Fit, command: str) -> list[str]:
    """Returns the lines. `command` writes the fit as a topology."""
    total = format_bytes(sum(layer.memory_bytes for layer in model.layers))
    lines = [f"{model.name}, fitted to this machine: {len(model.layers)} layers with experts in {model.formats}, {total}"]
    lines += _card_lines(model, machine, found)
    free = f"memory, {format_bytes(machine.memory_bytes)} free, {machine.cores} core{'s' * (machine.cores != 1)}"
    lines.append(f"  {free}: {_contents(model, found, None, machine.memory_bytes, machine.front_bytes)}")
    memory, mapped = _place(found, "memory"), _place(found, "mapped")
    if memory is not None and memory.layout == SLOTS:
        size = format_bytes(sum(model.layers[at].memory_bytes for at in memory.layers))
        lines.append(f"  disk: all of these experts, {size} in panels; calls read those that are not in memory")
    if mapped is not None:
        can_pack = all(model.layers[at].can_pack for at in mapped.layers)
        lines.append(
            f"  mapped file: experts of {_layers(model, mapped)}, {format_bytes(mapped.num_bytes)}; read "
            f"and {'packed' if can_pack else 'dequantised'} anew in each call, slower than all else"
        )
    lines.append(f"  to change: {_advice(model, machine, found)}")
    lines.append(f"  as a topology to edit: {command}")
    return lines


def speed_line(model: FitModel, found: Fit, bytes_per_s: float) -> str:
    """Returns a guess at how fast a request by itself is answered, of which the machine's memory
    gives `bytes_per_s`; 0 stands for nobody knows.
    """
    reads = {place.name: sum(model.layers[at].token_bytes for at in place.layers) for place in found.places}
    host = "memory" if found.host is None else found.host.name
    reads = {host: 0} | reads
    reads[host] += model.needs(found.host).dense_bytes
    memory = _place(found, "memory")
    has_slots = memory is not None and memory.layout == SLOTS
    places = {"memory": "memory and disk" if has_slots else "memory", "mapped": "the mapped file"}
    parts = [f"{format_bytes(count)} from {places.get(name, name)}" for name, count in reads.items()]
    text = f"  speed: of the weights a token reads {' and '.join(parts)}"
    if not bytes_per_s or "memory" not in reads or has_slots:
        return text
    rate = f"memory gives {format_bytes(bytes_per_s)}/s just now"
    tokens = bytes_per_s / reads["memory"]
    about = f"about {tokens:.0f}" if tokens >= 10 else f"about {tokens:.1f}"
    return f"{text}; {rate}: {about} tokens/s at most" + (", less what the rest takes" if len(reads) > 1 else "")


def cache_line(model: FitModel, found: Fit, folder: Path, room_bytes: int) -> str:
    """Returns how much of `folder`, and of the page cache, the experts in memory will have once
    they are written there; an empty text where none are. The folder has room for `room_bytes` of
    panels, those that are there included.
    """
    memory = _place(found, "memory")
    if memory is None or memory.layout == SLOTS:
        return ""
    if not room_bytes:
        return "  cache: no packed experts are kept on disk, so that each start packs them"
    wanted, room = format_bytes(memory.num_bytes), f"{folder} has room for {format_bytes(room_bytes)}"
    if memory.num_bytes > room_bytes:
        return (
            f"  cache: {wanted} of packed experts are more than fit, {room}: the rest is packed at each start; raise "
            "`cache.max_bytes`, or name another folder by `cache.path`"
        )
    return f"  cache: {wanted} of packed experts, {room}; starts map them from there, into the page cache's memory"


def _advice(model: FitModel, machine: Machine, found: Fit) -> str:
    """Returns the options that move the fit, with what they are now."""
    parts = []
    if machine.cards:
        parts.append(f"--experts-on-card (now {found.layers_on_cards} of {len(model.layers)} layers)")
    token_bytes = format_bytes(model.needs(found.host).kv_token_bytes)
    parts.append(f"--max-context (now {found.context:,} tokens, {token_bytes} each)")
    mapped = _place(found, "mapped")
    short = 0 if mapped is None else sum(model.layers[at].memory_bytes for at in mapped.layers if model.layers[at].can_pack)
    memory = _place(found, "memory")
    if memory is not None and memory.layout == SLOTS:
        missing = sum(model.layers[at].memory_bytes for at in memory.layers) - memory.num_bytes
        more = f"{format_bytes(missing)} more of free memory"
        parts.append(f"a smaller quantisation, or {more}, so that none are read from disk")
    if short:
        # What is left is less than one layer, so that it is not worth its arithmetic.
        parts.append(f"a smaller quantisation, or {format_bytes(short)} more of free memory, for the layers in the mapped file")
    return "; ".join(parts)


def _place(found: Fit, name: str) -> Place | None:
    return next((place for place in found.places if place.name == name and place.card is None), None)


def _card_lines(model: FitModel, machine: Machine, found: Fit) -> list[str]:
    lines: list[str] = []
    num_layers = 0
    for card in machine.cards:
        place = next((place for place in found.places if place.card is card), None)
        text = _contents(model, found, card, card.free_bytes)
        if card is machine.cards[0] and found.host is not card:
            text += "; no attention: " + (card.no_host or "its memory has no room for it")
        num_layers += len(place.layers) if place is not None and len(lines) >= MAX_CARD_LINES - 1 else 0
        lines.append(f"  {card.device} {card.label}, {format_bytes(card.free_bytes)} free: {text}")
    if len(lines) > MAX_CARD_LINES:
        rest = len(lines) - MAX_CARD_LINES + 1
        lines = [*lines[: MAX_CARD_LINES - 1], f"  {rest} more cards: experts of {num_layers} layers"]
    return lines


def _contents(model: FitModel, found: Fit, card: Card | None, free_bytes: int, front_bytes: int = 0) -> str:
    """Returns what lies on a card, or in memory where that is None, and what is left of it."""
    place = _place(found, "memory") if card is None else next((one for one in found.places if one.card is card), None)
    parts, taken = [], 0
    if found.host is card:
        needs = model.needs(found.host)
        taken = needs.dense_bytes + found.kv_bytes
        parts.append(f"attention and all but experts ({format_bytes(needs.dense_bytes)})")
        parts.append(f"keys and values of {found.context:,} tokens ({format_bytes(found.kv_bytes)})")
    if place is not None:
        taken += place.num_bytes
        some = "some of the " if place.layout == SLOTS else ""
        parts.append(f"{some}experts of {_layers(model, place)} ({format_bytes(place.num_bytes)})")
    if front_bytes:
        taken += front_bytes
        parts.append(f"the server's front ({format_bytes(front_bytes)})")
    return "; ".join([*parts, f"{format_bytes(free_bytes - taken)} left"]) if parts else "nothing"


def _layers(model: FitModel, place: Place) -> str:
    if len(place.layers) == len(model.layers):
        return "all layers"
    return f"layer{'s' * (len(place.layers) != 1)} " + ranges([model.layers[at].index for at in place.layers])


def ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers as text, runs of them as 3..7."""
    return ", ".join(str(first) if first == last else f"{first}..{last}" for first, last in runs_of(numbers))
