"""Calls of the core over fixed tensors: each function here binds an operator to rows and returns
what computes it in a step, which converts no arguments. Tensors stay the caller's, who keeps them
alive; rows are [num_rows, width], dense or parts of wider rows.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dflash_moe import _core
from dflash_moe.operators.addresses import rows_of
from dflash_moe.operators.attention_probe import AttentionCall
from dflash_moe.operators.layer_buffers import LayerBuffers, part
from dflash_moe.operators.linear import HostLinear
from dflash_moe.operators.norms import HostNorm
from dflash_moe.operators.paged_attention import LayerPages
from dflash_moe.operators.step_context import StepContext

Call = Callable[[StepContext], Any]
Calls = list[Call]


@dataclass(frozen=True, slots=True)
class Rotary:
    """How heads turn with positions: `layout` of csrc/compute/operators/rotary.h, the values of a
    head that turn, and the width of the tables of cosines, which is `dim` or half of it.
    """

    layout: str
    dim: int
    table_width: int


def multiply(packed: _core.PackedLinear, rows: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None) -> Call:
    """Computes rows times a packed matrix, plus the residual, into `out`."""
    arguments: tuple[Any, ...] = (*rows_of(rows), *rows_of(out)[:3])
    if residual is not None:
        arguments += rows_of(residual)[:3]
    run = packed.run
    return lambda _step: run(*arguments)


def multiply_together(linears: Sequence[HostLinear], rows: torch.Tensor, outs: Sequence[torch.Tensor]) -> Call:
    """Computes rows times the matrix of each layer into the output at its place, in one pass."""
    packed = tuple(linear.packed for linear in linears)
    arguments = (packed, *rows_of(rows), tuple(rows_of(out)[:3] for out in outs))
    return lambda _step: _core.run_together(*arguments)


def normalise(norm: HostNorm, rows: torch.Tensor, out: torch.Tensor) -> Call:
    """Computes the norm of each row into `out`, which may be `rows`."""
    function, arguments = norm.bound(rows, out)
    return lambda _step: function(*arguments)


def rotate(
    pool: _core.HostPool, rotary: Rotary, buffers: LayerBuffers, rows: torch.Tensor, num_heads: int, offset: int = 0
) -> Call:
    """Turns the heads of each row in place, of every head the values from `offset` on, by the
    cosines and sines in the buffers.
    """
    cos, sin = part(buffers.cos, rotary.table_width), part(buffers.sin, rotary.table_width)
    arguments = (
        pool, *rows_of(rows), num_heads, rows.shape[1] // num_heads, *rows_of(rows)[:3],
        cos.data_ptr(), sin.data_ptr(), rows_of(cos)[1],
        rotary.dim, offset, rotary.layout, rotary.table_width == rotary.dim,
    )  # fmt: skip
    return lambda _step: _core.rotate(*arguments)


def add(
    pool: _core.HostPool, rows: torch.Tensor, base: torch.Tensor, out: torch.Tensor, row_gate: torch.Tensor | None = None
) -> Call:
    """Computes base + rows, where each row may be scaled by the sigmoid of its `row_gate`."""
    arguments: tuple[Any, ...] = (pool, *rows_of(rows), rows.shape[1], *rows_of(out)[:3], *rows_of(base)[:3])
    if row_gate is not None:
        arguments += rows_of(row_gate)[:3]
    return lambda _step: _core.add_scaled(*arguments)


def append(found: LayerPages, key: torch.Tensor, value: torch.Tensor) -> Call:
    """Stores the keys and values of all rows of the step."""
    layer = found.pages.layer(found.index)
    index, count, rest = found.index, key.shape[0], (*rows_of(key)[:3], *rows_of(value)[:3])

    def store(step: StepContext) -> None:
        layer.append(step.slots.data_ptr(), count, *rest)
        step.keys_stored(index)

    return store


def attend(found: LayerPages, call: AttentionCall, query: torch.Tensor, out: torch.Tensor) -> Call:
    """Computes the attention of the step's rows over the pages."""
    pages, layer = found.pages, found.pages.layer(found.index)
    form = (call.scale, call.window, call.softcap, found.sinks_address(call.sinks))
    arguments = (*rows_of(query)[:3], call.num_heads, *rows_of(out)[:3], *form)
    index = found.index

    def read(step: StepContext) -> None:
        step.await_keys(index)
        _core.paged_attention(pages.pool, layer, step.plan, *arguments)

    return read
