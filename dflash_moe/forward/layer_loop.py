"""Runs a model whose decoder layers are all host layers by a loop of our own: embedding, layers,
norm, head. It is used where it gives the bits of the model's own forward.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from dflash_moe import _core
from dflash_moe.forward.residuals import EMBEDDING, StreamReader
from dflash_moe.forward.rotary_tables import RotaryTables
from dflash_moe.operators.addresses import rows_of
from dflash_moe.operators.layer_buffers import LayerBuffers, part
from dflash_moe.operators.layers.blocks import HostLayer
from dflash_moe.operators.layers.bound_calls import normalise
from dflash_moe.operators.layers.step_program import StepProgram
from dflash_moe.operators.linear import HostEmbedding, HostLinear
from dflash_moe.operators.norms import HostNorm
from dflash_moe.operators.step_context import StepContext


class LayerLoop:
    """The layers of a model with what stands before and behind them, as one program of the core for
    each number of rows. Modules compute what is not ours of it, what somebody hooks, and the logits
    of a step that wants some of its rows only.
    """

    def __init__(
        self, embedding: nn.Module, layers: Sequence[HostLayer], norm: HostNorm, head: HostLinear, tables: RotaryTables
    ) -> None:
        self._embedding, self._norm, self._head = embedding, norm, head
        self.layers = tuple(layers)
        self._tables = tables

    def run(
        self, token_ids: torch.Tensor, step: StepContext, wanted: torch.Tensor, residuals: StreamReader | None = None
    ) -> torch.Tensor:
        """Returns logits [num_wanted, vocab_size] of the rows `wanted` of a step, in ascending
        order; `token_ids` are int64 [num_rows]. `residuals` is shown what enters the first layer
        and leaves each.
        """
        buffers = step.buffers
        program = buffers.programs.get(self)
        if program is None:
            program = buffers.programs[self] = self._program(buffers)
        is_hooked = any(module._forward_hooks for module in (self._embedding, self._norm, self._head))
        embeds = program.embeds and not is_hooked
        if not embeds:
            buffers.hidden_states.copy_(self._embedding(token_ids))
        tables = self._tables.shared(step)
        if tables is None:
            buffers.set_tables(*self._tables.cos_sin(step))
        logits = None
        if self._head.out_dtype is torch.float32 and not is_hooked and len(wanted) == step.num_rows:
            logits = torch.empty((step.num_rows, self._head.out_features), dtype=torch.float32)
        inputs = _inputs(step, token_ids, tables, logits)
        if embeds and tables is None:
            program.calls.run(step, 0, program.tables, inputs)
        first, last = program.layers[0], program.layers[-1]
        begin = first if tables is None else 0 if embeds else program.tables
        end = last if logits is None else len(program.calls)
        if residuals is None:
            program.calls.run(step, begin, end, inputs)
        else:
            program.calls.run(step, begin, first, inputs)
            residuals.see(EMBEDDING, step.positions, buffers.hidden_states)
            for index, ends in enumerate(itertools.pairwise(program.layers)):
                program.calls.run(step, ends[0], ends[1], inputs)
                residuals.see(index, step.positions, buffers.hidden_states)
            program.calls.run(step, last, end, inputs)
        if logits is None:
            logits = self._head(self._norm(buffers.hidden_states[wanted]))
        return logits

    def _program(self, b: LayerBuffers) -> _LoopProgram:
        """Binds everything to the memory of some buffers."""
        calls = StepProgram(b)
        embeds = _bind_embedding(calls, self._embedding, b.hidden_states)
        tables = len(calls)
        width = self.layers[0].attention.rotary.table_width
        calls.core.gather_tables(part(b.cos, width).data_ptr(), part(b.sin, width).data_ptr(), width)
        places = [len(calls)]
        for layer in self.layers:
            layer.bind(b, calls)
            places.append(len(calls))
        # Rows that experts read are free behind the last layer.
        normalise(calls, self._norm, b.hidden_states, b.expert_rows)
        calls.core.head(self._head.packed, *rows_of(b.expert_rows))
        return _LoopProgram(calls, embeds, tables, places)


class _LoopProgram:
    """The program of a loop: the embedding where it is ours (`embeds`), from `tables` on what
    copies cosines and sines, the layers, each of which begins in `layers` where the one before
    ends, and from there on norm and head.
    """

    def __init__(self, calls: StepProgram, embeds: bool, tables: int, layers: list[int]) -> None:
        self.calls, self.embeds, self.tables, self.layers = calls, embeds, tables, layers


def _bind_embedding(calls: StepProgram, embedding: nn.Module, out: torch.Tensor) -> bool:
    """Appends what writes the rows of the step's token ids to `out`, where the core can, and says
    whether it does.
    """
    if isinstance(embedding, HostEmbedding) and embedding.dtype == out.dtype:
        calls.core.embed(embedding.packed, *rows_of(out)[:3])
        return True
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
        return False
    weight = embedding.weight
    if weight.dtype != out.dtype:
        return False
    address, stride, _, count = rows_of(weight.detach())
    calls.core.keep(weight)
    calls.core.gather_rows(address, stride, weight.shape[1] * weight.element_size(), count, *rows_of(out)[:2])
    return True


def _inputs(
    step: StepContext,
    token_ids: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor] | None,
    logits: torch.Tensor | None,
) -> _core.StepInputs:
    """Returns what the core reads of the step. The tensors are the caller's for as long."""
    positions = torch.from_numpy(step.positions)
    cos, sin = (positions.new_empty(0),) * 2 if tables is None else tables
    return _core.StepInputs(
        step.plan, step.slots.data_ptr(), positions.data_ptr(), token_ids.data_ptr(),
        cos.data_ptr(), sin.data_ptr(), len(cos), cos.shape[-1],
        0 if logits is None else logits.data_ptr(),
    )  # fmt: skip
