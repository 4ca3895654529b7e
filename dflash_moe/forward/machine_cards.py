"""Finds the cards of this machine for a fit: how much memory of each is free, which of a model's
layers it computes with, and whether attention can run there. Simulated cards are never among them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash_moe import _core
from dflash_moe.errors import DflashError, UnsupportedError
from dflash_moe.model.formats.weight_formats import not_on_cards
from dflash_moe.placement.fit import Card
from dflash_moe.protocol.devices import DeviceChoice, open_device
from dflash_moe.topology.numerics import CLASSES
from dflash_moe.topology.spec import GPU_BACKENDS

if TYPE_CHECKING:
    from dflash_moe.model.spec import LayerSpec

log = logging.getLogger(__name__)

# Cards that round inputs so have matrix units.
_MATRIX_WORD = "bf16"


def find_cards(layers: Sequence[LayerSpec]) -> tuple[Card, ...]:
    """Returns the usable cards, the fastest first. No speed was measured: cards with matrix units
    come before those without, and then those with more memory.
    """
    found: list[tuple[tuple[bool, int, int], Card]] = []
    for backend in GPU_BACKENDS:
        for number, device in enumerate(_core.probe_backend(backend)["devices"]):
            choice = DeviceChoice(backend, number)
            try:
                if device["reason"]:
                    raise UnsupportedError(device["reason"])
                card, has_matrix_units = look_at_card(choice, device["name"], layers)
            except DflashError as error:
                log.info("%s:%d is not used: %s", backend, number, error)
                continue
            found.append(((not has_matrix_units, -device["memory_bytes"], len(found)), card))
    return tuple(card for _, card in sorted(found, key=lambda entry: entry[0]))


def look_at_card(choice: DeviceChoice, label: str, layers: Sequence[LayerSpec]) -> tuple[Card, bool]:
    """Opens a card, and returns what a fit needs to know of it and whether it has matrix units.
    Errors are those of `open_device`.
    """
    opened = open_device(choice, threads=1, name=f"{choice.backend}:{choice.device}")
    assert opened is not None, "a card is no processor"
    sizes: dict[tuple[str, int, str], int | None] = {}
    for layer in layers:
        kind = _kind(layer)
        if kind not in sizes:
            sizes[kind] = _layer_bytes(opened, layer)
    matrix = any(CLASSES[name].activations == _MATRIX_WORD for name in opened.numerics_classes())
    return Card(
        f"{choice.backend}:{choice.device}",
        label,
        opened.free_bytes(),
        tuple(sizes[_kind(layer)] for layer in layers),
        _why_no_host(choice),
        choice.simulate or None,
    ), matrix


def _kind(layer: LayerSpec) -> tuple[str, int, str]:
    return str(layer.ffn.kernel_spec()), layer.num_experts, layer.weight_dtype


def _layer_bytes(opened: _core.BackendDevice, layer: LayerSpec) -> int | None:
    if not_on_cards(layer.weight_dtype):
        return None
    try:
        return opened.layer_bytes(spec=layer.ffn.kernel_spec(), num_experts=layer.num_experts, weight_dtype=layer.weight_dtype)
    except UnsupportedError as error:
        log.info("%s: layer %d is not for it: %s", opened.label, layer.index, error)
        return None


def _why_no_host(choice: DeviceChoice) -> str:
    """Returns why attention cannot run on a card, an empty text where it can."""
    if not choice.has_own_memory:
        return ""
    import torch

    is_hip = torch.version.hip is not None
    if not torch.cuda.is_available() or is_hip != (choice.backend == "hip"):
        return f"torch {torch.__version__} here has no support for {choice.backend}"
    if choice.device >= torch.cuda.device_count():
        return f"torch sees {torch.cuda.device_count()} cards"
    return ""
