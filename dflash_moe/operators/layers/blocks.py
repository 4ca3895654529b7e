"""A whole decoder layer over the packed operators: attention block and feed-forward block, with
float32 between them. Rows go through buffers that all layers share, so that a layer is a part of a
program over fixed memory and no tensor is made.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from dflash_moe import _core
from dflash_moe.operators.addresses import rows_of
from dflash_moe.operators.layer_buffers import BufferPool, LayerBuffers, part
from dflash_moe.operators.layers.attention_block import AttentionBlock
from dflash_moe.operators.layers.bound_calls import add, multiply, multiply_together, normalise
from dflash_moe.operators.layers.step_program import BoundCall, StepProgram
from dflash_moe.operators.linear import HostLinear
from dflash_moe.operators.norms import HostNorm
from dflash_moe.operators.routers import HostRouter
from dflash_moe.operators.step_context import StepContext, running_step


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
        program = buffers.programs.get(self)
        if program is None:
            program = buffers.programs[self] = StepProgram(buffers)
            self.bind(buffers, program)
        program.run(step)

    def bind(self, buffers: LayerBuffers, program: StepProgram) -> None:
        """Appends the calls of the layer over these buffers."""
        self.attention.bind(self._pool, buffers, program)
        self._bind_feed_forward(buffers, program)

    def _grow(self, buffers: BufferPool) -> None:
        self.attention.grow(buffers)
        parts = self.feed_forward
        mlp = parts.shared if isinstance(parts, MoeParts) else parts
        if mlp is not None:
            buffers.grow(mlp=mlp.down.in_features)
        if isinstance(parts, MoeParts):
            buffers.grow(num_experts=parts.router.form.num_experts, top_k=parts.router.form.top_k)

    # -- feed forward --------------------------------------------------------------------------
    def _bind_feed_forward(self, b: LayerBuffers, program: StepProgram) -> None:
        middle = part(b.middle, self.hidden_size)
        rows = b.expert_rows
        normalise(program, self.feed_forward_norm, middle, rows)
        parts = self.feed_forward
        if isinstance(parts, MlpParts):
            self._bind_mlp(b, program, parts, rows, b.hidden_states, residual=middle)
            return
        form = parts.router.form
        logits, weights = part(b.logits, form.num_experts), part(b.topk_weights, form.top_k)
        ids = part(b.topk_ids, form.top_k)
        multiply(program, parts.router.packed, rows, logits)
        program.core.keep((parts.router.correction, parts.correction))
        program.core.route(*parts.router.route_arguments(logits, ids, weights, parts.correction))
        bound = parts.experts.bind(rows, ids, weights, b.routed)
        if parts.shared is None:
            program.experts(bound)
            add(program, self._pool, b.routed, middle, b.hidden_states)
            return
        # Shared experts are computed while the routed ones are awaited.
        shared = part(b.shared, self.hidden_size)
        wait = program.submit(bound)
        self._bind_mlp(b, program, parts.shared, rows, shared, residual=middle)
        wait()
        add(program, self._pool, b.routed, shared, b.hidden_states)

    def _bind_mlp(
        self, b: LayerBuffers, program: StepProgram, parts: MlpParts, rows: torch.Tensor, out: torch.Tensor, *,
        residual: torch.Tensor,
    ) -> None:  # fmt: skip
        """Appends what computes residual + mlp(rows) into `out`."""
        width = parts.down.in_features
        gate, up = part(b.gate, width), part(b.up, width)
        form = _core.GateForm(activation=parts.activation, gate="gated")
        multiply_together(program, (parts.gate, parts.up), rows, (gate, up))
        joined: tuple[Any, ...] = (*rows_of(gate)[:3], *rows_of(up), width, *rows_of(gate)[:3])
        program.core.apply_gate(self._pool, form, *joined)
        if parts.row_gate is None:
            multiply(program, parts.down.packed, gate, out, residual=residual)
            return
        multiply(program, parts.down.packed, gate, out)
        multiply(program, parts.row_gate.packed, rows, b.row_gate)
        add(program, self._pool, out, residual, out, row_gate=b.row_gate)
