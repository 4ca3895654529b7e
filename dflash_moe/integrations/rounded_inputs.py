"""What a numerics class makes of the inputs of a matrix product, in words of its own: the truth that class is measured against.

Shares nothing with the kernels: an experts module runs in float64, and each product's inputs are rounded before it.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

GROUP = 32  # inputs of a row that share a scale in int8-groups
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


_MATRIX_CLASSES = ("bf16-mma", "bf16-mfma", "bf16-wmma")  # of cards: weights of any format are rounded too
_ROUNDINGS: dict[str, Callable[[Any], Any]] = {
    "bf16-dot": to_bf16, "bf16-bfdot": to_bf16, "int8-groups": to_int8_groups, **dict.fromkeys(_MATRIX_CLASSES, to_bf16),
}  # fmt: skip


def rounds_inputs(numerics: str) -> bool:
    """False for the class that takes every input as it comes."""
    return numerics in _ROUNDINGS


def rounds_below(numerics: str, dtype: str) -> bool:
    """Whether the class rounds inputs more coarsely than a model does that runs in `dtype`."""
    return rounds_inputs(numerics) and not (_ROUNDINGS[numerics] is to_bf16 and dtype == "bf16")


def inputs_rounded(numerics: str) -> AbstractContextManager[Any]:
    """Rounds the first factor of every matrix product inside the block as class `numerics` does, and weights where it does."""
    if numerics not in _ROUNDINGS:
        return nullcontext()
    return _RoundedInputs(_ROUNDINGS[numerics], to_bf16 if numerics in _MATRIX_CLASSES else None)


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
