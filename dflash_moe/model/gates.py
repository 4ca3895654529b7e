"""Recognises the activation and gate of an experts module among the formulas that our kernels
compute.

Activations are accepted by identity from a list. A gate that a class writes itself is compared
number by number with every formula that its own constants allow. Anything else is refused by class
and field.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dflash_moe.errors import UnsupportedError
from dflash_moe.model.ffn import ACTIVATIONS
from dflash_moe.model.refusals import refusing

# These are the names that transformers has for the activations of the core. The tanh forms of GELU
# differ from each other by rounding only.
_KNOWN_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "gelu_accurate": "gelu_tanh", "relu": "relu",
    "relu2": "relu_squared", "linear": "identity", "sigmoid": "sigmoid", "quick_gelu": "quick_gelu",
}  # fmt: skip

# Gate and up can lie in these places of the first projection's output.
_LAYOUTS = (("first_half", "second_half"), ("even", "odd"), ("second_half", "first_half"), ("odd", "even"))

# A gate agrees when every value does to this fraction of the largest. Float32 arithmetic inside a
# class stays below it, and another formula does not: the closest pair, the two forms of GELU,
# differs by 1e-4 of a value of this size.
_TOLERANCE = 2e-6
_NUM_VALUES = 512
# A slope or limit beyond this changes no float32 value; float() can still convert it.
_MAX_CONSTANT = 1e30


@dataclass(frozen=True, slots=True)
class Formula:
    """The formula h = gate(g, u) of csrc/compute/experts/ffn_spec.h, and the parts of the first
    projection's outputs that g and u are.
    """

    activation: str
    gate: str
    alpha: float = 1.0
    up_offset: float = 0.0
    gate_max: float = math.inf
    up_limit: float = math.inf
    gate_part: str = "first_half"
    up_part: str = "second_half"

    def apply(self, gate: Any, up: Any) -> Any:
        """Computes the formula in torch, for comparison."""
        import torch

        gate = torch.clamp(gate, max=self.gate_max)
        up = torch.clamp(up, min=-self.up_limit, max=self.up_limit)
        if self.gate == "gated":
            return activate(self.activation, gate) * up
        return (up + self.up_offset) * (gate * torch.sigmoid(self.alpha * gate))


def activate(name: str, x: Any) -> Any:
    """Computes one of `ffn.ACTIVATIONS` in torch."""
    import torch
    from torch.nn import functional

    return {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda v: functional.gelu(v, approximate="tanh"),
        "relu": functional.relu,
        "relu_squared": lambda v: functional.relu(v).square(),
        "identity": lambda v: v,
        "sigmoid": torch.sigmoid,
        "quick_gelu": lambda v: v * torch.sigmoid(1.702 * v),
    }[name](x)


def recognise(module: Any) -> Formula:
    """Returns the formula of an experts module on any device. No parameter is read. Raises
    UnsupportedError naming class and field.
    """
    from transformers.integrations import moe

    kind = type(module).__name__
    if getattr(module, "has_post_expert_norm", False):
        raise UnsupportedError(f"{kind}.has_post_expert_norm: a norm after each expert is not supported")
    known = known_activation(getattr(module, "act_fn", None))
    if not module.has_gate:
        if known is None:
            raise _unknown_activation(module)
        return Formula(known, "none", gate_part="all", up_part="all")
    if type(module)._apply_gate is moe._default_apply_gate:
        if known is None:
            raise _unknown_activation(module)
        return Formula(known, "gated")
    return _recognise_gate(module, (known,) if known is not None else ACTIVATIONS)


def known_activation(function: Any) -> str | None:
    """Returns the name among `ffn.ACTIVATIONS` of a function or module, or None for another."""
    from torch import nn
    from torch.nn import functional
    from transformers.activations import ACT2FN

    if isinstance(function, nn.GELU):
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(function.approximate)
    by_function = {functional.silu: "silu", functional.gelu: "gelu", functional.relu: "relu"}
    if not isinstance(function, nn.Module):
        return by_function.get(function)
    by_type = {type(ACT2FN[theirs]): ours for theirs, ours in _KNOWN_ACTIVATIONS.items() if theirs in ACT2FN}
    return by_type.get(type(function))


def _unknown_activation(module: Any) -> UnsupportedError:
    function = getattr(module, "act_fn", None)
    found = "nothing" if function is None else getattr(function, "__name__", type(function).__name__)
    return UnsupportedError(f"{type(module).__name__}.act_fn: found {found}; supported are {', '.join(ACTIVATIONS)}")


def _recognise_gate(module: Any, activations: tuple[str, ...]) -> Formula:
    import torch

    kind = type(module).__name__
    constants = _constants(module)
    generator = torch.Generator().manual_seed(0)
    reach = [3.0, *(1.5 * value for value in constants if 0.1 <= value <= 1e3)]
    spread = torch.tensor([reach[i % len(reach)] for i in range(2 * _NUM_VALUES)], dtype=torch.float64)
    packed = (torch.rand(2 * _NUM_VALUES, generator=generator, dtype=torch.float64) * 2 - 1) * spread
    with refusing(f"{kind}._apply_gate: cannot be examined"), torch.no_grad():
        theirs = module._apply_gate(packed[None])[0].double()
    if theirs.shape == (_NUM_VALUES,):
        for formula in _candidates(activations, constants):
            gate, up = _part_of(packed, formula.gate_part), _part_of(packed, formula.up_part)
            if bool(((formula.apply(gate, up) - theirs).abs() <= _TOLERANCE * theirs.abs().max()).all()):
                return formula
    raise UnsupportedError(
        f"{kind}._apply_gate: computes none of the known gates (tried {', '.join(activations)} with the constants "
        f"{', '.join(f'{value:g}' for value in constants) or 'none'})"
    )


def _part_of(values: Any, part: str) -> Any:
    half = values.shape[0] // 2
    return {"first_half": values[:half], "second_half": values[half:], "even": values[::2], "odd": values[1::2]}[part]


def _constants(module: Any) -> list[float]:
    """Returns the numbers that a module keeps and that may be limits or slopes."""
    numbers = {float(value) for value in vars(module).values() if type(value) in (int, float) and 0 < value < _MAX_CONSTANT}
    return sorted(numbers)


def _candidates(activations: tuple[str, ...], constants: list[float]) -> Iterator[Formula]:
    limits = [math.inf, *constants]
    for gate_part, up_part in _LAYOUTS:
        for activation, gate_max, up_limit in itertools.product(activations, limits, limits):
            yield Formula(activation, "gated", gate_max=gate_max, up_limit=up_limit, gate_part=gate_part, up_part=up_part)
        for limit, alpha, offset in itertools.product(limits, [1.702, *constants], (1.0, 0.0)):
            yield Formula("silu", "clamped_swiglu", alpha, offset, limit, limit, gate_part, up_part)
