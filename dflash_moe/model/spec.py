"""Derives the layers with routed experts of a checkpoint, with their sizes, formula and tensor
names, from the model itself.

The model is built on the meta device. Nothing depends on a list of families (docs/architecture.md).
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_moe.errors import ConfigError, UnsupportedError
from dflash_moe.model.architecture import Architecture, load_architecture
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.expert_tensors import check_expert, stored_format
from dflash_moe.model.ffn import FfnSpec
from dflash_moe.model.formats.scaled_tensors import INPUT_SCALE
from dflash_moe.model.formats.weight_formats import FLOATS, common_format, join_formats, resident_formats
from dflash_moe.model.gates import Formula, recognise
from dflash_moe.model.tensor_names import Conversion

log = logging.getLogger(__name__)

# The host's model has this dtype where the checkpoint names none, because models with block formats
# were trained in it.
QUANTISED_DTYPE = "bf16"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The routed experts of one layer.

    Callers and the wire name the layer by `index`. That is the number of the decoder layer where
    the model has one stack, and else its place in the table. `name` is the qualified name of the
    experts module. `top_k` is for sizing only. Weights are stored in the format `weight_dtype`, and
    a worker keeps them so (`weight_formats.join_formats`). `expert_bytes` are those of one expert
    in the checkpoint.
    """

    index: int
    name: str
    num_experts: int
    top_k: int
    ffn: FfnSpec
    weight_dtype: str
    expert_bytes: int

    def resident_dtype(self, weights: str) -> str:
        """Returns the format that a worker keeps whose `weights` are auto, int8 or int4."""
        return resident_formats(self.weight_dtype, weights)

    def resident_bytes(self, weights: str) -> int:
        """Returns the bytes of one expert at a worker with these `weights`."""
        return self.ffn.resident_bytes(self.resident_dtype(weights))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What host and workers must agree on. The host's model runs in `dtype`."""

    layers: tuple[LayerSpec, ...]
    dtype: str
    fingerprint: str
    config_name: str
    path: str


def model_spec(path: str | Path, dtype: str | None = None) -> ModelSpec:
    """Derives the layers of the checkpoint at `path`. The model runs in `dtype`, by default in what
    the checkpoint says.

    Errors: CheckpointError naming file and tensor, UnsupportedError naming class and field,
    ConfigError for the dtype.
    """
    check_dtype(dtype)
    checkpoint = Checkpoint.open(path)
    return spec_of(checkpoint, load_architecture(checkpoint), dtype)


def check_dtype(dtype: str | None) -> None:
    """Raises ConfigError for a dtype in which no model runs."""
    if dtype is not None and dtype not in FLOATS:
        raise ConfigError(f"dtype {dtype!r} is not allowed; choose from {', '.join(FLOATS)}")


def spec_of(checkpoint: Checkpoint, architecture: Architecture, dtype: str | None = None) -> ModelSpec:
    """Derives the layers of an opened checkpoint, with the errors of `model_spec`."""
    if has_ignored_scales(checkpoint):
        say_ignored_scales(checkpoint.path)
    conversion = Conversion.of(architecture.model, checkpoint)
    formulas = {name: recognise(module) for name, module in architecture.experts.items()}
    ffns = {name: _derive_ffn(name, module, formulas[name], conversion) for name, module in architecture.experts.items()}
    _check_last_experts(checkpoint, architecture, ffns)
    _confirm(architecture, ffns, formulas)
    dtype = dtype or _model_dtype(architecture.config) or stored_dtype(checkpoint, next(iter(ffns.values())))
    layers = []
    for index, (name, module) in zip(layer_numbers(tuple(ffns)), architecture.experts.items(), strict=True):
        layers.append(_layer(index, name, module, ffns[name], architecture, checkpoint))
    config_name = type(architecture.config).__name__
    return ModelSpec(tuple(layers), dtype, checkpoint.fingerprint(), config_name, str(checkpoint.path))


def has_ignored_scales(checkpoint: Checkpoint) -> bool:
    """Says whether a checkpoint has scales for activations, which nothing here applies."""
    return any(name.endswith(INPUT_SCALE) for name in checkpoint.tensors)


def say_ignored_scales(path: Path) -> None:
    """Logs that a checkpoint's scales for activations are ignored."""
    log.warning("checkpoint %s: its static scales of activations (%s) are ignored", path, INPUT_SCALE)


def layer_numbers(names: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the number of each layer. It is the one integer in which the names differ, or with
    several stacks the place in the table.
    """
    split = [name.split(".") for name in names]
    places = [place for place, part in enumerate(split[0]) if part.isdigit()]
    for place in places:
        rests = {tuple(part for i, part in enumerate(parts) if i != place) for parts in split}
        if len(rests) == 1 and all(parts[place].isdigit() for parts in split):
            return tuple(int(parts[place]) for parts in split)
    return tuple(range(len(names)))


def _num_experts(module: Any) -> int:
    return int(module._parameters["down_proj"].shape[0])


def _check_last_experts(checkpoint: Checkpoint, architecture: Architecture, ffns: Mapping[str, FfnSpec]) -> None:
    """Looks up the last expert of each layer in the checkpoint. So a configuration that counts more
    experts than the files have is refused before anything is made of that many.
    """
    for name, module in architecture.experts.items():
        check_expert(checkpoint, ffns[name], _num_experts(module) - 1)


def _layer(index: int, name: str, module: Any, ffn: FfnSpec, architecture: Architecture, checkpoint: Checkpoint) -> LayerSpec:
    num_experts = _num_experts(module)
    formats = {check_expert(checkpoint, ffn, expert_id) for expert_id in range(num_experts)}
    # Weights are kept as they are stored, whatever the model runs in.
    weight_dtype = join_formats(common_format(first for first, _ in formats), common_format(down for _, down in formats))
    top_k = min(num_experts, _top_k(name, architecture))
    return LayerSpec(index, name, num_experts, top_k, ffn, weight_dtype, ffn.stored_bytes(weight_dtype))


def stored_dtype(checkpoint: Checkpoint, ffn: FfnSpec) -> str:
    """Returns the dtype in which a model runs whose configuration names none."""
    stored = stored_format(checkpoint, ffn.up_tensor)
    return stored if stored in FLOATS else QUANTISED_DTYPE


def _derive_ffn(name: str, module: Any, formula: Formula, conversion: Conversion) -> FfnSpec:
    parameters: Mapping[str, Any] = module._parameters
    kind, is_transposed = type(module).__name__, bool(module.is_transposed)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    names = [first, "down_proj"] + ([f"{first}_bias", "down_proj_bias"] if module.has_bias else [])
    for wanted in names:
        if parameters.get(wanted) is None:
            raise UnsupportedError(f"{kind}.{wanted}: the experts interface promises this parameter, the module lacks it")
    for extra in [key for key in (*parameters, *module._buffers) if key not in names]:
        raise UnsupportedError(f"{kind}.{extra}: a parameter that the experts interface does not name; its use is not known")
    first_outputs, in_size = _outputs_inputs(parameters[first].shape, is_transposed)
    out_size, intermediate_size = _outputs_inputs(parameters["down_proj"].shape, is_transposed)
    if first_outputs != intermediate_size * (2 if module.has_gate else 1):
        raise UnsupportedError(f"{kind}.{first}: has {first_outputs} outputs, down_proj takes {intermediate_size}")
    inner = {"gate": formula.gate_part, "up": formula.up_part} if module.has_gate else {"up": "all"}

    def patterns(parameter: str, parts: Mapping[str, str]) -> dict[str, Any]:
        shape = tuple(parameters[parameter].shape)
        try:
            found = conversion.patterns(f"{name}.{parameter}", shape, parts, is_transposed=is_transposed)
        except UnsupportedError as error:
            raise UnsupportedError(f"{kind}.{parameter}: {error}") from error
        suffix = "_bias_tensor" if parameter.endswith("_bias") else "_tensor"
        return {f"{label}{suffix}": pattern for label, pattern in found.items()}

    tensors = {**patterns(first, inner), **patterns("down_proj", {"down": "all"})}
    if module.has_bias:
        tensors |= {**patterns(f"{first}_bias", inner), **patterns("down_proj_bias", {"down": "all"})}
    return FfnSpec(
        in_size=in_size,
        intermediate_size=intermediate_size,
        out_size=out_size,
        activation=formula.activation,
        gate=formula.gate,
        alpha=formula.alpha,
        up_offset=formula.up_offset,
        gate_max=formula.gate_max,
        up_limit=formula.up_limit,
        **tensors,
    )


def _outputs_inputs(shape: tuple[int, ...], is_transposed: bool) -> tuple[int, int]:
    return (int(shape[2]), int(shape[1])) if is_transposed else (int(shape[1]), int(shape[2]))


def _confirm(architecture: Architecture, ffns: Mapping[str, FfnSpec], formulas: Mapping[str, Formula]) -> None:
    """Probes each kind of experts module once, because layers differ in names and rarely in
    anything else.
    """
    from dflash_moe.model.probe import confirm

    seen = set()
    for name, module in architecture.experts.items():
        shapes = tuple((key, tuple(value.shape)) for key, value in module._parameters.items())
        kind = (type(module), formulas[name], shapes)
        if kind not in seen:
            confirm(module, ffns[name], formulas[name])
            seen.add(kind)


def _model_dtype(config: Any) -> str | None:
    """Returns the dtype that the configuration asks for, None when it says nothing."""
    for owner in (config, config.get_text_config()):
        dtype = getattr(owner, "dtype", None)
        if dtype is None or dtype == "auto":
            continue
        name = str(dtype).removeprefix("torch.")
        ours = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}.get(name)
        if ours is None:
            raise UnsupportedError(f"{type(owner).__name__}.dtype: found {name}; supported are float32, float16, bfloat16")
        return ours
    return None


def _top_k(name: str, architecture: Architecture) -> int:
    """Returns the number of experts for each token, from the routing module beside the experts or
    from the configuration. It is a number beyond all experts when neither says.
    """
    block = architecture.model.get_submodule(name.rpartition(".")[0])
    owners = [block, *block.children(), architecture.experts[name], architecture.config.get_text_config()]
    for owner in owners:
        for field in ("top_k", "num_experts_per_tok", "moe_top_k", "moe_topk", "num_experts_per_token", "moe_k"):
            value = getattr(owner, field, None)
            if type(value) is int and value > 0:
                return value
    # No layer has as many experts, and the caller takes the smaller number.
    return 1 << 16
