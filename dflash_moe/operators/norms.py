"""Normalisation by the core, and the forms of it that a module may have.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dflash_moe import _core
from dflash_moe.operators.addresses import dense, rows_of

# No model adds more than this to a mean square.
_MAX_EPSILON = 1e-2


@dataclass(frozen=True, slots=True)
class NormForm:
    """`kind` is rms or layer; `adds_one` multiplies by 1 + weight."""

    kind: str
    epsilon: float
    adds_one: bool = False

    def __str__(self) -> str:
        return f"{self.kind}, {'1 + w' if self.adds_one else 'w'}, eps {self.epsilon:g}"


class HostNorm(nn.Module):  # type: ignore[misc]
    """Stands in for a norm over the last dimension."""

    def __init__(self, pool: _core.HostPool, form: NormForm, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.form = form
        # Plain attributes: nothing may be loaded into them any more.
        self.scale = weight.detach().float().contiguous()
        self.shift = None if bias is None else bias.detach().float().contiguous()
        self._pool = pool

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the normalised rows [..., width]."""
        rows = dense(rows)
        out = torch.empty_like(rows)
        function = _core.rms_norm if self.form.kind == "rms" else _core.layer_norm
        function(*self.arguments(rows, out))
        return out

    def arguments(self, rows: torch.Tensor, out: torch.Tensor) -> tuple[Any, ...]:
        """Returns what the core's function for this form (rms_norm, layer_norm) takes to normalise
        `rows` into `out`. Both are rows of `rows_of` and stay the caller's.
        """
        address, stride, dtype, count = rows_of(rows)
        arguments = (
            self._pool, address, stride, dtype, count, rows.shape[-1], *rows_of(out)[:3],
            self.form.epsilon, self.scale.data_ptr(),
        )  # fmt: skip
        if self.form.kind == "rms":
            return (*arguments, self.form.adds_one)
        return (*arguments, 0 if self.shift is None else self.shift.data_ptr())

    def exact(self) -> nn.Module:
        """Returns the norm in float64."""
        return ExactNorm(self.form, self.scale, self.shift)


class ExactNorm(nn.Module):  # type: ignore[misc]
    """A norm by its formula in float64."""

    def __init__(self, form: NormForm, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._form, self._bias = form, bias
        self._weight = weight.double() + (1.0 if form.adds_one else 0.0)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.double()
        if self._form.kind == "layer":
            rows = rows - rows.mean(-1, keepdim=True)
        scaled = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + self._form.epsilon) * self._weight
        return scaled if self._bias is None else scaled + self._bias.double()


def norm_forms(module: nn.Module) -> Iterator[NormForm]:
    """Yields the forms that a module may have by its parameters: one vector `weight`, perhaps a
    `bias`, and nothing else.
    """
    parameters = {name: value for name, value in module._parameters.items() if value is not None}
    if any(True for _ in module.children()) or any(True for _ in module.buffers()):
        return
    if set(parameters) not in ({"weight"}, {"weight", "bias"}) or any(value.ndim != 1 for value in parameters.values()):
        return
    epsilons = sorted({value for value in vars(module).values() if isinstance(value, float) and 0.0 < value <= _MAX_EPSILON})
    kinds = ("layer",) if "bias" in parameters else ("rms", "layer")
    for epsilon in epsilons:
        for kind in kinds:
            yield NormForm(kind, epsilon)
            if kind == "rms":
                yield NormForm(kind, epsilon, adds_one=True)
