"""Says in at most eight lines what a fit has decided, what the one number is to turn, and with
which command it is written down as a topology.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_moe.config import format_bytes
from dflash_moe.placement.fit import Fit, FitModel, Machine, Place

# Header, processor's memory, mapped file, advice and command take the other lines.
MAX_CARD_LINES = 3


def describe(model: FitModel, machine: Machine, found: Fit, command: str) -> list[str]:
    """Returns the lines. `command` writes the fit as a topology."""
    total = sum(layer.memory_bytes for layer in model.layers)
    lines = [
        f"no topology given, fitted to this machine: {model.name}, {len(model.layers)} layers with experts in "
        f"{model.formats}, {format_bytes(total)}"
    ]
    lines += _card_lines(model, machine, found)
    lines.append(f"  memory, {format_bytes(machine.memory_bytes)} free, {machine.cores} cores: {_memory_text(model, found)}")
    mapped = _place(found, "mapped")
    if mapped is not None:
        can_pack = all(model.layers[at].can_pack for at in mapped.layers)
        lines.append(
            f"  mapped file: experts of {_layers(model, mapped)}, {format_bytes(mapped.num_bytes)}; read "
            f"and {'packed' if can_pack else 'dequantised'} anew in each call, slower than all else"
        )
    if machine.cards:
        lines.append(f"  --experts-on-card {found.layers_on_cards} is the number to turn (now of {len(model.layers)} layers)")
    lines.append(f"  as a topology to edit: {command}")
    return lines


def _place(found: Fit, name: str) -> Place | None:
    return next((place for place in found.places if place.name == name and place.card is None), None)


def _card_lines(model: FitModel, machine: Machine, found: Fit) -> list[str]:
    lines: list[str] = []
    num_layers = 0
    for card in machine.cards:
        place = next((place for place in found.places if place.card is card), None)
        parts = [_host_text(found)] if card is found.host else []
        if place is not None:
            parts.append(f"experts of {_layers(model, place)} ({format_bytes(place.num_bytes)})")
        if card is machine.cards[0] and found.host is not card:
            parts.append("no attention: " + (card.no_host or "its memory has no room for it"))
        num_layers += len(place.layers) if place is not None and len(lines) >= MAX_CARD_LINES - 1 else 0
        lines.append(f"  {card.device} {card.label}, {format_bytes(card.free_bytes)} free: {'; '.join(parts) or 'nothing'}")
    if len(lines) > MAX_CARD_LINES:
        rest = len(lines) - MAX_CARD_LINES + 1
        lines = [*lines[: MAX_CARD_LINES - 1], f"  {rest} more cards: experts of {num_layers} layers"]
    return lines


def _host_text(found: Fit) -> str:
    return f"attention, keys and values of {found.context:,} tokens ({format_bytes(found.kv_bytes)})"


def _memory_text(model: FitModel, found: Fit) -> str:
    place = _place(found, "memory")
    parts = [_host_text(found)] if found.host is None else []
    if place is not None:
        parts.append(f"experts of {_layers(model, place)} ({format_bytes(place.num_bytes)})")
    return "; ".join(parts) or "nothing"


def _layers(model: FitModel, place: Place) -> str:
    if len(place.layers) == len(model.layers):
        return "all layers"
    return "layers " + ranges([model.layers[at].index for at in place.layers])


def ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers as text, runs of them as 3..7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)
