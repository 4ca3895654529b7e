"""Rounds the inputs of matrix products as a numerics class does, in code of its own: this is the
truth that the class is measured against.

It shares nothing with the kernels. An experts module runs in float64, and the inputs of each
product are rounded before it.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dflash_moe.topology.numerics import CLASSES

# So many inputs of a row share a scale in the classes that have scales.
GROUP = 32
_PRODUCTS = {
    torch.nn.functional.linear, torch.matmul, torch.mm, torch.bmm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.bmm,
    torch.Tensor.__matmul__,
}  # fmt: skip


def to_bf16(inputs: Any) -> Any:
    """Rounds each input once to bf16, from the float32 that it arrives in. Returns float64."""
    return inputs.float().bfloat16().double()


def to_int8_groups(inputs: Any) -> Any:
    """Rounds each input to the nearest of 255 steps between minus and plus the largest of its
    group. Returns float64.
    """
    width = inputs.shape[-1]
    values = torch.nn.functional.pad(inputs.float(), (0, -width % GROUP)).unflatten(-1, (-1, GROUP))
    scales = values.abs().amax(-1, keepdim=True) / 127
    codes = (values / scales.where(scales > 0, torch.ones_like(scales))).round().clamp(-127, 127)
    return (codes.double() * scales.double()).flatten(-2)[..., :width]


def to_f16_groups(inputs: Any) -> Any:
    """Rounds each input to f16 after a power of two for its group has brought the largest of the
    group into [2^14, 2^15). Returns float64.
    """
    width = inputs.shape[-1]
    values = torch.nn.functional.pad(inputs.float(), (0, -width % GROUP)).unflatten(-1, (-1, GROUP))
    # The largest of a group is below 2^exponent.
    exponents = torch.frexp(values.abs().amax(-1, keepdim=True)).exponent
    scales = torch.exp2((exponents - 15).clamp(min=-126).double()).float()
    codes = (values / scales).half()
    return (codes.double() * scales.double()).flatten(-2)[..., :width]


def to_eleven_bits(weights: Any) -> Any:
    """Rounds each weight to the 11 significant bits of an f16, whatever its size. That is what f16
    with a power of two for each group makes of float32 weights. Returns float64.
    """
    fractions, exponents = torch.frexp(weights.float().double())
    return torch.ldexp((fractions * 2**11).round() / 2**11, exponents)


# The keys are those of NumericsFacts.inputs. Classes that are absent take inputs as they come.
_ROUNDINGS: dict[str, Callable[[Any], Any]] = {"bf16": to_bf16, "int8": to_int8_groups, "f16": to_f16_groups}

# A model in one of these dtypes has inputs with no more bits than the rounding leaves.
_NO_FINER = {"bf16": ("bf16",), "f16": ("f16", "bf16")}


def rounds_inputs(numerics: str) -> bool:
    """Says whether the class rounds inputs. Otherwise it takes every input as it comes."""
    return CLASSES[numerics].inputs in _ROUNDINGS


def rounds_below(numerics: str, dtype: str) -> bool:
    """Says whether the class rounds inputs more coarsely than a model that runs in `dtype` does."""
    return rounds_inputs(numerics) and dtype not in _NO_FINER.get(CLASSES[numerics].inputs, ())


def inputs_rounded(numerics: str, weight_formats: Sequence[str] = ()) -> AbstractContextManager[Any]:
    """Rounds the first factor of every matrix product inside the block as class `numerics` does,
    and weights where the class rounds them.

    `weight_formats` are the format of gate and up, and that of down. Only weights in f32 have more
    bits than f16 with a scale for each group holds.
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
