"""`OneSequenceForward` serves models whose attention is not paged: every sequence has the cache
that transformers has for it, and a forward pass of its own.

A prompt is computed in one pass, nothing is shared between sequences, and a sequence whose step
failed begins again. That is correct for recurrent, sparse and indexed attention alike, and nothing
is claimed beyond what transformers computes.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from dflash_moe.config import BLOCK_TOKENS, MemoryBudget
from dflash_moe.errors import ConfigError
from dflash_moe.forward.block_hashes import BlockHashes
from dflash_moe.forward.blocks import MAX_BLOCKS, BlockPool
from dflash_moe.forward.forward import OutOfBlocks, RunStep, StepRows, TokenSequence, refuse_beyond, refuse_length
from dflash_moe.forward.kv_budget import kv_blocks
from dflash_moe.forward.residuals import StreamReader
from dflash_moe.forward.sequence import SequenceBlocks
from dflash_moe.operators.step_context import StepContext, computing

# What a sequence takes is measured with prompts of these lengths.
_PROBED = (8, 24)


class CachedSequence(TokenSequence):
    """A sequence with a cache of its own. Its blocks are no pages; they count what it takes."""

    __slots__ = ("cache",)

    def __init__(self, blocks: SequenceBlocks, max_tokens: int) -> None:
        super().__init__(blocks, max_tokens)
        # The model makes the cache that it needs in its first pass.
        self.cache: Any = None

    def release(self) -> None:
        """Drops the cache and gives all blocks back."""
        self.cache = None
        super().release()


class OneSequenceForward:
    """A `Forward` that runs the sequences of a step one after another."""

    cuts_prompts = False

    def __init__(self, model: Any, kv_memory: MemoryBudget, free_bytes: int | None = None, *, most: int = MAX_BLOCKS) -> None:
        """`kv_memory` bounds what all caches take, of `free_bytes` where it is a part, and `most`
        their blocks. Errors are those of `kv_blocks`.
        """
        self.model = model
        self.residuals: StreamReader | None = None
        token_bytes, sequence_bytes = measure_cache(model)
        num_blocks = kv_blocks(kv_memory, max(1, BLOCK_TOKENS * token_bytes + sequence_bytes), free_bytes=free_bytes)
        # What a sequence takes whatever its length may take half of the memory of all sequences
        # together, which bounds their number; the rest is for tokens, counted in blocks.
        whole = num_blocks * (BLOCK_TOKENS * token_bytes + sequence_bytes)
        self.max_sequences = MAX_BLOCKS
        if sequence_bytes:
            self.max_sequences = max(1, whole // 2 // sequence_bytes)
            num_blocks = max(1, (whole - self.max_sequences * sequence_bytes) // max(1, BLOCK_TOKENS * token_bytes))
        self.blocks = BlockPool(min(most, num_blocks))

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return int(self.model.config.get_text_config().vocab_size)

    def check_length(self, max_tokens: int) -> None:
        """As `Forward.check_length`."""
        refuse_length(self.model.config, max_tokens)
        refuse_beyond(self.blocks, max_tokens)

    def admit(self, max_tokens: int) -> CachedSequence:
        """As `Forward.admit`."""
        self.check_length(max_tokens)
        return CachedSequence(SequenceBlocks(self.blocks), max_tokens)

    def block_hashes(self, max_tokens: int) -> BlockHashes:
        """As `Forward.block_hashes`; no prefix is shared."""
        return BlockHashes(b"%d" % max_tokens, self.blocks.block_tokens)

    def is_rotated_alike(self, length: int, max_tokens: int) -> bool:
        """As `Forward.is_rotated_alike`; the model rotates each forward pass by its own length."""
        del length, max_tokens
        return True

    def stats(self) -> dict[str, Any]:
        """As `Forward.stats`; nothing is counted."""
        return {}

    def close(self) -> None:
        """As `Forward.close`; it has no threads."""

    @contextmanager
    def begin(self, rows: Sequence[StepRows]) -> Iterator[RunStep]:
        """As `Forward.begin`, but that a cache cannot be taken back: sequences of a failed step,
        and those that keep fewer tokens than were computed, begin again from their first token.
        """
        sequences = [entry.sequence for entry in rows]
        try:
            step = RunStep(lambda: torch.cat([self._forward(entry) for entry in rows]))
            yield step
        except BaseException:
            for sequence in sequences:
                if sequence.blocks.num_reserved:
                    sequence.blocks.unreserve()
                sequence.release()
            raise
        kept = [len(entry.token_ids) for entry in rows] if step.kept is None else step.kept
        for entry, sequence, count in zip(rows, sequences, kept, strict=True):
            sequence.blocks.keep(len(entry.token_ids))
            if count < len(entry.token_ids):
                sequence.release()

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _forward(self, entry: StepRows) -> torch.Tensor:
        sequence = entry.sequence
        assert isinstance(sequence, CachedSequence)
        if not sequence.blocks.reserve(len(entry.token_ids)):
            raise OutOfBlocks(f"the KV cache has {self.blocks.num_free} free blocks, too few for {len(entry.token_ids)} tokens")
        if not all(0 <= token < self.vocab_size for token in entry.token_ids):
            raise ConfigError(f"a token id is outside the vocabulary of {self.vocab_size}")
        ids = torch.tensor([list(entry.token_ids)], dtype=torch.int64, device=self.model.device)
        positions = np.arange(sequence.num_tokens, sequence.num_tokens + len(entry.token_ids))
        if self.residuals is not None and len(positions):
            self.residuals.begin(int(positions[0]))
        # One row at least, because 0 means all of them to a model.
        wanted = max(1, entry.num_logits)
        with computing(StepContext(positions, ids.new_empty(0), (), ())):
            out = self.model(input_ids=ids, past_key_values=sequence.cache, use_cache=True, logits_to_keep=wanted)
        sequence.cache = out.past_key_values
        logits: torch.Tensor = out.logits[0, -wanted:].float()
        return logits[wanted - entry.num_logits :]


@torch.inference_mode()  # type: ignore[untyped-decorator]
def measure_cache(model: Any) -> tuple[int, int]:
    """Returns the bytes of a model's own cache for each token of a sequence, and for a sequence
    whatever its length. Windows that fill later only make it less.
    """
    found = []
    for count in _PROBED:
        ids = torch.zeros((1, count), dtype=torch.int64, device=model.device)
        found.append(_tensor_bytes(model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values))
    (short, long), (few, many) = found, _PROBED
    token_bytes = max(0, -(-(long - short) // (many - few)))
    return token_bytes, max(0, short - few * token_bytes)


def _tensor_bytes(holder: Any) -> int:
    """Returns the bytes of all tensors that an object leads to, each counted once."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    pending = [holder]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, (list, tuple, set)):
            pending += value
        elif type(value).__module__.startswith("transformers") and hasattr(value, "__dict__"):
            # A cache of transformers has its layers, and these their tensors, in attributes.
            pending += vars(value).values()
    return sum(storages.values())
