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
from dflash_moe.operators.layer_buffers import BufferPool, LayerBuffers, part
from dflash_moe.operators.layers.blocks import HostLayer
from dflash_moe.operators.layers.bound_calls import normalise
from dflash_moe.operators.layers.step_program import StepProgram
from dflash_moe.operators.linear import HostEmbedding, HostLinear
from dflash_moe.operators.norms import HostNorm
from dflash_moe.operators.row_groups import StepSequence
from dflash_moe.operators.step_context import StepContext

# How a token is chosen: temperature, top_k, top_p, min_p, and a random number in [0, 1).
Draw = tuple[float, int, float, float, float]
# The most likely one.
GREEDY: Draw = (0.0, 0, 1.0, 0.0, 0.0)


class LayerLoop:
    """The layers of a model with what stands before and behind them, as one program of the core for
    each number of rows. Modules compute what is not ours of it, what somebody hooks, and the logits
    of a step that wants some of its rows only.
    """

    def __init__(
        self, pool: _core.HostPool, embedding: nn.Module, layers: Sequence[HostLayer], norm: HostNorm, head: HostLinear,
        tables: RotaryTables,
    ) -> None:  # fmt: skip
        self._pool = pool
        self._embedding, self._norm, self._head = embedding, norm, head
        # What is not empty where somebody hooks a module that the program stands in for.
        self._hooks = (embedding._forward_hooks, norm._forward_hooks, head._forward_hooks)
        self.layers = tuple(layers)
        self._tables = tables
        # Where logits lie of which tokens are chosen, float32 [num_rows, vocab_size].
        self._logits = torch.empty((0, head.out_features), dtype=torch.float32)
        self._read = _ReadTables(*torch.empty(2, 0, 1))

    def over(self, layers: Sequence[HostLayer]) -> LayerLoop:
        """Returns a loop over some of the layers, with the same before and behind them."""
        return LayerLoop(self._pool, self._embedding, layers, self._norm, self._head, self._tables)

    def run(
        self, token_ids: torch.Tensor, step: StepContext, wanted: torch.Tensor, residuals: StreamReader | None = None
    ) -> torch.Tensor:
        """Returns logits [num_wanted, vocab_size] of the rows `wanted` of a step, in ascending
        order; `token_ids` are int64 [num_rows]. `residuals` is shown what enters the first layer
        and leaves each.
        """
        buffers = step.buffers
        program = self._program_of(buffers)
        is_hooked = any(self._hooks)
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

    def bound(self, pool: BufferPool, num_rows: int, num_positions: int) -> LoopProgram | None:
        """Returns the program of whole steps of so many rows over the buffers of `pool`, in
        sequences of up to so many tokens; None where some of it is not the core's. It is for the
        next `choose`.
        """
        if any(self._hooks) or self._head.out_dtype is not torch.float32:
            return None
        program = self._program_of(pool.of(num_rows))
        if not (program.embeds and program.calls.is_bound() and self._reads_up_to(num_positions)):
            return None
        if len(self._logits) < num_rows:
            self._logits = torch.empty((num_rows, self._head.out_features), dtype=torch.float32)
        return program

    def choose(
        self, program: LoopProgram, sequences: Sequence[StepSequence], token_ids: Sequence[int], draws: Sequence[Draw]
    ) -> tuple[list[int], float, float]:
        """Computes a whole step and chooses the token behind each of its rows, in one call of the
        core. Returns the tokens, and the seconds in which experts were awaited and were under way.
        `draws` are as in `_core.PackedInputs`, one a row.
        """
        inputs = _core.PackedInputs(
            _core.AttentionPlan(sequences), token_ids, self._head.out_features, *self._read.addresses,
            self._logits.data_ptr(), draws,
        )  # fmt: skip
        awaited_s, remote_s = program.calls.run_bound(inputs, 0, program.num_calls)
        return inputs.chosen, awaited_s, remote_s

    def _reads_up_to(self, num_positions: int) -> bool:
        """Has `_read` name the cosines and sines of so many positions at least, and says whether
        there are common ones.
        """
        if num_positions > self._read.num_positions:
            found = self._tables.up_to(num_positions)
            if found is None:
                return False
            self._read = _ReadTables(*found)
        return True

    def _program_of(self, buffers: LayerBuffers) -> LoopProgram:
        program: LoopProgram | None = buffers.programs.get(self)
        if program is None:
            program = buffers.programs[self] = self._program(buffers)
        return program

    def _program(self, b: LayerBuffers) -> LoopProgram:
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
        calls.core.choose(self._pool, self._head.out_features)
        return LoopProgram(calls, embeds, tables, places)


class _ReadTables:
    """The cosines and sines [num_positions, width] that steps read, and what the core takes of
    them.
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._tables = (cos, sin)
        self.num_positions = len(cos)
        self.addresses = (cos.data_ptr(), sin.data_ptr(), len(cos), cos.shape[-1])


class LoopProgram:
    """The program of a loop: the embedding where it is ours (`embeds`), from `tables` on what
    copies cosines and sines, the layers, each of which begins in `layers` where the one before
    ends, and from there on norm and head.
    """

    def __init__(self, calls: StepProgram, embeds: bool, tables: int, layers: list[int]) -> None:
        self.calls, self.embeds, self.tables, self.layers = calls, embeds, tables, layers
        self.num_calls = len(calls)


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
