"""Where the rows of a step lie on their way through host layers: buffers that all layers share.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

# The buffers of steps with at most this many rows are kept, in one memory; those of a prefill go
# with it.
KEPT_ROWS = 64


def part(buffer: torch.Tensor, width: int) -> torch.Tensor:
    """Returns rows of `width` values, densely packed at the beginning of a buffer."""
    return buffer.view(-1)[: buffer.shape[0] * width].view(buffer.shape[0], width)


class LayerBuffers:
    """The rows of a step on their way through the layers, for one number of rows. Only
    `hidden_states` lives from layer to layer.
    """

    def __init__(self, num_rows: int, sizes: BufferSizes, dtype: torch.dtype) -> None:
        def floats(width: int) -> torch.Tensor:
            return torch.empty((num_rows, width), dtype=torch.float32)

        self.num_rows = num_rows
        # What computes on these rows, by layer or loop over layers: programs that are bound to
        # these tensors (layers/step_program.py), and go with them.
        self.programs: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self.hidden_states = torch.empty((num_rows, sizes.hidden_size), dtype=dtype)
        self.normed = floats(sizes.hidden_size)
        self.query, self.key, self.value = floats(sizes.query), floats(sizes.key), floats(sizes.value)
        self.low_rank, self.absorbed = floats(sizes.low_rank), floats(sizes.absorbed)
        self.latent_query = floats(sizes.latent_query)
        self.attended, self.middle = floats(sizes.attended), floats(sizes.hidden_size)
        self.expert_rows = torch.empty((num_rows, sizes.hidden_size), dtype=dtype)
        self.routed = torch.empty((num_rows, sizes.hidden_size), dtype=dtype)
        self.gate, self.up, self.shared = floats(sizes.mlp), floats(sizes.mlp), floats(sizes.hidden_size)
        self.row_gate = floats(1)
        self.logits = floats(sizes.num_experts)
        self.topk_weights = floats(sizes.top_k)
        self.topk_ids = torch.empty((num_rows, sizes.top_k), dtype=torch.int64)
        self.cos, self.sin = floats(sizes.table), floats(sizes.table)

    def first_rows(self, num_rows: int) -> LayerBuffers:
        """Returns the same memory as buffers for fewer rows."""
        found = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(found, name, value[:num_rows])
        found.num_rows, found.programs = num_rows, WeakKeyDictionary()
        return found

    def tensors(self) -> list[torch.Tensor]:
        """Returns all tensors."""
        return [value for value in vars(self).values() if isinstance(value, torch.Tensor)]

    def set_tables(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Copies the cosines and sines [num_rows, width] of a step, from which layers rotate."""
        for buffer, table in ((self.cos, cos), (self.sin, sin)):
            part(buffer, table.shape[1]).copy_(table)


@dataclass(slots=True)
class BufferSizes:
    """The largest width of each buffer over all layers."""

    hidden_size: int = 1
    query: int = 1
    key: int = 1
    value: int = 1
    low_rank: int = 1
    absorbed: int = 1
    latent_query: int = 1
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
    """Buffers by number of rows: those of small steps are kept, those of larger ones made anew. The
    two halves of a step have their own, and each is used for one step at a time, because small
    steps share their memory.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.sizes = BufferSizes()
        self._dtype = dtype
        self._kept: tuple[dict[int, LayerBuffers], ...] = ({}, {})

    def of(self, num_rows: int, half: int = 0) -> LayerBuffers:
        """Returns the buffers for so many rows of the first or the second half of a step."""
        if num_rows > KEPT_ROWS:
            return LayerBuffers(num_rows, self.sizes, self._dtype)
        kept = self._kept[half]
        if not kept:
            # Buffers for fewer rows are views of the first rows of these.
            kept[KEPT_ROWS] = LayerBuffers(KEPT_ROWS, self.sizes, self._dtype)
        if num_rows not in kept:
            kept[num_rows] = kept[KEPT_ROWS].first_rows(num_rows)
        return kept[num_rows]

    def grow(self, **widths: int) -> None:
        """Makes room for these widths in all buffers that are asked for from now on."""
        before = replace(self.sizes)
        self.sizes.grow(**widths)
        if self.sizes != before:
            self._kept = ({}, {})
