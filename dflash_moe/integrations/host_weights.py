"""Loads weights into a transformers model. Its own loader reads them where they are floats; other
formats are dequantised here on the way.

transformers reads GGUF, FP8 and MXFP4 only with further packages, and widens all experts in doing
so, which the host must never hold.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch

from dflash_moe.errors import UnsupportedError
from dflash_moe.model.architecture import find_experts, load_architecture
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.progress import quiet_progress
from dflash_moe.model.refusals import refusing
from dflash_moe.model.tensor_names import Conversion


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


def is_plain(checkpoint: Checkpoint) -> bool:
    """Says whether the loader of transformers takes the files as they are."""
    return checkpoint.metadata is None and all(info.scales is None for info in checkpoint.tensors.values())


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
        for name, value in _made(target, recipe, model, checkpoint).items():
            if name in wanted:
                value = _shaped(value, wanted[name].shape)
                state[name] = value if value.ndim < 2 else value.to(dtype)
    return state


def _made(target: str, recipe: Any, model: Any, checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the tensors that a recipe of the loader makes of its dequantised sources, by name."""
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
    model/dequantize.py is left to the gguf package where that is installed.
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


def _shaped(value: Any, shape: Any) -> Any:
    """Returns `value` in the shape of its parameter, because GGUF drops dimensions of one."""
    return value.reshape(shape) if value.numel() == shape.numel() and 1 in shape else value
