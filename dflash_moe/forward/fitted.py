"""Asks this machine and a checkpoint for what a fit needs (placement/fit.py), and logs the plan. It
is what runs where nobody gives a topology. Simulated cards are never among those of the machine.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_moe import _core
from dflash_moe.config import CacheSettings, Settings, resolve_settings
from dflash_moe.errors import DflashError, UnsupportedError
from dflash_moe.experts.tensors import ITEM_BYTES
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.formats.weight_formats import mapped_only, not_on_cards, split_formats
from dflash_moe.model.sizing import ModelSizes, model_sizes
from dflash_moe.model.spec import LayerSpec
from dflash_moe.placement.fit import Card, Fit, FitLayer, FitModel, FitWishes, HostNeeds, Machine, fit
from dflash_moe.placement.fit_text import cache_line, describe, speed_line
from dflash_moe.protocol.devices import DeviceChoice, open_device
from dflash_moe.store.folder import default_path
from dflash_moe.store.machine_panels import panel_room, uses_panels
from dflash_moe.telemetry.machine import memory_available, physical_cores
from dflash_moe.telemetry.memory_speed import memory_bytes_per_s
from dflash_moe.topology.numerics import CLASSES
from dflash_moe.topology.spec import GPU_BACKENDS

log = logging.getLogger(__name__)
log_plan = logging.getLogger("dflash_moe.plan")

# Cards that round inputs so have matrix units.
_MATRIX_WORD = "bf16"


@dataclass(frozen=True, slots=True)
class Fitted:
    """A model fitted to this machine. `command` writes it as a topology. `cache` says where packed
    experts are kept.
    """

    layers: tuple[LayerSpec, ...]
    model: FitModel
    machine: Machine
    found: Fit
    command: str
    cache: CacheSettings

    def lines(self) -> list[str]:
        """Returns the plan in at most eight lines."""
        return describe(self.model, self.machine, self.found, self.command)

    def speed(self) -> str:
        """Returns a line on how fast it may be. It measures the speed of memory, which takes a
        fifth of a second.
        """
        return speed_line(self.model, self.found, memory_bytes_per_s(self.machine.cores))

    def kept(self) -> str:
        """Returns a line on the packed experts that this machine will keep on disk, empty where
        none lie in memory as a whole.
        """
        room = panel_room(self.cache) if uses_panels("auto", self.cache) else 0
        return cache_line(self.model, self.found, self.cache.path or default_path(), room)


def fit_here(path: str | Path, overrides: Mapping[str, Any] | None = None, *, front_bytes: int = 0) -> Fit:
    """Fits the model of `path` to this machine and logs the plan to "dflash_moe.plan". Arguments
    and errors are those of `fit_checkpoint`.
    """
    fitted = fit_checkpoint(Checkpoint.open(path), path, overrides, front_bytes=front_bytes)
    for line in fitted.lines():
        log_plan.info("%s", line)
    return fitted.found


def fit_checkpoint(
    checkpoint: Checkpoint, path: str | Path, overrides: Mapping[str, Any] | None = None, *, front_bytes: int = 0
) -> Fitted:
    """Fits an opened checkpoint, which somebody calls `path`, to this machine. `overrides` are
    settings that win over the environment; those that matter are experts_on_card, max_context,
    kv_memory, kv_dtype and host_operators. `front_bytes` of the memory are left to a server's
    front.

    Errors: ConfigError with the shortfall, and those of `model_sizes`.
    """
    settings = resolve_settings(None, **(overrides or {}))
    sizes = model_sizes(checkpoint)
    model = fit_model(sizes, settings)
    machine = Machine(find_cards(sizes.layers), memory_available(), physical_cores(), front_bytes)
    found = fit(model, machine, _wishes(settings))
    return Fitted(sizes.layers, model, machine, found, _command(path, settings), settings.cache)


def fit_model(sizes: ModelSizes, settings: Settings) -> FitModel:
    """Returns what a model takes. On a card torch's operators compute in the model's dtype; on the
    processor a quantised checkpoint's matrices stay as they are stored.
    """
    size, item = sizes.host, ITEM_BYTES[sizes.dtype]
    kv_item = ITEM_BYTES[settings.kv_dtype or sizes.dtype]
    in_torch = size.dense.torch_bytes(item)
    kept = in_torch if settings.host_operators == "torch" else size.dense.kept_bytes(item)
    kv_token = size.kv_values * kv_item
    formats = dict.fromkeys(name for layer in sizes.layers for name in split_formats(layer.weight_dtype))
    return FitModel(
        sizes.path.name,
        " and ".join(formats),
        tuple(_layer(layer) for layer in sizes.layers),
        HostNeeds(kept, kv_token),
        HostNeeds(in_torch, kv_token + size.gathered_bytes(kv_item)),
        size.max_positions,
    )


def _layer(layer: LayerSpec) -> FitLayer:
    can_pack = not mapped_only(layer.weight_dtype)
    expert_bytes = layer.resident_bytes("auto") if can_pack else layer.expert_bytes
    return FitLayer(layer.index, layer.num_experts, layer.num_experts * expert_bytes, can_pack, layer.top_k * expert_bytes)


def _wishes(settings: Settings) -> FitWishes:
    asked = settings.experts_on_card
    stated = settings.kv_memory
    is_stated = stated != Settings().kv_memory and stated.fraction is None
    return FitWishes(
        asked if isinstance(asked, int) else None, settings.max_context, stated.num_bytes if is_stated else None,
        panel_room(settings.cache),
    )  # fmt: skip


def _command(path: str | Path, settings: Settings) -> str:
    """Returns the command that writes the same fit as a topology."""
    words = ["dflash-moe", "plan", "--model", str(path)]
    for flag, value in (("--experts-on-card", settings.experts_on_card), ("--max-context", settings.max_context)):
        words += [flag, str(value)] if value is not None else []
    return shlex.join([*words, "--write", "FILE"])


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
        return opened.layer_bytes(
            spec=layer.ffn.kernel_spec(),
            num_experts=layer.num_experts,
            weight_dtype=layer.weight_dtype,
        )
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
