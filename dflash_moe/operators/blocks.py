"""A whole decoder layer over the packed operators: attention block and feed-forward block, with
float32 between them. Rows go through buffers that all layers share, so that a layer costs a dozen
calls of the core and no tensor is made.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from dflash_moe import _core
from dflash_moe.operators.addresses import rows_of
from dflash_moe.operators.attention_probe import AttentionCall
from dflash_moe.operators.linear import HostLinear
from dflash_moe.operators.norms import HostNorm
from dflash_moe.operators.paged_attention import LayerPages
from dflash_moe.operators.routers import HostRouter

# Buffers of steps with at most this many rows are kept; those of a prefill go with it.
_KEPT_ROWS = 64

Calls = list[Callable[[], Any]]


class BoundCall(Protocol):
    """A call of the routed experts whose tensors are fixed."""

    def run(self) -> None:
        """Computes the experts into the result that was bound."""
        ...

    def submit(self) -> Callable[[], None]:
        """Starts the call and returns what waits for its end."""
        ...


class Experts(Protocol):
    """The routed experts of one layer."""

    def bind(self, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any) -> BoundCall:
        """Binds the tensors that calls read and write from now on."""
        ...


@dataclass(frozen=True, slots=True)
class Rotary:
    """How heads turn with positions: `layout` of csrc/compute/operators/rotary.h, and the width of
    the tables of cosines, which is `dim` or half of it.
    """

    layout: str
    dim: int
    table_width: int


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """The operators of an attention block, in the order in which they compute."""

    norm: HostNorm
    query: HostLinear
    key: HostLinear
    value: HostLinear
    query_norm: HostNorm | None
    key_norm: HostNorm | None
    rotary: Rotary | None
    call: AttentionCall
    pages: LayerPages
    num_kv_heads: int
    head_dim: int
    output: HostLinear


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
    """A router, the routed experts, and shared experts where there are some."""

    router: HostRouter
    experts: Experts
    shared: MlpParts | None


class LayerBuffers:
    """The rows of a step on their way through the layers, for one number of rows. Only
    `hidden_states` lives from layer to layer.
    """

    def __init__(self, num_rows: int, sizes: BufferSizes, dtype: torch.dtype) -> None:
        def floats(width: int) -> torch.Tensor:
            return torch.empty((num_rows, width), dtype=torch.float32)

        self.num_rows = num_rows
        self.hidden_states = torch.empty((num_rows, sizes.hidden_size), dtype=dtype)
        self.normed = floats(sizes.hidden_size)
        self.query, self.key, self.value = floats(sizes.query), floats(sizes.key), floats(sizes.value)
        self.attended, self.middle = floats(sizes.attended), floats(sizes.hidden_size)
        self.expert_rows = torch.empty((num_rows, sizes.hidden_size), dtype=dtype)
        self.routed = torch.empty((num_rows, sizes.hidden_size), dtype=dtype)
        self.gate, self.up, self.shared = floats(sizes.mlp), floats(sizes.mlp), floats(sizes.hidden_size)
        self.row_gate = floats(1)
        self.logits = floats(sizes.num_experts)
        self.topk_weights = floats(sizes.top_k)
        self.topk_ids = torch.empty((num_rows, sizes.top_k), dtype=torch.int64)
        self.cos, self.sin = floats(sizes.table), floats(sizes.table)

    def set_tables(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Copies the cosines and sines [num_rows, width] of a step, from which layers rotate."""
        for buffer, table in ((self.cos, cos), (self.sin, sin)):
            _part(buffer, table.shape[1]).copy_(table)


@dataclass(slots=True)
class BufferSizes:
    """The largest width of each buffer over all layers."""

    hidden_size: int = 1
    query: int = 1
    key: int = 1
    value: int = 1
    attended: int = 1
    mlp: int = 1
    num_experts: int = 1
    top_k: int = 1
    table: int = 1

    def grow(self, **widths: int) -> None:
        """Makes room for these widths."""
        for name, width in widths.items():
            setattr(self, name, max(getattr(self, name), width))


class BufferPool:
    """Buffers by number of rows: small ones are kept, and of larger ones the last."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.sizes = BufferSizes()
        self._dtype = dtype
        self._kept: dict[int, LayerBuffers] = {}
        self._last: LayerBuffers | None = None

    def of(self, num_rows: int) -> LayerBuffers:
        """Returns the buffers for so many rows."""
        found = self._kept.get(num_rows) or (self._last if self._last is not None and self._last.num_rows == num_rows else None)
        if found is None:
            found = LayerBuffers(num_rows, self.sizes, self._dtype)
            if num_rows <= _KEPT_ROWS:
                self._kept[num_rows] = found
            else:
                self._last = found
        return found

    def grow(self, **widths: int) -> None:
        """Makes room for these widths in all buffers that are asked for from now on."""
        before = replace(self.sizes)
        self.sizes.grow(**widths)
        if self.sizes != before:
            self._kept.clear()
            self._last = None

    def drop_last(self) -> None:
        """Frees the buffers of a long step."""
        self._last = None


class HostLayer(nn.Module):  # type: ignore[misc]
    """Stands in for a decoder layer."""

    def __init__(self, pool: _core.HostPool, buffers: BufferPool, attention: AttentionParts, feed_forward: MlpParts | MoeParts,
                 feed_forward_norm: HostNorm) -> None:  # fmt: skip
        super().__init__()
        self._pool = pool
        self._row_buffers = buffers
        self.attention = attention
        self.feed_forward = feed_forward
        self.feed_forward_norm = feed_forward_norm
        self._calls: dict[int, tuple[LayerBuffers, Calls]] = {}
        # A model's code may ask a layer for these.
        self.hidden_size = attention.norm.scale.numel()
        self._grow(buffers)

    def forward(self, hidden_states: torch.Tensor, *_arguments: Any, **_options: Any) -> torch.Tensor:
        """Returns the layer's output [1, num_rows, hidden_size] for rows of the step that the pages
        were told to begin. Cosines and sines are those in the buffers.
        """
        buffers = self._row_buffers.of(hidden_states.shape[1])
        buffers.hidden_states.copy_(hidden_states[0])
        self.step(buffers)
        return buffers.hidden_states.clone()[None]

    def step(self, buffers: LayerBuffers) -> None:
        """Computes the layer on `buffers.hidden_states`, in place."""
        kept = self._calls.get(buffers.num_rows)
        if kept is None or kept[0] is not buffers:
            kept = (buffers, [*self._attend(buffers), *self._feed_forward(buffers)])
            if buffers.num_rows <= _KEPT_ROWS:
                self._calls[buffers.num_rows] = kept
        for call in kept[1]:
            call()

    def _grow(self, buffers: BufferPool) -> None:
        parts = self.attention
        buffers.grow(
            hidden_size=self.hidden_size, query=parts.query.out_features, key=parts.key.out_features,
            value=parts.value.out_features, attended=parts.output.in_features,
            table=parts.rotary.table_width if parts.rotary else 1,
        )  # fmt: skip
        mlp = self.feed_forward.shared if isinstance(self.feed_forward, MoeParts) else self.feed_forward
        if mlp is not None:
            buffers.grow(mlp=mlp.down.in_features)
        if isinstance(self.feed_forward, MoeParts):
            form = self.feed_forward.router.form
            buffers.grow(num_experts=form.num_experts, top_k=form.top_k)

    # -- attention -----------------------------------------------------------------------------
    def _attend(self, b: LayerBuffers) -> Calls:
        parts, rows = self.attention, b.num_rows
        heads, kv_heads, head_dim = parts.call.num_heads, parts.num_kv_heads, parts.head_dim
        query, key = _part(b.query, heads * head_dim), _part(b.key, kv_heads * head_dim)
        value = _part(b.value, parts.value.out_features)
        normed = _part(b.normed, self.hidden_size)
        calls: Calls = [_norm(parts.norm, b.hidden_states, normed)]
        for linear, out in ((parts.query, query), (parts.key, key), (parts.value, value)):
            calls.append(_multiply(linear, normed, out))
        for norm, out in ((parts.query_norm, query), (parts.key_norm, key)):
            if norm is not None:
                # A norm over each head sees heads as rows, and one over all heads sees tokens.
                shaped = out.view(-1, norm.scale.numel())
                calls.append(_norm(norm, shaped, shaped))
        if parts.rotary is not None:
            calls += [self._rotate(b, query, heads), self._rotate(b, key, kv_heads)]
        attended = _part(b.attended, parts.output.in_features)
        calls += [_append(parts.pages, key, value), _attention(parts, query, attended, rows)]
        calls.append(_multiply(parts.output, attended, _part(b.middle, self.hidden_size), residual=b.hidden_states))
        return calls

    def _rotate(self, b: LayerBuffers, rows: torch.Tensor, num_heads: int) -> Callable[[], Any]:
        rotary = self.attention.rotary
        assert rotary is not None
        cos, sin = _part(b.cos, rotary.table_width), _part(b.sin, rotary.table_width)
        arguments = (self._pool, *rows_of(rows), num_heads, self.attention.head_dim, *rows_of(rows)[:3])
        options: dict[str, Any] = {
            "cos_address": cos.data_ptr(), "sin_address": sin.data_ptr(), "table_stride_bytes": rows_of(cos)[1],
            "rotary_dim": rotary.dim, "layout": rotary.layout, "has_full_tables": rotary.table_width == rotary.dim,
        }  # fmt: skip
        return lambda: _core.rotate(*arguments, **options)

    # -- feed forward --------------------------------------------------------------------------
    def _feed_forward(self, b: LayerBuffers) -> Calls:
        middle = _part(b.middle, self.hidden_size)
        rows = b.expert_rows
        calls: Calls = [_norm(self.feed_forward_norm, middle, rows)]
        parts = self.feed_forward
        if isinstance(parts, MlpParts):
            return [*calls, *self._mlp(b, parts, rows, b.hidden_states, residual=middle)]
        form = parts.router.form
        logits, weights = _part(b.logits, form.num_experts), _part(b.topk_weights, form.top_k)
        ids = _part(b.topk_ids, form.top_k)
        calls += [_multiply(parts.router, rows, logits), parts.router.bound_route(logits, ids, weights)]
        bound = parts.experts.bind(rows, ids, weights, b.routed)
        if parts.shared is None:
            return [*calls, bound.run, _add(self._pool, b.routed, middle, b.hidden_states)]
        # Shared experts are computed while the routed ones are awaited.
        shared = _part(b.shared, self.hidden_size)
        overlapped = self._mlp(b, parts.shared, rows, shared, residual=middle)

        def both() -> None:
            wait = bound.submit()
            try:
                for call in overlapped:
                    call()
            finally:
                wait()

        return [*calls, both, _add(self._pool, b.routed, shared, b.hidden_states)]

    def _mlp(self, b: LayerBuffers, parts: MlpParts, rows: torch.Tensor, out: torch.Tensor, *, residual: torch.Tensor) -> Calls:
        """Computes residual + mlp(rows) into `out`."""
        width = parts.down.in_features
        gate, up = _part(b.gate, width), _part(b.up, width)
        form = _core.GateForm(activation=parts.activation, gate="gated")
        joined = (self._pool, form, *rows_of(gate)[:3], *rows_of(up), width, *rows_of(gate)[:3])
        calls: Calls = [_multiply(parts.gate, rows, gate), _multiply(parts.up, rows, up), lambda: _core.apply_gate(*joined)]
        if parts.row_gate is None:
            return [*calls, _multiply(parts.down, gate, out, residual=residual)]
        scale = b.row_gate
        calls += [_multiply(parts.down, gate, out), _multiply(parts.row_gate, rows, scale)]
        return [*calls, _add(self._pool, out, residual, out, row_gate=scale)]


def _part(buffer: torch.Tensor, width: int) -> torch.Tensor:
    """Returns rows of `width` values, densely packed at the beginning of a buffer."""
    return buffer.view(-1)[: buffer.shape[0] * width].view(buffer.shape[0], width)


def _multiply(
    linear: HostLinear | HostRouter, rows: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None
) -> Callable[[], Any]:
    arguments: tuple[Any, ...] = (*rows_of(rows), *rows_of(out)[:3])
    if residual is not None:
        arguments += rows_of(residual)[:3]
    run = linear.packed.run
    return lambda: run(*arguments)


def _norm(norm: HostNorm, rows: torch.Tensor, out: torch.Tensor) -> Callable[[], Any]:
    function, arguments, options = norm.bound(rows, out)
    return lambda: function(*arguments, **options)


def _add(
    pool: _core.HostPool, rows: torch.Tensor, base: torch.Tensor, out: torch.Tensor, row_gate: torch.Tensor | None = None
) -> Callable[[], Any]:
    """Computes base + rows, where each row may be scaled by the sigmoid of its `row_gate`."""
    address, stride, dtype, count = rows_of(rows)
    arguments = (pool, address, stride, dtype, count, rows.shape[1], *rows_of(out)[:3])
    base_address, base_stride, base_dtype, _ = rows_of(base)
    options: dict[str, Any] = {"base_address": base_address, "base_stride_bytes": base_stride, "base_dtype": base_dtype}
    if row_gate is not None:
        options |= {"gate_address": row_gate.data_ptr(), "gate_stride_bytes": 4, "gate_dtype": "f32"}
    return lambda: _core.add_scaled(*arguments, **options)


def _append(found: LayerPages, key: torch.Tensor, value: torch.Tensor) -> Callable[[], Any]:
    layer, pages = found.pages.layer(found.index), found.pages
    count, rest = key.shape[0], (*rows_of(key)[:3], *rows_of(value)[:3])
    return lambda: layer.append(pages.slots.data_ptr(), count, *rest)


def _attention(parts: AttentionParts, query: torch.Tensor, out: torch.Tensor, num_rows: int) -> Callable[[], Any]:
    found, call = parts.pages, parts.call
    pages, layer = found.pages, found.pages.layer(found.index)
    arguments = (*rows_of(query)[:3], call.num_heads, *rows_of(out)[:3])
    options: dict[str, Any] = {
        "scale": call.scale, "window": call.window, "softcap": call.softcap,
        "sinks_address": found.sinks_address(call.sinks),
    }  # fmt: skip
    return lambda: _core.paged_attention(pages.pool, layer, pages.plan, *arguments, **options)
