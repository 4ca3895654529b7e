"""One sequence, from its first token on: over pages, or where a model's attention is not paged over
the cache that transformers has for it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from dflash_moe.forward.forward import PackedForward, StepRows


class SequenceRun(Protocol):
    """The tokens of one sequence that were computed so far. `close` gives its memory back."""

    def forward(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Computes the next tokens and returns the logits [vocab_size] of the last one. Errors are
        those of `ExpertRuntime.experts`; the sequence is then as before.
        """
        ...

    def most_likely(self, token_ids: Sequence[int]) -> int:
        """Computes the next tokens and returns the id of the most likely one behind them, the
        lowest among equals. Errors are those of `forward`.
        """
        ...

    def digest(self) -> Iterator[bytes]:
        """Yields the bytes of all keys and values that are stored, in the order of layers."""
        ...

    def close(self) -> None:
        """Gives back what the sequence holds."""
        ...


class PagedRun:
    """A `SequenceRun` over the pages of a packed forward."""

    def __init__(self, packed: PackedForward, max_tokens: int) -> None:
        self._packed = packed
        self._sequence = packed.admit(max_tokens)

    def forward(self, token_ids: Sequence[int]) -> torch.Tensor:
        """As `SequenceRun.forward`; raises ConfigError beyond `max_tokens`."""
        return self._packed.forward([StepRows(self._sequence, token_ids)])[0]

    def most_likely(self, token_ids: Sequence[int]) -> int:
        """As `SequenceRun.most_likely`."""
        with self._packed.begin([StepRows(self._sequence, token_ids)]) as step:
            return step.most_likely(1)[0]

    def digest(self) -> Iterator[bytes]:
        """As `SequenceRun.digest`."""
        table, num_tokens = self._sequence.blocks.block_table.tolist(), self._sequence.num_tokens
        for layer in self._packed.cache.layers_in_order():
            for place, block in enumerate(table):
                count = min(self._packed.blocks.block_tokens, num_tokens - place * self._packed.blocks.block_tokens)
                for values in layer.read(block):
                    yield values[:, :count].tobytes()

    def close(self) -> None:
        """Gives the sequence's blocks back."""
        self._sequence.release()


class CachedRun:
    """A `SequenceRun` over transformers' own cache, with the model's own attention."""

    def __init__(self, model: Any) -> None:
        self._model = model
        # The model makes the cache that it needs in its first pass.
        self._cache: Any = None

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def forward(self, token_ids: Sequence[int]) -> torch.Tensor:
        """As `SequenceRun.forward`."""
        ids = torch.tensor([list(token_ids)], dtype=torch.int64, device=self._model.device)
        out = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache = out.past_key_values
        logits: torch.Tensor = out.logits[0, -1]
        return logits

    def most_likely(self, token_ids: Sequence[int]) -> int:
        """As `SequenceRun.most_likely`."""
        return int(torch.argmax(self.forward(token_ids)))

    def digest(self) -> Iterator[bytes]:
        """As `SequenceRun.digest`."""
        for layer in () if self._cache is None else self._cache.layers:
            for tensor in (layer.keys, layer.values):
                yield tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()

    def close(self) -> None:
        """Drops the cache."""
        self._cache = None


def run_digest(run: SequenceRun, logits: torch.Tensor) -> str:
    """Returns a digest of all keys and values of a sequence and of some logits. Equal digests mean
    equal bits in every layer.
    """
    found = hashlib.sha256()
    for part in run.digest():
        found.update(part)
    found.update(logits.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()
