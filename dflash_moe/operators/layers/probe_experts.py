"""Experts that stand in for routed ones while a layer is proven.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dflash_moe.operators.probes import SEED
from dflash_moe.operators.step_context import StepContext

# A routing weight that differs by more of the row's largest one has jumped.
_NEAR_WEIGHT = 0.25

# Ids of chosen experts in ascending order and their weights, [num_rows, top_k].
Routing = tuple[torch.Tensor, torch.Tensor]


class ProbeExperts(nn.Module):  # type: ignore[misc]
    """Stands in for routed experts: scales rows by the routing weights and a number of each expert,
    so that a wrong weight or a wrong expert shows.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(SEED)
        self.factors = torch.rand(num_experts, generator=generator, dtype=torch.float64) + 0.5
        # What the last call was given.
        self.seen: Routing | None = None

    def forward(self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """Returns the scaled rows."""
        ids, order = topk_ids.sort(dim=-1)
        self.seen = ids, topk_weights.double().gather(-1, order)
        scale = (topk_weights.double() * self.factors[topk_ids.long()]).sum(-1, keepdim=True)
        return (hidden_states.double() * scale).to(hidden_states.dtype)


class BoundProbe:
    """A `ProbeExperts` as `blocks.Experts`."""

    def __init__(self, num_experts: int) -> None:
        self.experts = ProbeExperts(num_experts)

    def bind(self, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any) -> BoundProbe:
        """Binds the tensors."""
        self._tensors = (hidden_states, topk_ids, topk_weights, out)
        return self

    def bound(self) -> None:
        """No client makes the call."""

    def run(self, _step: StepContext) -> None:
        """Computes the result."""
        rows, ids, weights, out = self._tensors
        out.copy_(self.experts(rows, ids, weights))

    def submit(self, step: StepContext) -> Callable[[], None]:
        """Computes the result when it is awaited."""
        return lambda: self.run(step)


def are_alike(routing: Routing, exact: Routing) -> torch.Tensor:
    """Says of each row whether it is routed as in `exact`. A weight may jump as a choice does,
    where a router mixes experts in whose logits are near enough.
    """
    ids, weights = routing
    is_near = (weights - exact[1]).abs() <= _NEAR_WEIGHT * exact[1].abs().amax(-1, keepdim=True)
    return (ids == exact[0]).all(-1) & is_near.all(-1)
