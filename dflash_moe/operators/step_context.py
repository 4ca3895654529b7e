"""`StepContext` is all that one thread computes with in a step. It is made once a step, or once for
each of its two halves, and passed on.

Where a model's own modules stand between who calls and who is called, one slot carries it (no slot
of the pages): `computing` fills and empties it, and forward/ alone calls that. Each thread has its
own, because two halves of a step run through the same modules at once
(forward/halves/micro_batches.py).
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from dflash_moe import _core
from dflash_moe.operators.layer_buffers import BufferPool, LayerBuffers
from dflash_moe.operators.row_groups import RowGroup, StepSequence
from dflash_moe.operators.step_clock import StepClock


def no_order(_layer: int) -> None:
    """Waits for nobody and tells nobody."""


@dataclass(eq=False)
class StepContext:
    """The rows of a step or of a half of one, with what is made of them once, when it is first
    asked for. Nothing changes once it is made; it is not frozen because that would cost each step a
    microsecond.
    """

    # The position of each row in its sequence.
    positions: np.ndarray  # int64 [num_rows]
    # The slot of each row in the pages, on the model's device.
    slots: torch.Tensor  # int64 [num_rows]
    # Each sequence: its block table, the position of its first row, and its number of rows.
    sequences: Sequence[StepSequence]
    # Each sequence for its cosines: its length at most, and then as above.
    lengths: Sequence[tuple[int, int, int]]
    # In a proof, `positions` that follow from no sequence, and this is where the sequence ends.
    last_position: int | None = None
    # Where host layers have their rows, the first or the second half of a step.
    pool: BufferPool | None = None
    half: int = 0
    clock: StepClock = field(default_factory=StepClock)
    # The two halves of a sequence that is cut are told each layer's index: one that its keys and
    # values of all rows are in the pages, the other one waits for them.
    keys_stored: Callable[[int], None] = no_order
    await_keys: Callable[[int], None] = no_order

    @property
    def num_rows(self) -> int:
        """The number of packed rows."""
        return len(self.positions)

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """The positions [1, num_rows] on the model's device."""
        return torch.from_numpy(self.positions)[None].to(self.slots.device)

    @cached_property
    def plan(self) -> _core.AttentionPlan:
        """The sequences as the core's attention takes them."""
        return _core.AttentionPlan(tuple(self.sequences))

    @cached_property
    def inputs(self) -> _core.StepInputs:
        """What the core's programs of layers read of the step."""
        return _core.StepInputs(self.plan, self.slots.data_ptr())

    @cached_property
    def groups(self) -> dict[int, list[RowGroup]]:
        """The sequences as torch's attention takes them, with their masks: what was planned so far
        by window.
        """
        return {}

    @cached_property
    def buffers(self) -> LayerBuffers:
        """Where the rows lie in host layers."""
        assert self.pool is not None
        return self.pool.of(self.num_rows, self.half)


class _Slot(threading.local):
    step: StepContext | None = None


_SLOT = _Slot()


class computing:
    """Opens a block in which this thread computes `step`; an error that ends it empties the slot
    too.
    """

    __slots__ = ("_step",)

    def __init__(self, step: StepContext) -> None:
        self._step = step

    def __enter__(self) -> None:
        _SLOT.step = self._step

    def __exit__(self, *_error: object) -> None:
        _SLOT.step = None


def current_step() -> StepContext | None:
    """Returns what this thread computes, None where it is no step."""
    return _SLOT.step


def running_step() -> StepContext:
    """Returns what this thread computes; only an engine's model asks."""
    step = _SLOT.step
    assert step is not None
    return step
