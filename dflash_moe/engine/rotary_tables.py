"""Cosines and sines per sequence. A model computes them for all rows of a forward at once, and some
rotary types then look at the largest position among these rows; packed with others, a row would get
other values. Here each position is computed by the model's own module as part of its own sequence,
whose length is fixed when it is admitted.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

# Positions are computed in chunks of this many, always in tensors of the same shape, so that a
# position's values never depend on how many others are computed with it.
CHUNK = 256

# What a rotary module returns: one tensor or several, each [1, num_rows, ...].
Tables = tuple[torch.Tensor, ...]


class _OfThread(threading.local):
    """The sequences of what one thread computes: (length at most, first position, number of
    rows).
    """

    step: Sequence[tuple[int, int, int]] = ()


class RotaryTables:
    """Stands in for the forward of one rotary module. `begin` gives it the sequences of a step, or
    of the half that a thread computes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._pristine = copy.deepcopy(module)
        self._forward: Callable[..., Any] = self._pristine.forward
        self._chunks: dict[tuple[Any, ...], tuple[Tables, bool]] = {}
        # Whether the module wants more than hidden states and positions, such as the type of a
        # layer: then there is no single table for all layers.
        self.wants_arguments = False
        self._depends_on_length = self._looks_at_others()
        self._own = _OfThread()

    def begin(self, step: Sequence[tuple[int, int, int]]) -> None:
        """Gives the sequences that this thread computes, each as (length at most, first position,
        number of rows).
        """
        self._own.step = step
        if self._depends_on_length:
            # Tables of lengths that no sequence of this step has are not kept for ever.
            lengths = {length for length, _, _ in step}
            if len(self._chunks) > 4 * CHUNK:
                self._chunks = {key: value for key, value in self._chunks.items() if key[0] in lengths}

    @property
    def step(self) -> Sequence[tuple[int, int, int]]:
        """What `begin` gave this thread."""
        return self._own.step

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor | None = None, *arguments: Any, **options: Any) -> Any:
        """Returns what the module would for each sequence alone. `position_ids` are those of the
        step and are not read.
        """
        del position_ids
        parts: list[list[torch.Tensor]] = []
        is_tuple = True
        for length, first, count in self.step:
            at = first
            while at < first + count:
                tables, is_tuple = self._chunk(x, length, at // CHUNK, arguments, options)
                begin = at % CHUNK
                size = min(CHUNK - begin, first + count - at)
                parts.append([table[:, begin : begin + size] for table in tables])
                at += size
        joined = tuple(column[0] if len(parts) == 1 else torch.cat(column, dim=1) for column in zip(*parts, strict=True))
        return joined if is_tuple else joined[0]

    def cos_sin(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the cosines and sines of the step in float32, each [num_rows, width]. A module
        may give both as one tensor of complex numbers.
        """
        tables = self(torch.zeros(1, 1, 1))
        cos, sin = tables if isinstance(tables, tuple) else (tables.real, tables.imag)
        return cos[0], sin[0]

    def _chunk(self, x: torch.Tensor, length: int, chunk: int, arguments: Any, options: Any) -> tuple[Tables, bool]:
        last = length - 1 if self._depends_on_length else 0
        key = (length if self._depends_on_length else 0, chunk, x.dtype, arguments, tuple(sorted(options.items())))
        found = self._chunks.get(key)
        if found is None:
            positions = torch.arange(chunk * CHUNK, (chunk + 1) * CHUNK)
            if self._depends_on_length:
                positions = positions.clamp(max=last)
            found = self._chunks[key] = self._compute(x, positions, last, arguments, options)
        return found

    def _compute(
        self, x: torch.Tensor, positions: torch.Tensor, last: int, arguments: Any, options: Any
    ) -> tuple[Tables, bool]:
        # A module of some types writes to itself, so that each computation gets a fresh copy.
        module = copy.deepcopy(self._pristine)
        given = torch.cat((positions, torch.tensor([max(last, int(positions[-1]))])))[None]
        out = module.forward(x[:1, :1], given, *arguments, **options)
        tables = out if isinstance(out, tuple) else (out,)
        return tuple(table[:, : len(positions)].contiguous() for table in tables), isinstance(out, tuple)

    def _looks_at_others(self) -> bool:
        """Says whether the values of a position depend on the largest one beside it."""
        limits = {
            CHUNK,
            *(int(value) for name, value in vars(self._pristine).items() if "max" in name and isinstance(value, int)),
        }
        config = getattr(self._pristine, "config", None)
        parameters = getattr(config, "rope_parameters", None) or {}
        nested = (
            [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
            if isinstance(parameters, dict)
            else []
        )
        for fields in nested:
            original = fields.get("original_max_position_embeddings")
            limits |= {int(original)} if original else set()
        x = torch.zeros(1, 1, 1)
        # Position 1 alone: beside it lies nothing that an original maximum could be below.
        positions = torch.ones(CHUNK, dtype=torch.int64)
        try:
            near, _ = self._compute(x, positions, 1, (), {})
            others = [self._compute(x, positions, 4 * limit + 1, (), {})[0] for limit in sorted(limits)]
        except TypeError:
            # What it depends on is not known then; so each sequence is on its own.
            self.wants_arguments = True
            return True
        return any(not torch.equal(a, b) for other in others for a, b in zip(near, other, strict=True))


def find_rotary_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules of a model that make cosines and sines of positions, by name."""
    found = {}
    for name, module in model.named_modules():
        buffers = [buffer for buffer in module._buffers if buffer.endswith("inv_freq")]
        if buffers and not any(True for _ in module.children()):
            found[name] = module
    return found
