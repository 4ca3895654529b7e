"""Appends operators over fixed tensors to the program of a step, which converts no arguments any
more when it runs. Tensors stay the caller's: the program keeps those of its buffers alive, and what
is made of weights is kept here. Rows are [num_rows, width], dense or parts of wider rows.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash_moe import _core
from dflash_moe.operators.addresses import rows_of
from dflash_moe.operators.attention_probe import AttentionCall
from dflash_moe.operators.layer_buffers import LayerBuffers, part
from dflash_moe.operators.layers.step_program import StepProgram
from dflash_moe.operators.linear import HostLinear
from dflash_moe.operators.norms import HostNorm
from dflash_moe.operators.paged_attention import LayerPages


@dataclass(frozen=True, slots=True)
class Rotary:
    """How heads turn with positions: `layout` of csrc/compute/operators/rotary.h, the values of a
    head that turn, and the width of the tables of cosines, which is `dim` or half of it.
    """

    layout: str
    dim: int
    table_width: int


def multiply(
    program: StepProgram, packed: _core.PackedLinear, rows: torch.Tensor, out: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Computes rows times a packed matrix, plus the residual, into `out`."""
    added = () if residual is None else rows_of(residual)[:3]
    program.core.multiply(packed, *rows_of(rows), *rows_of(out)[:3], *added)


def multiply_together(
    program: StepProgram, linears: Sequence[HostLinear], rows: torch.Tensor, outs: Sequence[torch.Tensor]
) -> None:
    """Computes rows times the matrix of each layer into the output at its place, in one pass."""
    packed = tuple(linear.packed for linear in linears)
    program.core.run_together(packed, *rows_of(rows), tuple(rows_of(out)[:3] for out in outs))


def normalise(program: StepProgram, norm: HostNorm, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Computes the norm of each row into `out`, which may be `rows`."""
    arguments = norm.arguments(rows, out)
    program.core.keep((norm.scale, norm.shift))
    if norm.form.kind == "rms":
        program.core.rms_norm(*arguments)
    else:
        program.core.layer_norm(*arguments)


def rotate(
    program: StepProgram,
    pool: _core.HostPool,
    rotary: Rotary,
    buffers: LayerBuffers,
    rows: torch.Tensor,
    num_heads: int,
    offset: int = 0,
) -> None:
    """Turns the heads of each row in place, of every head the values from `offset` on, by the
    cosines and sines in the buffers.
    """
    cos, sin = part(buffers.cos, rotary.table_width), part(buffers.sin, rotary.table_width)
    program.core.rotate(
        pool, *rows_of(rows), num_heads, rows.shape[1] // num_heads, *rows_of(rows)[:3],
        cos.data_ptr(), sin.data_ptr(), rows_of(cos)[1],
        rotary.dim, offset, rotary.layout, rotary.table_width == rotary.dim,
    )  # fmt: skip


def add(
    program: StepProgram, pool: _core.HostPool, rows: torch.Tensor, base: torch.Tensor, out: torch.Tensor,
    row_gate: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Computes base + rows, where each row may be scaled by the sigmoid of its `row_gate`."""
    gate = () if row_gate is None else rows_of(row_gate)[:3]
    program.core.add_scaled(pool, *rows_of(rows), rows.shape[1], *rows_of(out)[:3], *rows_of(base)[:3], *gate)


def copy(program: StepProgram, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Copies rows [num_rows, width] to `out`, which has their dtype."""
    address, stride, _, count = rows_of(rows)
    program.core.copy_rows(address, stride, rows.shape[1] * rows.element_size(), count, *rows_of(out)[:2])


def append(program: StepProgram, found: LayerPages, key: torch.Tensor, value: torch.Tensor) -> None:
    """Stores the keys and values of all rows of the step."""
    index = found.index
    program.core.store_keys(found.pages.layer(index), key.shape[0], *rows_of(key)[:3], *rows_of(value)[:3])
    program.tell(lambda step: step.keys_stored(index))


def attend(
    program: StepProgram,
    found: LayerPages,
    call: AttentionCall,
    query: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Computes the attention of the step's rows over the pages."""
    index = found.index
    program.tell(lambda step: step.await_keys(index))
    program.core.keep(found)
    program.core.paged_attention(
        found.pages.pool, found.pages.layer(index), *rows_of(query)[:3], call.num_heads, *rows_of(out)[:3],
        call.scale, call.window, call.softcap, found.sinks_address(call.sinks),
    )  # fmt: skip
