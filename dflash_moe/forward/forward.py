"""One forward pass over packed rows: the next tokens of any mixture of sequences, one sequence
after the other in one row of tokens. A row's bits depend on its own sequence alone.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch

from dflash_moe.errors import ConfigError, DflashError
from dflash_moe.forward.block_hashes import BlockHashes
from dflash_moe.forward.blocks import MAX_BLOCKS, BlockPool
from dflash_moe.forward.halves.micro_batches import MicroBatches
from dflash_moe.forward.halves.split_forecast import StepTimes
from dflash_moe.forward.layer_loop import GREEDY, Draw, LayerLoop
from dflash_moe.forward.paged_cache import PagedCache
from dflash_moe.forward.residuals import StreamReader
from dflash_moe.forward.rotary_tables import RotaryTables, find_rotary_modules, stand_in
from dflash_moe.forward.sequence import SequenceBlocks
from dflash_moe.forward.step_blocks import PackedStep, StepBlocks
from dflash_moe.forward.torch_cache import TorchCache
from dflash_moe.operators.attention_probe import max_positions
from dflash_moe.operators.layer_buffers import BufferPool
from dflash_moe.operators.notable_positions import notable_positions
from dflash_moe.operators.step_context import StepContext, computing

_PROCESSOR = torch.device("cpu")


# What is said of a row whose largest logit is NaN or an infinity.
NOT_FINITE_TEXT = (
    "the model gave no finite largest logit for a token (NaN or infinity); the weights or their numerics class are at fault"
)


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
    """A step that has begun: `run` or `choose` computes it, once."""

    __slots__ = ("_choose", "_compute", "kept")

    def __init__(
        self, compute: Callable[[], torch.Tensor], choose: Callable[[Sequence[Draw]], list[int] | None] | None = None
    ) -> None:
        """`choose` computes tokens at once; None where there is nothing that could."""
        self._compute: Callable[[], torch.Tensor] | None = compute
        self._choose = choose
        self.kept: Sequence[int] | None = None

    def choose(self, draws: Sequence[Draw]) -> list[int] | None:
        """Returns a token id for each wanted row, chosen as `draws` say (`_core.draw_tokens`), and
        NOT_FINITE where the row's largest logit is no finite number. None, and has computed
        nothing, where forward pass and choice are not one call of the core: then `run` computes.
        """
        choose, self._choose = self._choose, None
        found = None if choose is None else choose(draws)
        if found is not None:
            self._compute = None
        return found

    def most_likely(self, num_wanted: int) -> list[int]:
        """Returns the most likely token behind each of the wanted rows, the lowest id among equals.
        Raises DflashError where a row's largest logit is no finite number.
        """
        found = self.choose([GREEDY] * num_wanted)
        if found is None:
            best = self.run().max(dim=-1)
            found = best.indices.where(best.values.isfinite(), -1).tolist()
        if min(found, default=0) < 0:
            raise DflashError(NOT_FINITE_TEXT)
        return found

    def run(self) -> torch.Tensor:
        """Returns the logits [num_wanted, vocab_size] in float32, those of one entry after the
        other.
        """
        # What it computes with is not kept until the step ends.
        compute, self._compute = self._compute, None
        assert compute is not None
        return compute()

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
    residuals: StreamReader | None

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

    def begin(self, rows: Sequence[StepRows]) -> AbstractContextManager[RunStep]:
        """Begins a step that computes the tokens of `rows`; where the block that it opens ends
        without an error the sequences have them, otherwise all is as before.
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
        # As `Forward.vocab_size`. It is kept, because asking a configuration in every step takes
        # longer than most operators of a small model.
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        modules = find_rotary_modules(model).values()
        self.rotary = [RotaryTables(module) for module in modules]
        for tables, module in zip(self.rotary, modules, strict=True):
            stand_in(module, tables)
        # Set where the layers are host layers and looping over them gives the model's bits.
        self.loop: LayerLoop | None = None
        # Set where host layers read the cosines and sines of a step from its buffers.
        self.buffers: BufferPool | None = None
        # Set where steps may be computed in two halves.
        self.micro_batches: MicroBatches | None = None
        self.residuals: StreamReader | None = None
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
        """Computes the tokens of `rows` and returns the logits of `RunStep.run`. The sequences have
        the tokens afterwards; on an error nothing has changed. Errors are those of `begin`.
        """
        with self.begin(rows) as step:
            return step.run()

    @contextmanager
    def begin(self, rows: Sequence[StepRows]) -> Iterator[RunStep]:
        """As `Forward.begin`.

        Errors: OutOfBlocks, ConfigError for tokens beyond a sequence's max_tokens or outside the
        vocabulary, and those of the experts' calls.
        """
        planned = StepBlocks()
        try:
            for entry in rows:
                self._append(planned, entry)
            step = RunStep(
                lambda: self._run(rows, self.context(rows, planned.pack())), lambda draws: self._choose(rows, planned, draws)
            )
            yield step
        except BaseException:
            planned.roll_back()
            raise
        planned.commit(step.kept)

    def _choose(self, rows: Sequence[StepRows], planned: StepBlocks, draws: Sequence[Draw]) -> list[int] | None:
        """As `RunStep.choose`: for whole steps of the loop, of which all rows are wanted and nobody
        is shown anything.
        """
        loop, batches = self.loop, self.micro_batches
        if loop is None or self.buffers is None or self.residuals is not None or self._places is not None:
            return None
        token_ids, num_positions, before = list[int](), 0, 0
        for entry in rows:
            count = len(entry.token_ids)
            if entry.num_logits != count:
                return None
            token_ids += entry.token_ids
            before += entry.sequence.num_tokens * count
            num_positions = max(num_positions, entry.sequence.num_tokens + count)
        num_rows = len(token_ids)
        if num_rows == 0 or (batches is not None and not batches.takes_whole(num_rows)):
            return None
        program = loop.bound(self.buffers, num_rows, num_positions)
        if program is None:
            return None
        began = perf_counter()
        sequences, copies = planned.sequences()
        if copies:
            self.cache.copy_blocks(copies)
        tokens, awaited_s, remote_s = loop.choose(program, sequences, token_ids, draws)
        if batches is not None:
            batches.count_whole(StepTimes(num_rows, perf_counter() - began, awaited_s, remote_s), before / num_rows)
        return tokens

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

    def context(self, rows: Sequence[StepRows], step: PackedStep) -> StepContext:
        """Copies the blocks of a step, and returns what it computes with."""
        places = self._places
        return StepContext(
            step.positions if places is None else places[step.positions],
            self.cache.begin(step),
            step.sequences,
            [(entry.sequence.max_tokens, entry.sequence.num_tokens, len(entry.token_ids)) for entry in rows],
            None if places is None else int(places[-1]),
            self.buffers,
        )

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _run(self, rows: Sequence[StepRows], step: StepContext) -> torch.Tensor:
        if self.residuals is not None and step.num_rows:
            self.residuals.begin(int(step.positions[0]))
        tokens = [token for entry in rows for token in entry.token_ids]
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            raise ConfigError(f"a token id is outside the vocabulary of {self.vocab_size}")
        token_ids = torch.from_numpy(np.array(tokens, np.int64))
        wanted = _wanted_rows(rows)
        if self.micro_batches is None or step.last_position is not None:
            return self.run_rows(token_ids, step, wanted)
        return self.micro_batches.run(self, token_ids, step, wanted)

    def run_rows(self, token_ids: torch.Tensor, step: StepContext, wanted: torch.Tensor) -> torch.Tensor:
        """Returns logits [num_wanted, vocab_size] of the rows `wanted`, int64, of a step, or of a
        half of one. This thread's slot has it meanwhile.
        """
        with computing(step):
            if self.loop is not None:
                return self.loop.run(token_ids, step, wanted, self.residuals)
            if step.pool is not None:
                step.buffers.set_tables(*self.rotary[0].cos_sin(step))
            out = self.model(
                input_ids=token_ids[None].to(self.device), position_ids=step.position_ids, past_key_values=self.cache,
                use_cache=True, logits_to_keep=wanted.to(self.device),
            )  # fmt: skip
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


def _wanted_rows(rows: Sequence[StepRows]) -> torch.Tensor:
    """Returns the packed rows whose logits are wanted, int64."""
    found, end = list[int](), 0
    for entry in rows:
        end += len(entry.token_ids)
        found += range(end - entry.num_logits, end)
    return torch.from_numpy(np.array(found, np.int64))
