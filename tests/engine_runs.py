"""Requests through an engine whose every row of logits is recorded, and the same requests alone
through the plain loop, to be compared bit by bit.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any
from unittest.mock import patch

import torch

from dflash_moe import SamplingParams
from dflash_moe.engine import step_run
from dflash_moe.engine.delivery import TokenStream
from dflash_moe.engine.engine import Engine
from dflash_moe.engine.engine_settings import EngineSettings
from dflash_moe.engine.sampling.sample import Sampled, Sampler, SampleRow
from dflash_moe.engine.sampling.sampling_state import SamplingState
from dflash_moe.engine.sampling.token_logprobs import TokenLogprobs
from dflash_moe.engine.sampling.token_masks import packed
from dflash_moe.engine.schedule import StepPlan
from dflash_moe.forward.blocks import BlockPool
from dflash_moe.forward.forward import Forward, StepRows
from dflash_moe.forward.host_model import HostModel
from tests.host_models import prompt

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "phimoe", "qwen2_moe", "granitemoe")
CASES = [(arch, dtype) for arch in FAMILIES for dtype in ("f32", "bf16")]
# A stream that has no token for so long has lost its engine.
TIMEOUT_S = 60.0
# Every way to choose a token, with the seed of the request beside it.
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "logprobs": 3},
    {"temperature": 1.3, "top_p": 0.8, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.4, "presence_penalty": 0.3, "logprobs": 0},
    {"temperature": 1.0, "min_p": 0.02, "logit_bias": {3: 4.0, 200: 3.5}},
    {"temperature": 0.0, "stop_token_ids": tuple(range(0, 256, 7))},
)
_LENGTHS = (1, 2, 15, 16, 17, 31, 33, 48, 60)


@dataclass(frozen=True)
class Asked:
    """A prompt and what is asked of it. Its seed is its own, so that a row tells whose it is."""

    prompt: tuple[int, ...]
    params: SamplingParams


def asked(number: int, length: int | None = None, **options: Any) -> Asked:
    """Returns request `number`, a random one, but for what is given."""
    chance = random.Random(number)
    length = length or chance.choice(_LENGTHS)
    chosen = {"max_tokens": chance.randint(1, 14), "seed": 1000 + number, **WAYS[number % len(WAYS)], **options}
    return Asked(tuple(prompt(length, seed=number)), SamplingParams(**chosen))


@dataclass
class Answer:
    """What a choice got. `digests` has one of the logits of each token, for a choice alone."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    digests: list[bytes] = field(default_factory=list)


def digest(logits: torch.Tensor) -> bytes:
    return blake2b(logits.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16).digest()


class Alone:
    """The answers of the plain loop, each computed once: one sequence at a time, a whole prompt and
    then a token a step.
    """

    def __init__(self, host: HostModel) -> None:
        self.host = host
        self._found: dict[tuple[tuple[int, ...], str, int], Answer] = {}

    def answer(self, one: Asked, choice: int = 0) -> Answer:
        """Returns what a choice gets alone."""
        key = (one.prompt, repr(one.params), choice)
        if key not in self._found:
            with in_micro_batches(self.host, "1"):
                self._found[key] = self._compute(one, choice)
        return self._found[key]

    def _compute(self, one: Asked, choice: int) -> Answer:
        params, tokens, sampler = one.params, list(one.prompt), Sampler()
        assert params.seed is not None
        state = SamplingState(params, seed=params.seed, choice=choice, prompt_ids=one.prompt)
        answer, step = Answer(finish_reason="length"), list(one.prompt)
        with closing(self.host.sequence(len(tokens) + params.max_tokens)) as run:
            while len(answer.tokens) < params.max_tokens:
                logits = run.forward(step)[None].float()
                mask = None if params.token_mask is None else packed(torch.as_tensor(params.token_mask(answer.tokens)))
                sampled = sampler.launch(logits, [SampleRow(state, len(tokens), (), mask)])
                step = sampled.token_ids()
                tokens += step
                answer.tokens += step
                answer.logprobs += sampled.logprobs.values()
                answer.digests.append(digest(logits[0]))
                state.advance(step)
                if step[0] in params.stop_token_ids:
                    answer.finish_reason = "stop"
                    break
        return answer


@contextmanager
def in_micro_batches(host: HostModel, asked: str | None) -> Iterator[None]:
    """Has a host compute its steps in "1" or "2" micro-batches within the block."""
    micro_batches = None if host.packed is None or asked is None else host.packed.micro_batches
    kept = None if micro_batches is None else micro_batches.asked
    try:
        if micro_batches is not None:
            micro_batches.asked = asked
        yield
    finally:
        if micro_batches is not None:
            micro_batches.asked = kept


class _Recorder(Sampler):
    """A sampler that keeps a digest of each row by seed, choice and position, with the drafts that
    the row assumes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[tuple[int, int, int], list[tuple[tuple[int, ...], bytes]]] = defaultdict(list)
        self.num_chosen = 0

    def begin(self, begin: Callable[[StepPlan], Any], forward: Any) -> Callable[[StepPlan], Any]:
        """Returns `StepRuns.begin` with a record of steps whose tokens the core chooses, of which
        the sampler sees nothing.
        """

        @contextmanager
        def recorded(plan: StepPlan) -> Iterator[Any]:
            with begin(plan) as step:
                yield step
                if step._chosen is None:
                    return
                self.num_chosen += 1
                for values, pick in zip(forward.loop._logits, step._picks, strict=False):
                    state = pick.request.sampling
                    key = (state.seed, state.choice, len(pick.request.tokens) + len(pick.before))
                    self.rows[key].append((tuple(pick.before), digest(values)))

        return recorded

    def launch(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> Sampled:
        for values, row in zip(logits, rows, strict=True):
            key = (row.state.seed, row.state.choice, row.position)
            self.rows[key].append((tuple(row.tokens_before), digest(values)))
        return super().launch(logits, rows)


class _Watched:
    """A forward pass that says when a step begins, and counts what it is made of."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.before_step: Callable[[], None] = lambda: None
        # The numbers of tokens of each step's sequences.
        self.steps: list[list[int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)

    def begin(self, rows: Sequence[StepRows]) -> Any:
        self.before_step()
        self.steps.append([len(entry.token_ids) for entry in rows])
        return self._forward.begin(rows)


Script = Callable[["EngineRun"], None]


class EngineRun:
    """An engine and what was asked of it. The books of blocks are checked in every step; `script`
    is called on the engine's thread in each, so that what it submits and cancels is there for the
    next one whatever the machine's speed.
    """

    def __init__(self, forward: Forward, settings: dict[str, Any], script: Script) -> None:
        self.recorder = _Recorder()
        self.watched = _Watched(forward)
        with patch.object(step_run, "Sampler", lambda: self.recorder):
            self.engine = Engine(self.watched, EngineSettings(**settings))
        steps = self.engine._steps
        steps.begin = self.recorder.begin(steps.begin, forward)  # type: ignore[method-assign]
        self.submitted: list[tuple[Asked, TokenStream]] = []
        # What has come so far, of each request that was submitted.
        self._answers: dict[int, list[Answer]] = {}
        self.cancelled: set[tuple[int, int | None]] = set()

        def before_step() -> None:
            self.engine._planner.check_blocks()
            script(self)

        self.watched.before_step = before_step

    @property
    def num_steps(self) -> int:
        """The number of steps so far, the one under way excluded."""
        return len(self.watched.steps)

    def submit(self, one: Asked) -> TokenStream:
        """Submits a request whose answer `collect` waits for."""
        stream = self.engine.submit(one.prompt, one.params)
        self.submitted.append((one, stream))
        return stream

    def submit_all(self, wanted: Sequence[Asked]) -> None:
        """Submits requests so that the same step sees all of them."""
        self.engine._between_steps(lambda: [self.submit(one) for one in wanted] and None, TIMEOUT_S)

    def cancel(self, stream: TokenStream, choice: int | None = None) -> None:
        """Cancels a request, or a choice of it."""
        self.cancelled.add((stream.request_id, choice))
        stream.cancel(choice)

    def is_cancelled(self, stream: TokenStream, choice: int) -> bool:
        return bool({(stream.request_id, None), (stream.request_id, choice)} & self.cancelled)

    def collect(self) -> list[tuple[Asked, TokenStream, list[Answer]]]:
        """Waits for all that was submitted, also meanwhile, and returns the answers by choice."""
        for one, stream in self.submitted:
            answers = self._answers.setdefault(stream.request_id, [Answer() for _ in range(one.params.n)])
            while deltas := stream.take(TIMEOUT_S):
                for delta in deltas:
                    if delta.error is not None:
                        raise delta.error
                    answers[delta.choice].tokens += delta.token_ids
                    answers[delta.choice].logprobs += delta.logprobs or ()
                    answers[delta.choice].finish_reason = delta.finish_reason
        return [(one, stream, self._answers[stream.request_id]) for one, stream in self.submitted]

    def assert_exact(self, alone: Alone) -> dict[str, Any]:
        """Demands that every choice got the tokens that it gets alone, from logits of the same
        bits, and log-probabilities too; one that was cancelled got the first of them. Returns the
        engine's statistics.
        """
        for one, stream, answers in self.collect():
            for choice, answer in enumerate(answers):
                self._assert_same(one, choice, answer, alone.answer(one, choice), self.is_cancelled(stream, choice))
        self.engine.check_integrity()
        stats = self.engine.stats()
        assert stats["failed_steps"] == stats["running"] == stats["waiting"] == 0
        assert stats["blocks"]["free"] == stats["blocks"]["total"]
        return stats

    def _assert_same(self, one: Asked, choice: int, found: Answer, expected: Answer, may_be_cut: bool) -> None:
        name = f"seed {one.params.seed} choice {choice}"
        count = len(found.tokens) if may_be_cut and found.finish_reason == "cancelled" else len(expected.tokens)
        assert found.tokens == expected.tokens[:count], name
        assert found.logprobs == expected.logprobs[: count if expected.logprobs else 0], name
        assert found.finish_reason == (expected.finish_reason if count == len(expected.tokens) else "cancelled") or may_be_cut
        first, before = len(one.prompt), [*one.prompt, *expected.tokens]
        for place in range(len(expected.tokens)):
            position = first + place
            rows = self.recorder.rows.get((one.params.seed, choice, position), [])
            # A row behind a draft that was wrong is of another text.
            right = [found for drafts, found in rows if list(drafts) == before[position - len(drafts) : position]]
            assert right or place >= count, f"{name}: no logits of position {position}"
            assert set(right) <= {expected.digests[place]}, f"{name}: position {position} of {first} + {place} has other bits"


@contextmanager
def engine_run(
    host: HostModel, script: Script = lambda _run: None, *, num_blocks: int | None = None, forward: Forward | None = None,
    micro_batches: str | None = None, **settings: Any,
) -> Iterator[EngineRun]:  # fmt: skip
    """Opens an engine over a host, or over `forward`, with `num_blocks` blocks and in so many
    `micro_batches` where these are given. The host is as before afterwards.
    """
    if forward is None:
        assert host.packed is not None
        forward = host.packed
    kept = forward.blocks
    forward.blocks = BlockPool(num_blocks or kept.num_blocks, kept.block_tokens)
    run = EngineRun(forward, settings, script)
    try:
        with in_micro_batches(host, micro_batches), run.engine:
            yield run
    finally:
        forward.blocks = kept


def come_and_go(seed: int, companions: Sequence[Asked], *, cancels: float = 0.2, at_once: int = 3) -> Script:
    """Returns a script that submits companions at random steps, up to `at_once` in one, and cancels
    some of them, or of their choices, at others.
    """
    chance, left = random.Random(seed), list(companions)
    streams: list[tuple[Asked, TokenStream]] = []

    def script(run: EngineRun) -> None:
        for _ in range(min(len(left), chance.randint(0, at_once))):
            one = left.pop()
            streams.append((one, run.submit(one)))
        # The engine's thread alone counts choices that have ended.
        still = [(one, stream) for one, stream in streams if stream._num_open]
        if still and chance.random() < cancels:
            one, stream = chance.choice(still)
            run.cancel(stream, chance.choice((None, *range(one.params.n))))

    return script
