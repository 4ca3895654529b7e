"""Asks this machine and a checkpoint for what a fit needs (placement/fit.py), and logs the plan. It
is what runs where nobody gives a topology.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_moe.config import Settings, resolve_settings
from dflash_moe.integrations.host_weights import is_plain
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.host_size import HostSize, host_size
from dflash_moe.model.spec import LayerSpec, ModelSpec, model_spec
from dflash_moe.model.weight_formats import mapped_only
from dflash_moe.placement.fit import Fit, FitLayer, FitModel, FitWishes, HostNeeds, Machine, fit
from dflash_moe.placement.fit_text import describe
from dflash_moe.runtime.machine_cards import find_cards
from dflash_moe.runtime.tensors import ITEM_BYTES
from dflash_moe.telemetry.machine import memory_available, physical_cores

log_plan = logging.getLogger("dflash_moe.plan")


def fit_here(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Fit:
    """Fits the model of `path` to this machine. `overrides` are settings that win over the
    environment; those that matter are experts_on_card, max_context, kv_memory, kv_dtype,
    host_operators and dtype. The plan is logged in at most eight lines to "dflash_moe.plan".

    Errors: ConfigError with the shortfall, and those of `model_spec`.
    """
    settings = resolve_settings(None, **(overrides or {}))
    spec = model_spec(path)
    checkpoint = Checkpoint.open(Path(path))
    model = fit_model(spec, host_size(checkpoint, spec), settings, is_plain=is_plain(checkpoint))
    machine = Machine(find_cards(spec.layers), memory_available(), physical_cores())
    found = fit(model, machine, _wishes(settings))
    for line in describe(model, machine, found, _command(path, settings)):
        log_plan.info("%s", line)
    return found


def fit_model(spec: ModelSpec, size: HostSize, settings: Settings, *, is_plain: bool) -> FitModel:
    """Returns what a model takes. On a card torch's operators compute in the model's dtype; on the
    processor a quantised checkpoint's matrices stay as they are stored.
    """
    item = ITEM_BYTES[spec.dtype]
    kv_item = ITEM_BYTES[settings.kv_dtype or spec.dtype]
    in_torch = size.dense_bytes(item)
    packed = in_torch if is_plain or settings.host_operators == "torch" else size.stored_bytes
    kv_token = size.kv_values * kv_item
    return FitModel(
        Path(spec.path).name,
        ", ".join(dict.fromkeys(layer.weight_dtype for layer in spec.layers)),
        tuple(_layer(layer) for layer in spec.layers),
        HostNeeds(packed, kv_token),
        HostNeeds(in_torch, kv_token + size.gathered_bytes(kv_item)),
        size.max_positions,
    )


def _layer(layer: LayerSpec) -> FitLayer:
    can_pack = not mapped_only(layer.weight_dtype)
    expert_bytes = layer.resident_bytes("auto") if can_pack else layer.expert_bytes
    return FitLayer(layer.index, layer.num_experts, layer.num_experts * expert_bytes, can_pack)


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
