"""Asks this machine and a checkpoint for what a fit needs (placement/fit.py), and logs the plan. It
is what runs where nobody gives a topology.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_moe.config import Settings, resolve_settings
from dflash_moe.experts.tensors import ITEM_BYTES
from dflash_moe.forward.machine_cards import find_cards
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.formats.weight_formats import mapped_only, split_formats
from dflash_moe.model.sizing import ModelSizes, model_sizes
from dflash_moe.model.spec import LayerSpec
from dflash_moe.placement.fit import Fit, FitLayer, FitModel, FitWishes, HostNeeds, Machine, fit
from dflash_moe.placement.fit_text import describe, speed_line
from dflash_moe.telemetry.machine import memory_available, physical_cores
from dflash_moe.telemetry.memory_speed import memory_bytes_per_s

log_plan = logging.getLogger("dflash_moe.plan")


@dataclass(frozen=True, slots=True)
class Fitted:
    """A model fitted to this machine. `command` writes it as a topology."""

    layers: tuple[LayerSpec, ...]
    model: FitModel
    machine: Machine
    found: Fit
    command: str

    def lines(self) -> list[str]:
        """Returns the plan in at most eight lines."""
        return describe(self.model, self.machine, self.found, self.command)

    def speed(self) -> str:
        """Returns a line on how fast it may be. It measures the speed of memory, which takes a
        fifth of a second.
        """
        return speed_line(self.model, self.found, memory_bytes_per_s(self.machine.cores))


def fit_here(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Fit:
    """Fits the model of `path` to this machine and logs the plan to "dflash_moe.plan". Arguments
    and errors are those of `fit_checkpoint`.
    """
    fitted = fit_checkpoint(Checkpoint.open(path), path, overrides)
    for line in fitted.lines():
        log_plan.info("%s", line)
    return fitted.found


def fit_checkpoint(checkpoint: Checkpoint, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Fitted:
    """Fits an opened checkpoint, which somebody calls `path`, to this machine. `overrides` are
    settings that win over the environment; those that matter are experts_on_card, max_context,
    kv_memory, kv_dtype and host_operators.

    Errors: ConfigError with the shortfall, and those of `model_sizes`.
    """
    settings = resolve_settings(None, **(overrides or {}))
    sizes = model_sizes(checkpoint)
    model = fit_model(sizes, settings)
    machine = Machine(find_cards(sizes.layers), memory_available(), physical_cores())
    found = fit(model, machine, _wishes(settings))
    return Fitted(sizes.layers, model, machine, found, _command(path, settings))


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
    return FitWishes(asked if isinstance(asked, int) else None, settings.max_context, stated.num_bytes if is_stated else None)


def _command(path: str | Path, settings: Settings) -> str:
    """Returns the command that writes the same fit as a topology."""
    words = ["dflash-moe", "plan", "--model", str(path)]
    for flag, value in (("--experts-on-card", settings.experts_on_card), ("--max-context", settings.max_context)):
        words += [flag, str(value)] if value is not None else []
    return shlex.join([*words, "--write", "FILE"])
