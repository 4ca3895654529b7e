"""Weights into a transformers model: by its own loader where they are floats, else dequantised by
us on the way.

transformers reads GGUF, FP8 and MXFP4 only with further packages, and widens all experts; the host
must never hold them.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from dflash_moe.errors import UnsupportedError
from dflash_moe.model.architecture import find_experts, load_architecture
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.progress import quiet_progress
from dflash_moe.model.refusals import refusing
from dflash_moe.model.tensor_names import Conversion


def load_weights(
    model_class: Any, checkpoint: Checkpoint, *, has_experts: bool, dtype: Any, **options: Any
) -> tuple[Any, list[str]]:
    """(model, parameters the checkpoint lacks). `has_experts` False: routed experts' tensors are
    not even read.

    `options` go to `from_pretrained`. Errors: those of `load_architecture`, UnsupportedError for a
    format without a rule.
    """
    if is_plain(checkpoint):
        where: dict[str, Any] = {"pretrained_model_name_or_path": checkpoint.path, "local_files_only": True}
    else:
        architecture = load_architecture(checkpoint)
        state = dequantised_state(architecture.model, checkpoint, dtype=dtype, has_experts=has_experts)
        where = {"pretrained_model_name_or_path": None, "config": architecture.config, "state_dict": state}
    with quiet_progress():
        model, report = model_class.from_pretrained(**where, dtype=dtype, output_loading_info=True, **options)
    return model, sorted(report["missing_keys"])


def is_plain(checkpoint: Checkpoint) -> bool:
    """Whether transformers' loader takes the files as they are."""
    return checkpoint.metadata is None and all(info.scales is None for info in checkpoint.tensors.values())


def dequantised_state(model: Any, checkpoint: Checkpoint, *, dtype: Any, has_experts: bool) -> dict[str, Any]:
    """Parameters and buffers by the names of `model` (on the meta device) in `dtype`; vectors in
    float32, the loader rounds.
    """
    prefixes = tuple(f"{name}." for name in find_experts(model))
    wanted = model.state_dict()
    state: dict[str, Any] = {}
    for target, recipe in Conversion.of(model, checkpoint).recipes.items():
        if not has_experts and target.startswith(prefixes):
            continue
        for name, value in _made(target, recipe, model, checkpoint).items():
            if name in wanted:
                value = _shaped(value, wanted[name].shape)
                state[name] = value if value.ndim < 2 else value.to(dtype)
    return state


def _made(target: str, recipe: Any, model: Any, checkpoint: Checkpoint) -> dict[str, Any]:
    """What the loader's recipe makes of the dequantised sources."""
    if recipe.converter is None:
        name = recipe.names()[0]
        value = _widened(checkpoint, name)
        owner = model.get_submodule(target.rpartition(".")[0])
        if checkpoint.tensors[name].dtype == "MXFP4" and getattr(owner, "is_transposed", False):
            value = value.transpose(1, 2).contiguous()  # published with the outputs first
        return {target: value}
    converter = copy.deepcopy(recipe.converter)
    for pattern, names in recipe.sources.items():
        for name in names:
            converter.add_tensor(target, name, pattern, lambda name=name: _widened(checkpoint, name))
    with refusing(f"{target}: cannot be made of {', '.join(recipe.names()[:3])}"):
        made = converter.convert(target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _widened(checkpoint: Checkpoint, name: str) -> Any:
    """A tensor as float32 [shape]. A format of GGUF without a rule of ours is left to the gguf
    package, where that is there.
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
    """`value` as the parameter's shape: GGUF drops dimensions of one."""
    return value.reshape(shape) if value.numel() == shape.numel() and 1 in shape else value
