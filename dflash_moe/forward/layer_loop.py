"""Runs a model whose decoder layers are all host layers by a loop of our own: embedding, layers,
norm, head. It is used where it gives the bits of the model's own forward.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dflash_moe.forward.residuals import EMBEDDING, ResidualTap
from dflash_moe.forward.rotary_tables import RotaryTables
from dflash_moe.operators.layers.blocks import HostLayer
from dflash_moe.operators.layers.layer_buffers import BufferPool


class LayerLoop:
    """The layers of a model with what stands before and behind them."""

    def __init__(
        self, embedding: nn.Module, layers: Sequence[HostLayer], norm: nn.Module, head: nn.Module, buffers: BufferPool,
        tables: RotaryTables,
    ) -> None:  # fmt: skip
        self._embedding, self._norm, self._head = embedding, norm, head
        self.layers = tuple(layers)
        self.buffers, self._tables = buffers, tables

    def run(self, token_ids: torch.Tensor, wanted: torch.Tensor, residuals: ResidualTap | None = None) -> torch.Tensor:
        """Returns logits [num_wanted, vocab_size] of the rows `wanted` of the step that the pages
        were told to begin; `token_ids` are int64 [num_rows]. `residuals` is shown what enters the
        first layer and leaves each.
        """
        buffers = self.buffers.of(len(token_ids))
        buffers.set_tables(*self._tables.cos_sin())
        buffers.hidden_states.copy_(self._embedding(token_ids))
        if residuals is not None:
            residuals.see(EMBEDDING, buffers.hidden_states)
        for index, layer in enumerate(self.layers):
            layer.step(buffers)
            if residuals is not None:
                residuals.see(index, buffers.hidden_states)
        rows = buffers.hidden_states[wanted]
        self.buffers.drop_last()
        logits: torch.Tensor = self._head(self._norm(rows))
        return logits
