"""The paged KV cache of a model whose operators are torch's: pages are torch tensors on the model's
device, a card or the processor, and attention reads them through one gather buffer.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dflash_moe.config import BLOCK_TOKENS
from dflash_moe.errors import ConfigError, EngineError
from dflash_moe.forward.kv_budget import KvShape
from dflash_moe.forward.step_blocks import PackedStep
from dflash_moe.operators.looks import StepCache
from dflash_moe.operators.row_groups import RowGroup, plan_groups
from dflash_moe.operators.step_context import StepContext, running_step


class TorchLayer:
    """The pages of one layer."""

    def __init__(self, num_blocks: int, shape: KvShape, dtype: torch.dtype, device: torch.device) -> None:
        # Nobody reads a slot before it was written, so that pages need no first value.
        size = (num_blocks, BLOCK_TOKENS, shape.num_kv_heads)
        self.keys = torch.empty((*size, shape.key_size), dtype=dtype, device=device)
        self.values = torch.empty((*size, shape.value_size), dtype=dtype, device=device)

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return len(self.keys)

    @property
    def num_bytes(self) -> int:
        """The bytes of all blocks."""
        found: int = self.keys.nbytes + self.values.nbytes
        return found

    def append(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores keys and values [1, num_kv_heads, num_rows, size] at slots, int64 [num_rows],
        rounded to the dtype of the pages.
        """
        for pages, rows in ((self.keys, key), (self.values, value)):
            pages.flatten(0, 1).index_copy_(0, slots, rows[0].transpose(0, 1).to(pages.dtype))

    def copy_blocks(self, copy_from: torch.Tensor, copy_to: torch.Tensor) -> None:
        """Copies blocks, int64 [num_copies] each."""
        for pages in (self.keys, self.values):
            pages.index_copy_(0, copy_to, pages.index_select(0, copy_from))

    def read(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns keys and values of a block as float32 [num_kv_heads, block_tokens, size] on the
        processor.
        """
        keys, values = (pages[block].transpose(0, 1).float().contiguous().cpu().numpy() for pages in (self.keys, self.values))
        return keys, values


class TorchCache(StepCache):
    """The pages of all layers. `begin` prepares them for a step; each layer then appends once and
    reads. It is a `GatheredPages` (operators/gathered_attention.py). One step at a time.
    """

    def __init__(
        self, shapes: Sequence[KvShape], num_blocks: int, max_keys: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocates pages and a buffer for `max_keys` tokens of the widest layer, which must have
        room for the longest sequence. Raises ConfigError where the device has too little memory.
        """
        super().__init__()
        self._device = device
        self._max_keys = max_keys
        try:
            self._layers = [TorchLayer(num_blocks, shape, dtype, device) for shape in shapes]
            # One after the other, the layers and the groups of a step gather into these.
            self._key_buffer, self._value_buffer = (
                torch.empty(max_keys * widest, dtype=dtype, device=device) for widest in gathered_values(shapes)
            )
        except RuntimeError as error:
            raise ConfigError(
                f"engine.kv_memory: {device} has no room for {num_blocks} blocks and a gather buffer of {max_keys} tokens: "
                f"{error}; lower it"
            ) from None

    def begin(self, step: PackedStep) -> torch.Tensor:
        """Copies the blocks of a step in every layer, and returns the slots of its rows."""
        numbers = torch.from_numpy(np.concatenate([step.slots, step.copy_from, step.copy_to])).to(self._device)
        num_copies = len(step.copy_from)
        slots, copy_from, copy_to = numbers.split([step.num_rows, num_copies, num_copies])
        if num_copies:
            for layer in self._layers:
                layer.copy_blocks(copy_from, copy_to)
        return slots

    def groups(self, step: StepContext, window: int) -> Sequence[RowGroup]:
        """Returns the groups of a step, for attention with a window, 0 for none."""
        found = step.groups.get(window)
        if found is None:
            found = step.groups[window] = plan_groups(step.sequences, window, self._max_keys, self._device)
        return found

    def gather(self, index: int, group: RowGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what a layer stored as keys and values of a group, each [num_sequences, num_keys,
        num_kv_heads, size]. They are views of the buffer, valid until the next call.
        """
        layer, count = self._layers[index], group.num_sequences * group.num_keys
        if count > self._max_keys:
            raise EngineError(f"{count} keys were to be gathered; the buffer has room for {self._max_keys}")
        found = []
        for pages, buffer in ((layer.keys, self._key_buffer), (layer.values, self._value_buffer)):
            rows = pages.view(-1, pages.shape[2] * pages.shape[3])
            out = buffer[: count * rows.shape[1]].view(count, -1)
            torch.index_select(rows, 0, group.slots, out=out)
            found.append(out.view(group.num_sequences, group.num_keys, *pages.shape[2:]))
        return found[0], found[1]

    def layer(self, index: int) -> TorchLayer:
        """Returns the pages of a layer."""
        return self._layers[index]

    def layers_in_order(self) -> Sequence[TorchLayer]:
        """Returns the pages of all layers."""
        return self._layers

    def token_bytes(self, index: int) -> int:
        """Returns the bytes that a token takes in a layer."""
        layer = self._layers[index]
        return layer.num_bytes // (layer.num_blocks * BLOCK_TOKENS)

    @property
    def num_bytes(self) -> int:
        """The bytes of all pages, written or not."""
        return sum(layer.num_bytes for layer in self._layers)

    @property
    def gather_bytes(self) -> int:
        """The bytes of the buffer that keys and values are gathered into."""
        found: int = self._key_buffer.nbytes + self._value_buffer.nbytes
        return found

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_arguments: Any, **_options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends keys and values [1, num_kv_heads, num_rows, size] of the step's rows, or latents
        and their rotated parts, and returns them.
        """
        self._layers[layer_idx].append(running_step().slots, key_states, value_states)
        return key_states, value_states


def gathered_values(shapes: Sequence[KvShape]) -> tuple[int, int]:
    """Returns how many numbers a token takes in the buffers of keys and of values, which have room
    for the widest layer.
    """
    return (
        max(shape.num_kv_heads * shape.key_size for shape in shapes),
        max(shape.num_kv_heads * shape.value_size for shape in shapes),
    )
