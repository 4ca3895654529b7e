"""What a numerics class makes of the inputs of a matrix product, in words of its own: the truth
that class is measured against.

Shares nothing with the kernels: an experts module runs in float64, and each product's inputs are
rounded before it.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dflash_moe.topology.numerics import CLASSES

GROUP = 32  # inputs of a row that share a scale, in the classes that have scales
_PRODUCTS = {
    torch.nn.functional.linear, torch.matmul, torch.mm, torch.bmm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.bmm,
    torch.Tensor.__matmul__,
}  # fmt: skip


def to_bf16(inputs: Any) -> Any:
    """Each input rounded once to bf16, from the float32 it arrives in."""
    return inputs.float().bfloat16().double()


def to_int8_groups(inputs: Any) -> Any:
    """Each input as the nearest of 255 steps between plus and minus the largest of its group."""
    width = inputs.shape[-1]
    values = torch.nn.functional.pad(inputs.float(), (0, -width % GROUP)).unflatten(-1, (-1, GROUP))
    scales = values.abs().amax(-1, keepdim=True) / 127
    codes = (values / scales.where(scales > 0, torch.ones_like(scales))).round().clamp(-127, 127)
    return (codes.double() * scales.double()).flatten(-2)[..., :width]


def to_f16_groups(inputs: Any) -> Any:
    """Each input rounded to f16 once a power of two per group has brought the group's largest into
    [2^14, 2^15).
    """
    width = inputs.shape[-1]
    values = torch.nn.functional.pad(inputs.float(), (0, -width % GROUP)).unflatten(-1, (-1, GROUP))
    # the largest is below 2^exponent
    exponents = torch.frexp(values.abs().amax(-1, keepdim=True)).exponent
    scales = torch.exp2((exponents - 15).clamp(min=-126).double()).float()
    codes = (values / scales).half()
    return (codes.double() * scales.double()).flatten(-2)[..., :width]


def to_eleven_bits(weights: Any) -> Any:
    """Each weight with the bits of an f16, of any size: what f16 with a power of two
    per group makes of float32 weights.
    """
    fractions, exponents = torch.frexp(weights.float().double())
    return torch.ldexp((fractions * 2**11).round() / 2**11, exponents)


# By NumericsFacts.inputs; classes that are absent take inputs as they come.
_ROUNDINGS: dict[str, Callable[[Any], Any]] = {"bf16": to_bf16, "int8": to_int8_groups, "f16": to_f16_groups}

# Models whose own inputs have no more bits than that rounding leaves.
_NO_FINER = {"bf16": ("bf16",), "f16": ("f16", "bf16")}


def rounds_inputs(numerics: str) -> bool:
    """False for the class that takes every input as it comes."""
    return CLASSES[numerics].inputs in _ROUNDINGS


def rounds_below(numerics: str, dtype: str) -> bool:
    """Whether the class rounds inputs more coarsely than a model does that runs in `dtype`."""
    return rounds_inputs(numerics) and dtype not in _NO_FINER.get(CLASSES[numerics].inputs, ())


def inputs_rounded(numerics: str, weight_formats: Sequence[str] = ()) -> AbstractContextManager[Any]:
    """Rounds the first factor of every matrix product inside the block as class `numerics` does,
    and weights where it does.

    `weight_formats`: those of gate and up, and of down. Only weights in f32 have more bits than
    f16 with a scale per group holds.
    """
    facts = CLASSES[numerics]
    if facts.inputs not in _ROUNDINGS:
        return nullcontext()
    of_weights: Callable[[Any], Any] | None = to_bf16 if facts.weights == "bf16" else None
    if facts.weights == "f16" and set(weight_formats) == {"f32"}:
        of_weights = to_eleven_bits
    return _RoundedInputs(_ROUNDINGS[facts.inputs], of_weights)


class _RoundedInputs(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, rounding: Callable[[Any], Any], of_weights: Callable[[Any], Any] | None) -> None:
        super().__init__()
        self._rounding = rounding
        self._of_weights = of_weights

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            args = (self._rounding(args[0]), *args[1:])
            if self._of_weights is not None and len(args) > 1:
                args = (args[0], self._of_weights(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))
