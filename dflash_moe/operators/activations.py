"""Activations by the core, in place of those modules of transformers that are one.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import torch
from torch import nn

from dflash_moe import _core
from dflash_moe.model.gates import activate
from dflash_moe.operators.addresses import dense, rows_of


class HostActivation(nn.Module):  # type: ignore[misc]
    """Stands in for a module that maps each element by one of `ffn.ACTIVATIONS`."""

    def __init__(self, pool: _core.HostPool, name: str) -> None:
        super().__init__()
        self.name = name
        self._pool = pool
        self._form = _core.GateForm(activation=name, gate="none")

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Returns a tensor like `values`."""
        values = dense(values)
        out = torch.empty_like(values)
        address, stride, dtype, count = rows_of(values)
        _core.apply_gate(
            self._pool, self._form, 0, 0, dtype, address, stride, dtype, count, values.shape[-1], *rows_of(out)[:3]
        )
        return out

    def exact(self) -> nn.Module:
        """Returns the activation in torch, for any dtype."""
        return _ExactActivation(self.name)

    def extra_repr(self) -> str:
        """Names the activation."""
        return self.name


class _ExactActivation(nn.Module):  # type: ignore[misc]
    """An activation by torch."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = activate(self._name, values)
        return found
