"""One forward pass over packed rows: the next tokens of any mixture of sequences, one sequence
after the other in one row of tokens. A row's bits depend on its own sequence alone.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from dflash_moe.errors import ConfigError
from dflash_moe.forward.block_hashes import BlockHashes
from dflash_moe.forward.blocks import MAX_BLOCKS, BlockPool
from dflash_moe.forward.layer_loop import LayerLoop
from dflash_moe.forward.micro_batches import MicroBatches
from dflash_moe.forward.paged_cache import PagedCache
from dflash_moe.forward.residuals import ResidualTap
from dflash_moe.forward.rotary_tables import RotaryTables, find_rotary_modules
from dflash_moe.forward.sequence import SequenceBlocks
from dflash_moe.forward.step_blocks import PackedStep, StepBlocks
from dflash_moe.forward.torch_cache import TorchCache
from dflash_moe.operators.attention_probe import max_positions
from dflash_moe.operators.layers.layer_buffers import BufferPool
from dflash_moe.operators.notable_positions import notable_positions

_PROCESSOR = torch.device("cpu")


class TokenSequence:
    """A sequence of tokens that was admitted: its blocks, and the length that it may reach, which
    is fixed because some rotary types depend on it.
    """

    __slots__ = ("blocks", "max_tokens")

    def __init__(self, blocks: SequenceBlocks, max_tokens: int) -> None:
        self.blocks = blocks
        self.max_tokens = max_tokens

    @property
    def num_tokens(self) -> int:
        """The number of tokens whose keys and values are stored."""
        return self.blocks.num_tokens

    def fork(self, num_tokens: int | None = None) -> TokenSequence:
        """Returns a sequence that shares the first `num_tokens` tokens, by default all, and may
        become as long. Raises EngineError within a step.
        """
        return TokenSequence(self.blocks.fork(num_tokens), self.max_tokens)

    def release(self) -> None:
        """Gives all blocks back."""
        self.blocks.release()


@dataclass(frozen=True, slots=True)
class StepRows:
    """The next tokens of one sequence, behind those that it stores. Logits are wanted of the last
    `num_logits` of them.
    """

    sequence: TokenSequence
    token_ids: Sequence[int]
    num_logits: int = 1


class RunStep:
    """A step whose forward pass was clean. `logits` are [num_wanted, vocab_size] in float32, those
    of one entry after the other.
    """

    __slots__ = ("kept", "logits")

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        self.kept: Sequence[int] | None = None

    def keep(self, counts: Sequence[int]) -> None:
        """Says how many of its tokens each entry has from now on, in their order; without it all.
        What is not kept is as if it had never been computed.
        """
        self.kept = counts


class Forward(Protocol):
    """What an engine needs to compute steps. One thread calls it."""

    blocks: BlockPool
    # Whether a prompt may be computed in several steps, and sequences share what they begin with.
    cuts_prompts: bool
    # So many sequences may exist at a time.
    max_sequences: int
    model: Any
    # Set while somebody looks at the residual stream of the one sequence that there is.
    residuals: ResidualTap | None

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        ...

    def check_length(self, max_tokens: int) -> None:
        """Raises ConfigError where a sequence can never have `max_tokens` tokens, its prompt
        included.
        """
        ...

    def admit(self, max_tokens: int) -> TokenSequence:
        """Makes an empty sequence that may have up to `max_tokens` tokens. Errors are those of
        `check_length`.
        """
        ...

    def step(self, rows: Sequence[StepRows]) -> AbstractContextManager[RunStep]:
        """Computes the tokens of `rows`; where the block that it opens ends without an error the
        sequences have them, otherwise all is as before.
        """
        ...

    def block_hashes(self, max_tokens: int) -> BlockHashes:
        """Returns the hashes of an empty sequence that may have up to `max_tokens` tokens. They
        name all that its keys and values depend on.
        """
        ...

    def is_rotated_alike(self, length: int, max_tokens: int) -> bool:
        """Says whether the first `length` tokens of a sequence have the same keys and values where
        it may have up to `max_tokens` as where it ends with them.
        """
        ...

    def stats(self) -> dict[str, Any]:
        """Returns what was counted of steps, by name."""
        ...

    def close(self) -> None:
        """Ends what threads it has, after the last step."""
        ...


class OutOfBlocks(ConfigError):
    """The pages have no room for the tokens of a step."""


class PackedForward:
    """A `Forward` over a model whose attention is paged."""

    cuts_prompts = True
    max_sequences = MAX_BLOCKS

    def __init__(
        self,
        model: Any,
        cache: PagedCache | TorchCache,
        blocks: BlockPool,
        dtype: torch.dtype,
        device: torch.device = _PROCESSOR,
    ) -> None:
        """`model` and `cache` are on `device`, and so are the logits of a step."""
        self.model = model
        self.device = device
        self.cache = cache
        self.blocks = blocks
        # The dtype of hidden states.
        self.dtype = dtype
        modules = find_rotary_modules(model).values()
        self.rotary = [RotaryTables(module) for module in modules]
        for tables, module in zip(self.rotary, modules, strict=True):
            module.__dict__["forward"] = tables
        # Set where the layers are host layers and looping over them gives the model's bits.
        self.loop: LayerLoop | None = None
        self._buffers: BufferPool | None = None
        # Set where steps may be computed in two halves.
        self.micro_batches: MicroBatches | None = None
        self.residuals: ResidualTap | None = None
        self.max_positions = max_positions(model.config)
        # Where modules may begin to compute something else.
        self.notable_positions = notable_positions(model.config, max(0, self.max_positions - 1))
        # Set within `standing_at`.
        self._places: np.ndarray | None = None

    def check_length(self, max_tokens: int) -> None:
        """As `Forward.check_length`: the model's positions, and what all pages together hold."""
        refuse_length(self.model.config, max_tokens)
        refuse_beyond(self.blocks, max_tokens)

    def admit(self, max_tokens: int) -> TokenSequence:
        """As `Forward.admit`."""
        self.check_length(max_tokens)
        return TokenSequence(SequenceBlocks(self.blocks), max_tokens)

    def block_hashes(self, max_tokens: int) -> BlockHashes:
        """As `Forward.block_hashes`: some rotary types depend on the length of a sequence."""
        size = self.blocks.block_tokens

        def rotation(block: int) -> bytes:
            tables = [one for one in self._used_rotary() if one.depends_on_length]
            return b"".join(one.block_digest(max_tokens, block, size) for one in tables)

        return BlockHashes(b"", size, rotation)

    def is_rotated_alike(self, length: int, max_tokens: int) -> bool:
        """As `Forward.is_rotated_alike`."""
        return all(tables.are_alike(length, max_tokens) for tables in self._used_rotary())

    def _used_rotary(self) -> list[RotaryTables]:
        """Returns the rotary modules that forward passes ask: those of a tower for pictures rotate
        nothing of a text. Before the first pass it is not known which these are.
        """
        return [tables for tables in self.rotary if tables.is_used] or self.rotary

    def stats(self) -> dict[str, Any]:
        """As `Forward.stats`: `micro_batches`, where steps may be computed in two."""
        return {} if self.micro_batches is None else {"micro_batches": self.micro_batches.stats()}

    def close(self) -> None:
        """As `Forward.close`: the thread of the second micro-batch."""
        if self.micro_batches is not None:
            self.micro_batches.close()

    def forward(self, rows: Sequence[StepRows]) -> torch.Tensor:
        """Computes the tokens of `rows` and returns logits as `RunStep` has them. The sequences
        have the tokens afterwards; on an error nothing has changed. Errors are those of `step`.
        """
        with self.step(rows) as run:
            return run.logits

    @contextmanager
    def step(self, rows: Sequence[StepRows]) -> Iterator[RunStep]:
        """As `Forward.step`.

        Errors: OutOfBlocks, ConfigError for tokens beyond a sequence's max_tokens or outside the
        vocabulary, and those of the experts' calls.
        """
        planned = StepBlocks()
        try:
            for entry in rows:
                self._append(planned, entry)
            run = RunStep(self._compute(rows, planned.pack()))
            yield run
        except BaseException:
            planned.roll_back()
            raise
        planned.commit(run.kept)

    @contextmanager
    def standing_at(self, positions: Sequence[int]) -> Iterator[None]:
        """Opens a block for a proof, in which token i of every sequence stands at `positions[i]`,
        ascending, and not at i. It still sees the tokens before it, and windows count tokens.
        """
        self._places = np.array(positions, np.int64)
        try:
            yield
        finally:
            self._places = None

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _compute(self, rows: Sequence[StepRows], step: PackedStep) -> torch.Tensor:
        self.cache.begin(step)
        places, last = None, 0
        if self._places is not None:
            step = replace(step, positions=self._places[step.positions])
            places, last = torch.from_numpy(step.positions), int(self._places[-1])
        if self.residuals is not None:
            self.residuals.begin_step(step.positions)
        lengths = [(entry.sequence.max_tokens, entry.sequence.num_tokens, len(entry.token_ids)) for entry in rows]
        for tables in self.rotary:
            tables.begin(lengths, places, last)
        token_ids = torch.tensor([token for entry in rows for token in entry.token_ids], dtype=torch.int64)
        if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < self.vocab_size:
            raise ConfigError(f"a token id is outside the vocabulary of {self.vocab_size}")
        wanted = _wanted_rows(rows, step)
        if self.micro_batches is None or places is not None:
            return self.run_rows(token_ids, step, wanted)
        return self.micro_batches.run(self, token_ids, step, wanted)

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return int(self.model.config.get_text_config().vocab_size)

    def use_buffers(self, buffers: BufferPool) -> None:
        """Has each step write its cosines and sines to these buffers, from which host layers read
        them.
        """
        self._buffers = buffers

    def run_rows(self, token_ids: torch.Tensor, step: PackedStep, wanted: torch.Tensor) -> torch.Tensor:
        """Returns logits [num_wanted, vocab_size] of the rows `wanted`, int64, of what the pages
        and tables of this thread were told to begin: the whole step, or a half of it as `step`.
        """
        if self.residuals is not None:
            self.residuals.begin_rows(step.positions)
        if self.loop is not None:
            return self.loop.run(token_ids, wanted, self.residuals)
        if self._buffers is not None:
            self._buffers.of(len(token_ids)).set_tables(*self.rotary[0].cos_sin())
        positions = torch.from_numpy(step.positions)[None].to(self.device)
        token_ids, wanted = token_ids.to(self.device), wanted.to(self.device)
        out = self.model(
            input_ids=token_ids[None], position_ids=positions, past_key_values=self.cache, use_cache=True, logits_to_keep=wanted
        )
        logits: torch.Tensor = out.logits[0]
        return logits.float()

    def _append(self, planned: StepBlocks, entry: StepRows) -> None:
        sequence, count = entry.sequence, len(entry.token_ids)
        if sequence.num_tokens + count > sequence.max_tokens:
            raise ConfigError(
                f"a sequence admitted for {sequence.max_tokens} tokens has {sequence.num_tokens} and got {count} more"
            )
        if not planned.append(sequence.blocks, count):
            raise OutOfBlocks(
                f"the KV cache has {self.blocks.num_free} free blocks of {self.blocks.block_tokens} tokens, too few for "
                f"{count} tokens behind {sequence.num_tokens}; raise engine.kv_memory or run fewer sequences"
            )


def refuse_length(config: Any, max_tokens: int) -> None:
    """Raises ConfigError where a model of this configuration has no positions for a sequence of
    `max_tokens` tokens.
    """
    most = max_positions(config)
    if max_tokens < 1 or (most and max_tokens > most):
        raise ConfigError(
            f"a sequence of {max_tokens} tokens was asked for, its prompt included; the model has positions for 1..{most} "
            "(max_position_embeddings)"
        )


def refuse_beyond(blocks: BlockPool, max_tokens: int) -> None:
    """Raises ConfigError where all blocks together have no room for `max_tokens` tokens."""
    room = blocks.num_blocks * blocks.block_tokens
    if max_tokens > room:
        raise ConfigError(
            f"a sequence of {max_tokens} tokens was asked for, and the KV cache has room for {room}; raise "
            "engine.kv_memory, or shorten the prompt or max_tokens"
        )


def _wanted_rows(rows: Sequence[StepRows], step: PackedStep) -> torch.Tensor:
    """Returns the packed rows whose logits are wanted, int64."""
    ends = step.row_starts[1:].tolist()
    return torch.tensor(
        [end - entry.num_logits + place for entry, end in zip(rows, ends, strict=True) for place in range(entry.num_logits)],
        dtype=torch.int64,
    )
