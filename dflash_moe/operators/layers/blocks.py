"""A whole decoder layer over the packed operators: attention block and feed-forward block, with
float32 between them. Rows go through buffers that all layers share, so that a layer costs a dozen
calls of the core and no tensor is made.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from dflash_moe import _core
from dflash_moe.operators.addresses import rows_of
from dflash_moe.operators.layer_buffers import BufferPool, LayerBuffers, part
from dflash_moe.operators.layers.attention_block import AttentionBlock
from dflash_moe.operators.layers.bound_calls import Calls, add, multiply, multiply_together, normalise
from dflash_moe.operators.linear import HostLinear
from dflash_moe.operators.norms import HostNorm
from dflash_moe.operators.routers import HostRouter
from dflash_moe.operators.step_context import StepContext, running_step


class BoundCall(Protocol):
    """A call of the routed experts whose tensors are fixed."""

    def run(self, step: StepContext) -> None:
        """Computes the experts into the result that was bound."""
        ...

    def submit(self, step: StepContext) -> Callable[[], None]:
        """Starts the call and returns what waits for its end."""
        ...


class Experts(Protocol):
    """The routed experts of one layer."""

    def bind(self, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any) -> BoundCall:
        """Binds the tensors that calls read and write from now on."""
        ...


@dataclass(frozen=True, slots=True)
class MlpParts:
    """A gated MLP that stays at the host. `row_gate`, where there is one, scales each row by the
    sigmoid of its own output.
    """

    gate: HostLinear
    up: HostLinear
    down: HostLinear
    activation: str
    row_gate: HostLinear | None = None


@dataclass(frozen=True, slots=True)
class MoeParts:
    """A router, the routed experts, and shared experts where there are some. `correction` is what a
    router that has none of its own is called with.
    """

    router: HostRouter
    experts: Experts
    shared: MlpParts | None
    correction: torch.Tensor | None = None


class HostLayer(nn.Module):  # type: ignore[misc]
    """Stands in for a decoder layer."""

    def __init__(self, pool: _core.HostPool, buffers: BufferPool, attention: AttentionBlock, feed_forward: MlpParts | MoeParts,
                 feed_forward_norm: HostNorm) -> None:  # fmt: skip
        super().__init__()
        self._pool = pool
        self.attention = attention
        self.feed_forward = feed_forward
        self.feed_forward_norm = feed_forward_norm
        # A model's code may ask a layer for these.
        self.hidden_size = feed_forward_norm.scale.numel()
        self._grow(buffers)

    def forward(self, hidden_states: torch.Tensor, *_arguments: Any, **_options: Any) -> torch.Tensor:
        """Returns the layer's output [1, num_rows, hidden_size] for the rows of the step that this
        thread computes. Cosines and sines are those in the buffers.
        """
        step = running_step()
        step.buffers.hidden_states.copy_(hidden_states[0])
        self.step(step)
        return step.buffers.hidden_states.clone()[None]

    def step(self, step: StepContext) -> None:
        """Computes the layer on the hidden states in the buffers of a step, in place."""
        buffers = step.buffers
        calls = buffers.calls.get(self)
        if calls is None:
            calls = buffers.calls[self] = [*self.attention.calls(self._pool, buffers), *self._feed_forward(buffers)]
        for call in calls:
            call(step)

    def _grow(self, buffers: BufferPool) -> None:
        self.attention.grow(buffers)
        parts = self.feed_forward
        mlp = parts.shared if isinstance(parts, MoeParts) else parts
        if mlp is not None:
            buffers.grow(mlp=mlp.down.in_features)
        if isinstance(parts, MoeParts):
            buffers.grow(num_experts=parts.router.form.num_experts, top_k=parts.router.form.top_k)

    # -- feed forward --------------------------------------------------------------------------
    def _feed_forward(self, b: LayerBuffers) -> Calls:
        middle = part(b.middle, self.hidden_size)
        rows = b.expert_rows
        calls: Calls = [normalise(self.feed_forward_norm, middle, rows)]
        parts = self.feed_forward
        if isinstance(parts, MlpParts):
            return [*calls, *self._mlp(b, parts, rows, b.hidden_states, residual=middle)]
        form = parts.router.form
        logits, weights = part(b.logits, form.num_experts), part(b.topk_weights, form.top_k)
        ids = part(b.topk_ids, form.top_k)
        calls += [multiply(parts.router.packed, rows, logits), parts.router.bound_route(logits, ids, weights, parts.correction)]
        bound = parts.experts.bind(rows, ids, weights, b.routed)
        if parts.shared is None:
            return [*calls, bound.run, add(self._pool, b.routed, middle, b.hidden_states)]
        # Shared experts are computed while the routed ones are awaited.
        shared = part(b.shared, self.hidden_size)
        overlapped = self._mlp(b, parts.shared, rows, shared, residual=middle)

        def both(step: StepContext) -> None:
            wait = bound.submit(step)
            try:
                for call in overlapped:
                    call(step)
            finally:
                wait()

        return [*calls, both, add(self._pool, b.routed, shared, b.hidden_states)]

    def _mlp(self, b: LayerBuffers, parts: MlpParts, rows: torch.Tensor, out: torch.Tensor, *, residual: torch.Tensor) -> Calls:
        """Computes residual + mlp(rows) into `out`."""
        width = parts.down.in_features
        gate, up = part(b.gate, width), part(b.up, width)
        form = _core.GateForm(activation=parts.activation, gate="gated")
        joined = (self._pool, form, *rows_of(gate)[:3], *rows_of(up), width, *rows_of(gate)[:3])
        calls: Calls = [
            multiply_together((parts.gate, parts.up), rows, (gate, up)),
            lambda _step: _core.apply_gate(*joined),
        ]
        if parts.row_gate is None:
            return [*calls, multiply(parts.down.packed, gate, out, residual=residual)]
        scale = b.row_gate
        calls += [multiply(parts.down.packed, gate, out), multiply(parts.row_gate.packed, rows, scale)]
        return [*calls, add(self._pool, out, residual, out, row_gate=scale)]
