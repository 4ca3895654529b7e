"""Confirms a derived FfnSpec: with toy weights the experts class itself must compute what our
reference computes.

A description that is wrong in any way (layout, bias, gate, order) is found here, before a worker
starts.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np

from dflash_moe import _core
from dflash_moe.errors import UnsupportedError
from dflash_moe.model.ffn import FfnSpec
from dflash_moe.model.gates import Formula
from dflash_moe.model.refusals import refusing
from dflash_moe.model.shrink import Shrink
from dflash_moe.model.tensor_names import take_part

_NUM_ROWS = 24
_TOP_K = 3
# The largest rows; gates and what experts give are about as large, and the latter squared.
_BEYOND = 1e6
# Rows are sent to at most so many experts.
_NUM_EXPERTS = 6
# A value may differ by this fraction of its row's largest. Classes that compute parts in float32
# stay below it, and another formula does not.
_TOLERANCE = 2e-5


def confirm(module: Any, ffn: FfnSpec, formula: Formula) -> None:
    """Raises UnsupportedError naming the class when its eager forward and our reference differ on
    toy weights.
    """
    import torch

    kind = type(module).__name__
    shrink = Shrink.for_widths([size for value in module._parameters.values() for size in value.shape[1:]])
    generator = torch.Generator().manual_seed(0)
    toy_ffn = dataclasses.replace(
        ffn,
        in_size=shrink.width(ffn.in_size),
        intermediate_size=shrink.width(ffn.intermediate_size),
        out_size=shrink.width(ffn.out_size),
    )
    used = min(module._parameters["down_proj"].shape[0], _NUM_EXPERTS)
    toy = _toy_module(module, shrink, used, generator)
    rows = torch.randn(_NUM_ROWS, toy_ffn.in_size, generator=generator)
    # The rows are small, usual, large enough to pass the limits of gates, and beyond any limit.
    rows *= torch.tensor([0.5, 2.0, 8.0, _BEYOND]).repeat(_NUM_ROWS // 4)[:, None]
    top_k = min(_TOP_K, used)
    ids = torch.stack([torch.randperm(used, generator=generator)[:top_k] for _ in range(_NUM_ROWS)])
    weights = torch.rand(_NUM_ROWS, top_k, generator=generator) + 0.1
    with refusing(f"{kind}.forward: cannot be examined with toy weights"), torch.no_grad():
        theirs = type(module).forward.__wrapped__(toy, rows.double(), ids, weights.double())
    ours = _reference(toy, toy_ffn, formula, rows, ids, weights, used)
    if tuple(theirs.shape) != ours.shape:
        raise UnsupportedError(f"{kind}.forward: gives shape {list(theirs.shape)}, the formula {list(ours.shape)}")
    scale = np.abs(ours).max(axis=1, keepdims=True)
    worst = float((np.abs(theirs.double().numpy() - ours) / scale).max())
    if not worst <= _TOLERANCE:
        raise UnsupportedError(
            f"{kind}.forward: differs from the formula derived from it ({ffn.gate}, {ffn.activation}) by {worst:.2g} of "
            "a row's largest value; it computes something the kernels do not"
        )


def _toy_module(module: Any, shrink: Shrink, num_experts: int, generator: Any) -> Any:
    """Returns a copy on the CPU with toy widths, `num_experts` experts and random float64
    parameters; the original keeps its own. All experts of a module are alike, so that the probe's
    memory need not depend on how many the model has.
    """
    import torch

    toy = copy.copy(module)
    state = dict(vars(module))
    widths = {size for value in module._parameters.values() for size in value.shape[1:]}
    whole = module._parameters["down_proj"].shape[0]
    for key, value in state.items():
        if type(value) is int and "expert" in key:
            state[key] = num_experts if value == whole else value
        elif type(value) is int and value in widths:
            state[key] = shrink.width(value)
    parameters = {}
    for name, value in module._parameters.items():
        shape = (num_experts, *shrink.shape(value.shape[1:]))
        fan_in = shape[1] if module.is_transposed else shape[-1]
        drawn = torch.randn(shape, generator=generator, dtype=torch.float32).double()
        parameters[name] = torch.nn.Parameter(drawn * (1.0 if len(shape) == 2 else fan_in**-0.5), requires_grad=False)
    state["_parameters"] = parameters
    state["training"] = False
    toy.__dict__ = state
    return toy


def _reference(toy: Any, ffn: FfnSpec, formula: Formula, rows: Any, ids: Any, weights: Any, used: int) -> Any:
    oracle = _core.FfnOracle(spec=ffn.kernel_spec(), num_experts=used, weight_dtype="f32", isa="reference")
    first = "up_proj" if ffn.gate == "none" else "gate_up_proj"
    for expert_id in range(used):

        def part_of(name: str, part: str, expert_id: int = expert_id) -> Any:
            value = toy._parameters.get(name)
            if value is None or (part == "gate" and ffn.gate == "none"):
                return None
            values = value[expert_id]
            if toy.is_transposed and values.ndim == 2:
                values = values.T
            selected = {"gate": formula.gate_part, "up": formula.up_part, "all": "all"}[part]
            return np.ascontiguousarray(take_part(values[None], selected)[0].float().numpy())

        oracle.load_expert(
            expert_id,
            gate=part_of(first, "gate"),
            up=part_of(first, "up"),
            down=part_of("down_proj", "all"),
            gate_bias=part_of(f"{first}_bias", "gate"),
            up_bias=part_of(f"{first}_bias", "up"),
            down_bias=part_of("down_proj_bias", "all"),
        )
    counts = np.full(len(rows), ids.shape[1], np.uint16)
    flat_ids = np.ascontiguousarray(ids.numpy().reshape(-1).astype(np.uint16))
    result = oracle.forward_float64(rows.numpy(), counts, flat_ids, np.ascontiguousarray(weights.numpy().reshape(-1)))
    return np.asarray(result)
