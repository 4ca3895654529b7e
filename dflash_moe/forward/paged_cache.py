"""The cache that a model's attention modules see during a packed step: keys and values go to pages,
and nothing is given back but the rows themselves.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dflash_moe import _core
from dflash_moe.forward.kv_budget import KvShape
from dflash_moe.forward.step_blocks import PackedStep
from dflash_moe.operators.looks import StepCache
from dflash_moe.operators.paged_attention import append
from dflash_moe.operators.step_context import running_step


class PagedCache(StepCache):
    """The pages of all layers. `begin` prepares them for a step; each layer then appends once and
    reads. It is a `Pages` (operators/paged_attention.py). One step at a time.
    """

    def __init__(self, pool: _core.HostPool, shapes: Sequence[KvShape], num_blocks: int, kv_dtype: str) -> None:
        """Reserves address space for `num_blocks` blocks in each layer; pages take memory when they
        are first written. Raises DflashError where that is refused.
        """
        super().__init__()
        self.pool = pool
        self._shapes = tuple(shapes)
        self._layers = [
            _core.KvLayer(num_blocks, shape.num_kv_heads, shape.key_size, shape.value_size, kv_dtype) for shape in shapes
        ]

    def begin(self, step: PackedStep) -> torch.Tensor:
        """Copies the blocks of a step in every layer, and returns the slots of its rows."""
        self.copy_blocks(zip(step.copy_from.tolist(), step.copy_to.tolist(), strict=True))
        return torch.from_numpy(step.slots)

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copies each first block of a pair to the second one, in every layer."""
        for copy_from, copy_to in copies:
            for layer in self._layers:
                layer.copy_block(copy_from, copy_to)

    def layer(self, index: int) -> _core.KvLayer:
        """Returns the pages of a layer."""
        return self._layers[index]

    def layers_in_order(self) -> Sequence[_core.KvLayer]:
        """Returns the pages of all layers."""
        return self._layers

    @property
    def num_bytes(self) -> int:
        """The bytes of all pages, written or not."""
        return sum(layer.num_bytes for layer in self._layers)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_arguments: Any, **_options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends keys and values [1, num_kv_heads, num_rows, size] of the step's rows and returns
        them. The latents of MLA come as (latent, rotated part): keys are both, values the first.
        """
        layer, step = self._layers[layer_idx], running_step()
        if self._shapes[layer_idx].key_size != key_states.shape[-1]:
            append(layer, step.slots, torch.cat((key_states, value_states), dim=-1), key_states)
        else:
            append(layer, step.slots, key_states, value_states)
        step.keys_stored(layer_idx)
        return key_states, value_states
