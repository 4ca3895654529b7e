"""Runs a model whose decoder layers are all host layers by a loop of our own: embedding, layers,
norm, head. It is used where it gives the bits of the model's own forward.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dflash_moe.forward.residuals import EMBEDDING, StreamReader
from dflash_moe.forward.rotary_tables import RotaryTables
from dflash_moe.operators.layer_buffers import LayerBuffers
from dflash_moe.operators.layers.blocks import HostLayer
from dflash_moe.operators.layers.step_program import StepProgram
from dflash_moe.operators.step_context import StepContext


class LayerLoop:
    """The layers of a model with what stands before and behind them."""

    def __init__(
        self, embedding: nn.Module, layers: Sequence[HostLayer], norm: nn.Module, head: nn.Module, tables: RotaryTables
    ) -> None:
        self._embedding, self._norm, self._head = embedding, norm, head
        self.layers = tuple(layers)
        self._tables = tables

    def run(
        self, token_ids: torch.Tensor, step: StepContext, wanted: torch.Tensor, residuals: StreamReader | None = None
    ) -> torch.Tensor:
        """Returns logits [num_wanted, vocab_size] of the rows `wanted` of a step; `token_ids` are
        int64 [num_rows]. `residuals` is shown what enters the first layer and leaves each.
        """
        buffers = step.buffers
        program = buffers.programs.get(self)
        if program is None:
            program = buffers.programs[self] = _LoopProgram(buffers, self.layers)
        buffers.set_tables(*self._tables.cos_sin(step))
        buffers.hidden_states.copy_(self._embedding(token_ids))
        if residuals is None:
            program.calls.run(step)
        else:
            residuals.see(EMBEDDING, step.positions, buffers.hidden_states)
            for index, (begin, end) in enumerate(program.layers):
                program.calls.run(step, begin, end)
                residuals.see(index, step.positions, buffers.hidden_states)
        logits: torch.Tensor = self._head(self._norm(buffers.hidden_states[wanted]))
        return logits


class _LoopProgram:
    """The program of all layers over some buffers, and where in it each layer begins and ends."""

    def __init__(self, buffers: LayerBuffers, layers: Sequence[HostLayer]) -> None:
        self.calls = StepProgram(buffers)
        self.layers: list[tuple[int, int]] = []
        for layer in layers:
            begin = len(self.calls)
            layer.bind(buffers, self.calls)
            self.layers.append((begin, len(self.calls)))
