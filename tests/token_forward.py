"""`TokenForward` is a forward pass without a model, for tests of the engine. Its pages are real: a
token's logits depend on the ids that the pages hold for its whole sequence, so that a block which
is shared, copied or given back wrongly changes tokens.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from dflash_moe import _core
from dflash_moe.engine.delivery import TokenStream
from dflash_moe.engine.engine import Engine
from dflash_moe.engine.engine_settings import EngineSettings
from dflash_moe.engine.request import TokenDelta
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.forward.block_hashes import BlockHashes
from dflash_moe.forward.blocks import BlockPool
from dflash_moe.forward.forward import OutOfBlocks, RunStep, StepRows, TokenSequence, refuse_beyond
from dflash_moe.forward.layer_loop import Draw
from dflash_moe.forward.sequence import SequenceBlocks
from dflash_moe.forward.step_blocks import PackedStep, StepBlocks

VOCAB = 37
BLOCK_TOKENS = 4
# What must come is awaited so long. Only a failing test waits for all of it.
PATIENCE_S = 60.0


class TokenForward:
    """A `Forward` of which tests say what happens in a step. The attributes are for them."""

    cuts_prompts = True

    def __init__(self, num_blocks: int = 256, *, max_sequences: int = 1 << 20) -> None:
        self.blocks = BlockPool(num_blocks, BLOCK_TOKENS)
        self.max_sequences = max_sequences
        self.vocab_size = VOCAB
        self.num_steps = 0
        # Called with the rows of a step before it is computed; what it raises fails the step.
        self.before: Callable[[Sequence[StepRows]], None] = lambda rows: None
        # May change the logits of a step.
        self.change: Callable[[Sequence[StepRows], torch.Tensor], None] = lambda rows, logits: None
        # Whether steps of which all rows are wanted choose their tokens, and how many did.
        self.chooses = False
        self.num_chosen = 0
        self._slots = np.full(num_blocks * BLOCK_TOKENS, -1, np.int64)

    def check_length(self, max_tokens: int) -> None:
        refuse_beyond(self.blocks, max_tokens)

    def admit(self, max_tokens: int) -> TokenSequence:
        self.check_length(max_tokens)
        return TokenSequence(SequenceBlocks(self.blocks), max_tokens)

    def block_hashes(self, max_tokens: int) -> BlockHashes:
        return BlockHashes(b"", BLOCK_TOKENS)

    def is_rotated_alike(self, length: int, max_tokens: int) -> bool:
        return True

    def stats(self) -> dict[str, Any]:
        return {}

    @contextmanager
    def begin(self, rows: Sequence[StepRows]) -> Iterator[RunStep]:
        planned = StepBlocks()
        try:
            for entry in rows:
                assert entry.sequence.num_tokens + len(entry.token_ids) <= entry.sequence.max_tokens
                if not planned.append(entry.sequence.blocks, len(entry.token_ids)):
                    raise OutOfBlocks("too few blocks")
            packed = planned.pack()
            step = RunStep(partial(self._compute, rows, packed), partial(self._choose, rows, packed))
            yield step
        except BaseException:
            planned.roll_back()
            raise
        planned.commit(step.kept)

    def _choose(self, rows: Sequence[StepRows], step: PackedStep, draws: Sequence[Draw]) -> list[int] | None:
        if not self.chooses or any(entry.num_logits != len(entry.token_ids) for entry in rows):
            return None
        logits = self._compute(rows, step)
        self.num_chosen += 1
        fields = [(row, *draw) for row, draw in enumerate(draws)]
        return _core.draw_tokens(logits.data_ptr(), 4 * VOCAB, "f32", VOCAB, fields)

    def _compute(self, rows: Sequence[StepRows], step: PackedStep) -> torch.Tensor:
        self.before(rows)
        pages = self._slots.reshape(-1, BLOCK_TOKENS)
        pages[step.copy_to] = pages[step.copy_from]
        self._slots[step.slots] = [token for entry in rows for token in entry.token_ids]
        found = []
        for entry, (table, first, count) in zip(rows, step.sequences, strict=True):
            stored = pages[table].reshape(-1)
            found += [logits_after(stored[: first + count - back]) for back in reversed(range(entry.num_logits))]
        logits = torch.from_numpy(np.array(found, np.float32).reshape(-1, VOCAB))
        self.change(rows, logits)
        self.num_steps += 1
        return logits


def logits_after(token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns the logits behind these tokens, float32 [VOCAB], all different."""
    seed = zlib.crc32(np.asarray(token_ids, np.int64).tobytes())
    return np.random.default_rng(seed).permutation(VOCAB).astype(np.float32) / 8


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    """Returns what must follow a prompt at temperature 0."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_after(tokens).argmax()))
    return tokens[len(prompt) :]


def prompt_of(count: int, seed: int = 0) -> list[int]:
    """Returns random token ids."""
    ids: list[int] = np.random.default_rng(1000 + seed).integers(0, VOCAB, count).tolist()
    return ids


def plain(max_tokens: int = 8, **fields: Any) -> SamplingParams:
    """Returns parameters at temperature 0."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **fields)


class Held:
    """Keeps the engine thread within a step until it is let go: `forward.before = Held()`. The
    first `skip` steps pass.
    """

    def __init__(self, skip: int = 0) -> None:
        self.is_in_step, self.may_go = threading.Event(), threading.Event()
        self._skip = skip

    def __call__(self, _rows: Sequence[StepRows]) -> None:
        self._skip -= 1
        if self._skip < 0:
            self.is_in_step.set()
            assert self.may_go.wait(PATIENCE_S)

    def wait(self) -> None:
        """Returns once the engine thread is within a step."""
        assert self.is_in_step.wait(PATIENCE_S)


def rest_of(stream: TokenStream) -> list[TokenDelta]:
    """Returns all further deltas of a stream. A stream that does not end is a failure."""
    found: list[TokenDelta] = []
    while deltas := stream.take(PATIENCE_S):
        found += deltas
    return found


def tokens_of(deltas: Sequence[TokenDelta], choice: int = 0) -> list[int]:
    """Returns the tokens of one choice. Its last delta, and no other, must say how it has ended."""
    mine = [delta for delta in deltas if delta.choice == choice]
    assert [delta.finish_reason is not None for delta in mine] == [False] * (len(mine) - 1) + [True]
    return [token for delta in mine for token in delta.token_ids]


def end_of(deltas: Sequence[TokenDelta], choice: int = 0) -> TokenDelta:
    """Returns the last delta of a choice."""
    tokens_of(deltas, choice)
    return [delta for delta in deltas if delta.choice == choice][-1]


@contextmanager
def engine_over(forward: TokenForward, *, eos: frozenset[int] = frozenset(), **settings: Any) -> Iterator[Engine]:
    """Yields an engine. Afterwards nothing of any request is left in it, and all blocks are
    back.
    """
    engine = Engine(forward, EngineSettings(**{"call_timeout_s": PATIENCE_S, **settings}), eos_token_ids=eos)
    try:
        yield engine
        forward.before = lambda rows: None
    finally:
        engine.close()
    assert_clean(engine, forward)


def assert_clean(engine: Engine, forward: TokenForward) -> None:
    """Checks that an engine which was closed, or has no open request, keeps nothing of any."""
    assert engine._open.choices == {}
    assert engine._open.num == 0
    assert not engine._planner.scheduler.running
    assert not engine._planner.scheduler.waiting
    assert engine._planner.unasked == []
    assert not engine._planner.masks._waiting
    assert not engine._planner.masks._answers
    assert not engine._planner.speculator.acceptance._requests
    assert not engine._planner.speculator._drafter._indexes
    assert forward.blocks.num_free == forward.blocks.num_blocks
    forward.blocks.check_integrity([])
