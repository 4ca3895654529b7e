"""Derives the layers with routed experts of a GGUF model from the file alone, without torch and
transformers, for programs that compute the rest of the model themselves.

Layers and sizes are those of the tensors blk.N.ffn_{gate,up,down,gate_up}_exps, and the formula is
that of the architecture (gguf_architectures/expert_formulas.py). What our workers cannot compute is
left out by name with the reason, and stays with the program.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_moe.errors import CheckpointError, ProtocolError, UnsupportedError
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.expert_tensors import check_expert
from dflash_moe.model.ffn import FfnSpec, TensorPattern
from dflash_moe.model.formats.gguf_header import BLOCK_TYPES
from dflash_moe.model.formats.stored_tensor import TensorInfo
from dflash_moe.model.formats.stub_pages import MAX_EXPERTS
from dflash_moe.model.formats.weight_formats import STORED_NAMES, join_formats
from dflash_moe.model.gguf_architectures.expert_formulas import FORMULAS, OAI_ALPHA, OAI_LIMIT, REFUSED, ExpertFormula
from dflash_moe.model.spec import LayerSpec, ModelSpec

# Hidden states between layers have this dtype in llama.cpp, whatever that of the weights is.
DTYPE = "f32"
# llama.cpp takes a smaller limit for none.
LEAST_LIMIT = 1e-6

_GGML_TYPES = {name: number for number, (name, _, _) in BLOCK_TYPES.items()}
_IN_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.(.+)", re.ASCII)
_KNOWN = re.compile(r"ffn_(gate|up|down|gate_up)_exps\.(weight|bias|scale)")
_DIMENSIONS = {"weight": 3, "bias": 2, "scale": 1}
EXPERTS = "_exps."
# GroveMoE has smaller experts beside the routed ones, which llama.cpp computes by a call of their
# own.
_CHUNKS = "_chexps."
# These are the program's: the norm of Arctic before its experts, and the scales of inputs, which
# llama.cpp loads and does not use.
_PROGRAMS_OWN = re.compile(r".*\.(ffn_norm_exps\.weight|ffn_(gate|up|down)_exps\.input_scale)")
# At most so many reasons are quoted where no layer remains.
_MAX_REASONS = 3


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor that the workers stand in for. `ggml_type` is the number of its type in GGUF, and
    `extents` are in GGUF's order, the fastest one first. It begins at byte `file_offset` of
    `Checkpoint.files[file]`.
    """

    layer: int
    name: str
    ggml_type: int
    extents: tuple[int, ...]
    num_bytes: int
    file: int
    file_offset: int


@dataclass(frozen=True, slots=True)
class GgufExperts:
    """What is known of a GGUF model's routed experts.

    `spec` has the layers that workers can compute, and `tensors` are all tensors of these layers.
    `left_out` has the reason for every other tensor of experts in the file.
    """

    architecture: str
    spec: ModelSpec
    tensors: tuple[GgufTensor, ...]
    left_out: dict[str, str]
    checkpoint: Checkpoint


@dataclass(slots=True)
class _Found:
    """The tensors of one layer's experts: those we know by part and leaf, such as ("up", "weight"),
    and the names of all others.
    """

    known: dict[tuple[str, str], str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)


class _LeftOut(Exception):  # noqa: N818 - not an error but an answer
    """The reason for which a layer stays with the program."""


def gguf_experts(path: str | Path) -> GgufExperts:
    """Derives the layers of the GGUF file at `path` (any part of a split one, or a stub).

    Errors: CheckpointError where it is none or is damaged, UnsupportedError naming the architecture
    and the reasons where workers can compute none of its layers.
    """
    return experts_of(Checkpoint.open(path))


def experts_of(checkpoint: Checkpoint) -> GgufExperts:
    """Does the same for an opened checkpoint."""
    if checkpoint.metadata is None:
        raise CheckpointError(f"checkpoint {checkpoint.path}: it is no GGUF file; pass the one that the program loads")
    architecture = str(checkpoint.metadata["general.architecture"])
    formula = _formula(checkpoint, architecture)
    layers, left_out = _collect(checkpoint, formula)
    made: list[LayerSpec] = []
    tensors: list[GgufTensor] = []
    for number, found in sorted(layers.items()):
        try:
            layer = _layer(checkpoint, architecture, formula, number, found)
        except _LeftOut as reason:
            left_out |= dict.fromkeys([*found.known.values(), *found.others], str(reason))
            continue
        made.append(layer)
        tensors += [_tensor(number, name, checkpoint.stored[name]) for name in found.known.values()]
    if not made:
        raise UnsupportedError(f"{checkpoint.path}: {_no_layers(architecture, left_out)}")
    spec = ModelSpec(tuple(made), DTYPE, checkpoint.fingerprint(), architecture, str(checkpoint.path))
    return GgufExperts(architecture, spec, tuple(tensors), left_out, checkpoint)


def _formula(checkpoint: Checkpoint, architecture: str) -> ExpertFormula:
    if architecture in REFUSED:
        raise UnsupportedError(f"{checkpoint.path}: architecture {architecture!r} is not supported: {REFUSED[architecture]}")
    if architecture not in FORMULAS:
        known = ", ".join(sorted(FORMULAS))
        raise UnsupportedError(
            f"{checkpoint.path}: of architecture {architecture!r} it is not known what its experts compute; known are {known}"
        )
    return FORMULAS[architecture]


def _no_layers(architecture: str, left_out: Mapping[str, str]) -> str:
    if not left_out:
        return f"the {architecture} model has no routed experts (no tensor blk.N.ffn_up_exps.weight)"
    reasons = list(dict.fromkeys(f"{name}: {reason}" for name, reason in left_out.items()))
    more = f"; and {len(reasons) - _MAX_REASONS} more tensors" if len(reasons) > _MAX_REASONS else ""
    return f"workers can compute no layer of this {architecture} model: {'; '.join(reasons[:_MAX_REASONS])}{more}"


def _collect(checkpoint: Checkpoint, formula: ExpertFormula) -> tuple[dict[int, _Found], dict[str, str]]:
    """Returns the tensors of experts by layer, and those of no layer with the reason."""
    layers: dict[int, _Found] = {}
    left_out: dict[str, str] = {}
    for name in checkpoint.stored:
        if _CHUNKS in name:
            left_out[name] = "smaller experts beside the routed ones"
        if EXPERTS not in name or _PROGRAMS_OWN.fullmatch(name):
            continue
        place = _IN_LAYER.fullmatch(name)
        if place is None:
            left_out[name] = "its name is not that of a tensor in a layer, blk.N.ffn_..._exps..."
            continue
        found = layers.setdefault(int(place[1]), _Found())
        known = _KNOWN.fullmatch(place[2])
        if known is None:
            found.others.append(name)
        elif known[2] != "scale" or formula.has_scales:
            # llama.cpp loads scales for every architecture, but applies them for some only.
            found.known[known[1], known[2]] = name
    return layers, left_out


def _layer(checkpoint: Checkpoint, architecture: str, formula: ExpertFormula, number: int, found: _Found) -> LayerSpec:
    """Describes one layer. Raises _LeftOut with the reason."""
    if found.others:
        raise _LeftOut(f"the layer has a tensor {found.others[0]!r}, whose use is not known")
    _check_prediction(checkpoint, architecture, number)
    num_experts = _check_tensors(checkpoint, formula, found)
    top_k = _top_k(checkpoint, architecture, number)
    if top_k < 1:
        raise _LeftOut(f"{architecture}.expert_used_count is {top_k} for it")
    limit = _limit(checkpoint, architecture, formula, number) if ("gate", "weight") in found.known else 0.0
    ffn = _ffn(checkpoint, formula, found, limit)
    try:
        # The bounds of sizes and names are those of the wire.
        FfnSpec.from_wire(ffn.to_wire())
        # Each tensor has all experts, so that the last one stands for all.
        first, down = check_expert(checkpoint, ffn, num_experts - 1)
    except (CheckpointError, ProtocolError, UnsupportedError) as error:
        raise _LeftOut(str(error)) from None
    weight_dtype = join_formats(first, down)
    return LayerSpec(
        number, f"blk.{number}", num_experts, min(num_experts, top_k), ffn, weight_dtype, ffn.stored_bytes(weight_dtype)
    )


def _check_prediction(checkpoint: Checkpoint, architecture: str, number: int) -> None:
    """Leaves out layers behind the model's own, which predict further tokens. A program loads them
    only when it drafts with them.
    """
    metadata = checkpoint.config()
    blocks, predicting = (_whole(metadata.get(f"{architecture}.{key}", 0)) for key in ("block_count", "nextn_predict_layers"))
    if predicting and blocks and number >= blocks - predicting:
        raise _LeftOut("the layer predicts further tokens; programs load it only to draft with it")


def _check_tensors(checkpoint: Checkpoint, formula: ExpertFormula, found: _Found) -> int:
    """Checks which tensors the layer has, and their formats. Returns the number of experts."""
    parts = {part for part, leaf in found.known if leaf == "weight"}
    if parts not in ({"up", "down"}, {"gate", "up", "down"}, {"gate_up", "down"}):
        raise _LeftOut(
            f"the layer has the matrices {', '.join(sorted(parts)) or 'none'}; known are [gate] up down and gate_up down"
        )
    leaves = {leaf: {part for part, own in found.known if own == leaf} for leaf in ("bias", "scale")}
    if not leaves["scale"] <= parts - {"gate_up"}:
        # llama.cpp has no scale of a fused gate and up.
        raise _LeftOut(
            f"the layer has scales of {', '.join(sorted(leaves['scale'] - (parts - {'gate_up'})))}, whose use is not known"
        )
    if leaves["bias"] and not formula.has_biases:
        raise _LeftOut("the layer has biases, which llama.cpp does not have for this architecture")
    inner = parts - {"down"}
    if leaves["bias"] not in (set(), {"down"}, inner, inner | {"down"}):
        raise _LeftOut(f"the layer has biases of {', '.join(sorted(leaves['bias']))} alone; known are those of all parts")
    if formula.activation == "swiglu_oai" and parts == {"up", "down"}:
        raise _LeftOut("the layer has no gate, which its activation needs")
    if formula.activation == "relu_squared" and parts != {"up", "down"}:
        raise _LeftOut("the layer has a gate, which its activation does not have")
    counts = set()
    for (part, leaf), name in found.known.items():
        info = checkpoint.stored[name]
        if len(info.shape) != _DIMENSIONS[leaf]:
            raise _LeftOut(f"{name} has {len(info.shape)} dimensions, expected {_DIMENSIONS[leaf]}")
        if info.dtype not in STORED_NAMES:
            raise _LeftOut(f"{name} has format {info.dtype}, which no kernel reads")
        if leaf == "scale" and (stored := checkpoint.stored[found.known[part, "weight"]].dtype) != "F32":
            raise _LeftOut(f"a scale per expert on weights stored in {stored}; workers apply it to F32 alone")
        counts.add(info.shape[0])
    if len(counts) != 1:
        raise _LeftOut(f"its tensors have {' and '.join(map(str, sorted(counts)))} experts")
    num_experts = counts.pop()
    if num_experts > MAX_EXPERTS:
        raise _LeftOut(f"the layer has {num_experts} experts; workers take up to {MAX_EXPERTS}")
    return num_experts


def _ffn(checkpoint: Checkpoint, formula: ExpertFormula, found: _Found, limit: float) -> FfnSpec:
    def shape(part: str) -> tuple[int, ...]:
        return checkpoint.stored[found.known[part, "weight"]].shape

    is_fused = ("gate_up", "weight") in found.known
    has_gate = is_fused or ("gate", "weight") in found.known
    parts = {"gate": "first_half", "up": "second_half"} if is_fused else {}
    fields: dict[str, Any] = {}
    for label in ("gate", "up", "down"):
        source = "gate_up" if label in parts else label
        for leaf, key in (("weight", "tensor"), ("bias", "bias_tensor"), ("scale", "scale_tensor")):
            if (source, leaf) in found.known:
                fields[f"{label}_{key}"] = TensorPattern(found.known[source, leaf], True, part=parts.get(label, "all"))
    fields |= {"activation": formula.activation, "gate": "gated" if has_gate else "none"}
    if formula.activation == "swiglu_oai":
        fields |= {"activation": "silu", "gate": "clamped_swiglu", "alpha": OAI_ALPHA, "up_offset": 1.0}
        fields |= {"gate_max": OAI_LIMIT, "up_limit": OAI_LIMIT}
    elif limit > LEAST_LIMIT:
        fields |= {"gate_max": limit, "up_limit": limit}
    out_size, intermediate_size = shape("down")[1:]
    in_size = shape("gate_up" if is_fused else "up")[2]
    return FfnSpec(in_size=in_size, intermediate_size=intermediate_size, out_size=out_size, **fields)


def _limit(checkpoint: Checkpoint, architecture: str, formula: ExpertFormula, number: int) -> float:
    """Returns the layer's swiglu_clamp_exp, 0 where there is none."""
    if formula.limits == "ignored":
        return 0.0
    key = f"{architecture}.swiglu_clamp_exp"
    value = _of_layer(checkpoint, key, number, 0.0)
    if type(value) is not float or not math.isfinite(value):
        raise CheckpointError(f"{checkpoint.path}: metadata {key} is {value!r} for layer {number}; expected a finite number")
    if value > LEAST_LIMIT and formula.limits == "after":
        raise _LeftOut(f"{key} is {value:g} for it, which bounds the activation's result; kernels bound gate and up before it")
    return value


def _top_k(checkpoint: Checkpoint, architecture: str, number: int) -> int:
    key = f"{architecture}.expert_used_count"
    value = _of_layer(checkpoint, key, number, None)
    if type(value) is not int:
        raise CheckpointError(f"{checkpoint.path}: metadata {key} is {value!r} for layer {number}; expected a whole number")
    return value


def _of_layer(checkpoint: Checkpoint, key: str, number: int, default: Any) -> Any:
    """Returns a metadata value that is one for all layers, or a list with one for each."""
    value = checkpoint.config().get(key, default)
    if type(value) is not list:
        return value
    if number >= len(value):
        raise CheckpointError(f"{checkpoint.path}: metadata {key} has {len(value)} values, none for layer {number}")
    return value[number]


def _whole(value: Any) -> int:
    return value if type(value) is int else 0


def _tensor(layer: int, name: str, info: TensorInfo) -> GgufTensor:
    extents = tuple(reversed(info.shape))
    return GgufTensor(layer, name, _GGML_TYPES[info.dtype], extents, info.num_bytes, info.file, info.offset)
