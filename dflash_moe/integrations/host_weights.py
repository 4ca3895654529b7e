"""Loads weights into a transformers model. Its own loader reads them where they are floats; other
formats are dequantised here on the way.

transformers reads GGUF, FP8 and MXFP4 only with further packages, and widens all experts in doing
so, which the host must never hold.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from dflash_moe.errors import UnsupportedError
from dflash_moe.model.architecture import find_experts, find_model_class, load_architecture, load_config
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.dense_tensors import is_plain
from dflash_moe.model.progress import quiet_progress
from dflash_moe.model.refusals import refusing
from dflash_moe.model.tensor_names import Conversion

TORCH_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

# So many values of a matrix that is only renamed are in float32 at a time: 32 MiB.
ROWS_AT_A_TIME = 8 << 20


def load_weights(
    model_class: Any,
    checkpoint: Checkpoint,
    *,
    has_experts: bool,
    dtype: Any,
    without: Collection[str] = frozenset(),
    **options: Any,
) -> tuple[Any, list[str]]:
    """Returns a model of `model_class` in torch dtype `dtype`, and the names of the parameters that
    the checkpoint lacks. Without `has_experts` the tensors of routed experts are not even read, and
    parameters named in `without` are not dequantised.

    `options` go to `from_pretrained`. Errors are those of `load_architecture`, and UnsupportedError
    for a format without a rule.
    """
    if is_plain(checkpoint):
        where: dict[str, Any] = {"pretrained_model_name_or_path": checkpoint.path, "local_files_only": True}
    else:
        architecture = load_architecture(checkpoint)
        state = dequantised_state(architecture.model, checkpoint, dtype=dtype, has_experts=has_experts, without=without)
        where = {"pretrained_model_name_or_path": None, "config": architecture.config, "state_dict": state}
    with quiet_progress():
        model, report = model_class.from_pretrained(**where, dtype=dtype, output_loading_info=True, **options)
    return model, sorted(report["missing_keys"])


def load_whole(path: str | Path, dtype: str) -> Any:
    """Loads a whole model in `dtype` (f32, f16 or bf16) with its own eager experts, in eval mode.
    Errors are those of `load_weights`.
    """
    checkpoint = Checkpoint.open(path)
    model_class = find_model_class(load_config(checkpoint))
    model, _ = load_weights(
        model_class, checkpoint, has_experts=True, dtype=TORCH_DTYPES[dtype], experts_implementation="eager"
    )
    return model.eval()


def dequantised_state(
    model: Any, checkpoint: Checkpoint, *, dtype: Any, has_experts: bool, without: Collection[str] = frozenset()
) -> dict[str, Any]:
    """Returns parameters and buffers by their names in `model`, which is on the meta device; those
    in `without` are left out. Matrices are in `dtype`; vectors stay in float32, and the loader
    rounds them.
    """
    prefixes = tuple(f"{name}." for name in find_experts(model))
    wanted = model.state_dict()
    state: dict[str, Any] = {}
    for target, recipe in Conversion.of(model, checkpoint).recipes.items():
        if target in without or (not has_experts and target.startswith(prefixes)):
            continue
        for name, value in convert_sources(target, recipe, model, checkpoint, dtype).items():
            if name in wanted:
                state[name] = shaped(value, wanted[name].shape)
    return state


def convert_sources(target: str, recipe: Any, model: Any, checkpoint: Checkpoint, dtype: Any) -> dict[str, Any]:
    """Returns the tensors that a recipe of the loader makes of its dequantised sources, by name.
    Matrices are in torch dtype `dtype` and vectors in float32. Of a large matrix that is only
    renamed a part at a time is in float32.
    """
    if recipe.converter is None and (whole := _rounded_by_rows(checkpoint, recipe.names()[0], dtype)) is not None:
        return {target: whole}
    made = _made(target, recipe, model, checkpoint)
    return {name: value if value.ndim < 2 else value.to(dtype) for name, value in made.items()}


def _rounded_by_rows(checkpoint: Checkpoint, name: str, dtype: Any) -> Any:
    """Returns a large matrix in `dtype`, None where the tensor is another one. Rows of these
    formats lie one after another, each with all that it means.
    """
    info = checkpoint.tensors[name]
    if len(info.shape) != 2 or info.scales is not None or math.prod(info.shape) <= ROWS_AT_A_TIME:
        return None
    rows, inputs = info.shape
    whole, step = torch.empty(info.shape, dtype=dtype), max(1, ROWS_AT_A_TIME // inputs)
    for first in range(0, rows, step):
        part = checkpoint.of_tensors({name: info.entries(first, min(step, rows - first))})
        whole[first : first + step] = _widened(part, name)
    return whole


def _made(target: str, recipe: Any, model: Any, checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns in float32 what `convert_sources` returns."""
    if recipe.converter is None:
        name = recipe.names()[0]
        value = _widened(checkpoint, name)
        owner = model.get_submodule(target.rpartition(".")[0])
        if checkpoint.tensors[name].dtype == "MXFP4" and getattr(owner, "is_transposed", False):
            # MXFP4 checkpoints are published with the outputs first.
            value = value.transpose(1, 2).contiguous()
        return {target: value}
    converter = copy.deepcopy(recipe.converter)
    for pattern, names in recipe.sources.items():
        for name in names:
            converter.add_tensor(target, name, pattern, lambda name=name: _widened(checkpoint, name))
    with refusing(f"{target}: cannot be made of {', '.join(recipe.names()[:3])}"):
        made = converter.convert(target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _widened(checkpoint: Checkpoint, name: str) -> Any:
    """Returns a tensor in float32 with its own shape. A GGUF format without a rule in
    model/formats/dequantize.py is left to the gguf package where that is installed.
    """
    try:
        return torch.from_numpy(checkpoint.values(name))
    except UnsupportedError as error:
        info = checkpoint.tensors[name]
        try:
            import gguf
        except ImportError:
            raise UnsupportedError(f"tensor {name!r}: {error}; `pip install gguf` reads more") from None
        kind = getattr(gguf.GGMLQuantizationType, info.dtype, None)
        if checkpoint.metadata is None or kind is None:
            raise UnsupportedError(f"tensor {name!r}: {error}") from None
        data = checkpoint.raw(name).reshape(*info.shape[:-1], -1)
        return torch.from_numpy(gguf.dequantize(data, kind)).reshape(info.shape)


def shaped(value: Any, shape: Any) -> Any:
    """Returns `value` in the shape of its parameter, because GGUF drops dimensions of one."""
    return value.reshape(shape) if value.numel() == shape.numel() and 1 in shape else value
