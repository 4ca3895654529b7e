"""How far an operator may be from the float64 output of the module that it stands in for.

An operator is compared with the module's own forward in float64. Its error may exceed the module's
own by two units in the last place of the dtype (of the row's largest value, because sums of large
values cancel), and by what its numerics class rounds on purpose.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math

import torch

from dflash_moe.topology.numerics import CLASSES

# The distance of 1 from the next number of a dtype.
EPSILON = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
ALLOWED_ULPS = 2.0
# The worst errors of two chains of the same roundings in other orders: seen up to 1.2 times one
# another over a thousand outputs in float32, where other forms are off by 300,000 times as much.
_CHANCE = 2.0
# Rounding to bf16 moves a number by this much of itself at most, and to f16 by a power of two more
# or less; int8 codes move it by this much of the largest value of its group.
_BF16_ROUNDING = 2.0**-8
_INT8_ROUNDING = 0.5 / 127 * (1 + 2.0**-10)


def row_scale(exact: torch.Tensor) -> torch.Tensor:
    """Returns the largest magnitude of each row of [..., width] as [..., 1]."""
    return exact.abs().amax(dim=-1, keepdim=True)


def excess(
    ours: torch.Tensor,
    own: torch.Tensor,
    exact: torch.Tensor,
    class_bound: torch.Tensor | float = 0.0,
    dtype: torch.dtype | None = None,
    *,
    is_pooled: bool = False,
) -> float:
    """Returns the largest ratio of our error to what is allowed, over all elements: at most 1 where
    `ours` may stand in for `own`, whose float64 value is `exact`. All are [num_rows, width]. Units
    in the last place are those of `dtype`, by default that of `own`.

    An output that is not finite where the exact one is counts as infinitely far. With `is_pooled`
    the module's own error is twice that of its worst row, relative to the row: the errors of a long
    chain of operators are chance, and any one row of its own may be lucky, or all of them.
    """
    epsilon = EPSILON[own.dtype if dtype is None else dtype]
    own_error = _CHANCE * largest_error(own, exact) * row_scale(exact) if is_pooled else row_scale(own.double() - exact)
    allowed = own_error + ALLOWED_ULPS * epsilon * row_scale(exact) + class_bound
    error = (ours.double() - exact).abs()
    is_wrong = ~torch.isfinite(ours.double()) & torch.isfinite(exact)
    ratio = torch.where(error == 0.0, torch.zeros_like(error), error / allowed)
    ratio = torch.where(is_wrong, torch.full_like(ratio, float("inf")), ratio)
    return float(ratio.max()) if ratio.numel() else 0.0


def largest_error(own: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns the largest error of an element of [num_rows, width], as a part of its row's largest
    value, over all rows.
    """
    return float((row_scale(own.double() - exact) / row_scale(exact).clamp_min(1e-300)).max())


def mutual_excess(ours: torch.Tensor, own: torch.Tensor, error: float) -> float:
    """As `excess` with `is_pooled`, where no float64 value was computed: `error` is the
    `largest_error` of a module that differs from the one of `own` in its values only. Each side may
    be off by what `excess` allows ours.
    """
    scale = row_scale(own.double())
    allowed = (2 * _CHANCE * error + ALLOWED_ULPS * EPSILON[own.dtype]) * scale
    distance = (ours.double() - own.double()).abs()
    ratio = torch.where(distance == 0.0, torch.zeros_like(distance), distance / allowed)
    return float(ratio.nan_to_num(nan=float("inf")).max())


def norm_bound(exact: torch.Tensor) -> torch.Tensor:
    """Returns by how much float32 may move a normalised row [num_rows, width], as [num_rows, 1].
    Its sums are 16 chains, whose roundings all go one way where one value outweighs the others.
    """
    return (exact.shape[-1] / 16 + 20) * 2.0**-24 * row_scale(exact)


def chain_steps(num_inputs: int) -> float:
    """Returns how many roundings of float32 an output of so many inputs goes through: a chain of at
    most 256 inputs, and one for each block of them.
    """
    return min(num_inputs, 256) + num_inputs / 256 + 2


def linear_bound(numerics: str, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns by how much a class may move each output of `weight` [outputs, inputs] times `rows`
    [num_rows, inputs], both in float64: [num_rows, outputs].

    A class that rounds inputs moves each product by its rounding; sums of float32 add a rounding
    for each step of a chain of 256 inputs and each block.
    """
    num_inputs = weight.shape[1]
    magnitudes = rows.abs() @ weight.abs().T
    bound = chain_steps(num_inputs) * 2.0**-24 * magnitudes
    rounding = CLASSES[numerics].inputs
    if rounding == "bf16":
        return bound + _BF16_ROUNDING * magnitudes * 2
    if rounding == "int8":
        group = CLASSES[numerics].group_inputs
        padded = torch.nn.functional.pad(rows.abs(), (0, -num_inputs % group)).unflatten(-1, (-1, group))
        largest = padded.amax(dim=-1, keepdim=True).expand_as(padded).flatten(-2)[..., :num_inputs]
        return bound + _INT8_ROUNDING * largest @ weight.abs().T
    return bound


def distance_bound(numerics: str, num_inputs: int, dtype: torch.dtype) -> float:
    """Returns how far two layers of a class and of a dtype may be apart in an output, as a part of
    the length of its row times that of its weights, which bounds the sum of their magnitudes.
    """
    bound = 2 * chain_steps(num_inputs) * 2.0**-24 + (1 + ALLOWED_ULPS) * EPSILON[dtype]
    rounding = CLASSES[numerics].inputs
    if rounding == "int8":
        return bound + _INT8_ROUNDING * math.sqrt(num_inputs)
    return bound + (2 * _BF16_ROUNDING if rounding == "bf16" else 0.0)
