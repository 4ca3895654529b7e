"""A request as the engine knows it: one sequence of tokens that is to grow, and what was asked of
it. A submission of several choices is as many requests, which share their prompt.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dflash_moe.errors import DflashError

if TYPE_CHECKING:
    from dflash_moe.engine.sampling.sampling_params import SamplingParams
    from dflash_moe.engine.sampling.sampling_state import SamplingState
    from dflash_moe.engine.sampling.token_logprobs import TokenLogprobs
    from dflash_moe.forward.block_hashes import BlockHashes
    from dflash_moe.forward.forward import TokenSequence

# Why a choice has ended.
STOP = "stop"  # a token at which the model, or the request, ends
LENGTH = "length"  # max_tokens
CANCELLED = "cancelled"
ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What a step added to one choice of a submission: tokens, and the reason where it has ended.
    `error` is set where that is "error". `time_s` is when the step was committed, in seconds of
    time.monotonic, however late its caller takes it.

    The last one of a choice also says what it has cost: `num_cached_tokens` of its prompt were
    found in the prefix cache when it first ran, it waited `queue_s` seconds until then, and gave
    up its blocks `num_preemptions` times. What company changes is not compared.
    """

    choice: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    error: DflashError | None = None
    time_s: float = field(default_factory=time.monotonic, compare=False)
    num_cached_tokens: int = field(default=0, compare=False)
    queue_s: float = field(default=0.0, compare=False)
    num_preemptions: int = field(default=0, compare=False)


@dataclass(slots=True)
class RequestTimes:
    """When a request was submitted, first scheduled, and had its first and its latest token, in
    seconds of time.monotonic; 0 where that has not been yet.
    """

    submitted: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    latest_token: float = 0.0


@dataclass(slots=True, eq=False)
class Request:
    """One choice of a submission. The engine thread alone changes it.

    `tokens` are the prompt and what was generated; keys and values of the first `num_computed` of
    them are stored. Whatever a step computed for an `epoch` that has passed is dropped: the epoch
    ends with a preemption and with the request.
    """

    request_id: int
    choice: int
    # Older requests have smaller numbers; the youngest is preempted first.
    order: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    sampling: SamplingState
    hashes: BlockHashes
    # Where its tokens go: a TokenStream or an Outbox of delivery.py.
    sink: Any
    stop_token_ids: frozenset[int] = frozenset()
    epoch: int = 0
    sequence: TokenSequence | None = None
    # Choices of the same prompt that begin where this one's prompt is computed.
    followers: list[Request] = field(default_factory=list)
    finish_reason: str | None = None
    times: RequestTimes = field(default_factory=RequestTimes)
    # As TokenDelta has it. Choices that begin where one prompt was computed have the same number.
    num_cached_tokens: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """What it is known by: no other request of the engine has the same."""
        return self.request_id, self.choice

    @property
    def max_length(self) -> int:
        """The tokens that it may reach, its prompt included."""
        return self.num_prompt + self.params.max_tokens

    @property
    def num_computed(self) -> int:
        """The number of tokens whose keys and values are stored."""
        return 0 if self.sequence is None else self.sequence.num_tokens

    @property
    def num_generated(self) -> int:
        """The number of tokens behind the prompt."""
        return len(self.tokens) - self.num_prompt

    def end(self, token_ids: tuple[int, ...], logprobs: Any, reason: str, error: DflashError | None, now: float) -> TokenDelta:
        """Returns its last delta, for the moment `now` at which it ends. An open request has begun
        an epoch with each preemption.
        """
        waited = (self.times.scheduled or now) - self.times.submitted
        return TokenDelta(self.choice, token_ids, logprobs, reason, error, now, self.num_cached_tokens, waited, self.epoch)

    @property
    def name(self) -> str:
        """How messages name it."""
        return f"request {self.request_id}" + (f" choice {self.choice}" if self.params.n > 1 else "")

    def extend_hashes(self) -> None:
        """Brings `hashes` up to all tokens that it has."""
        self.hashes.extend(self.tokens[self.hashes.num_tokens :])
