"""Turns the token deltas of a request into text as they come, and ends a choice at its stop
strings. A thread or an event loop of the caller reads it, never the engine's.

There is neither torch nor transformers here or below: a server that only talks to an engine has
none, and every Python that the project names can run its tests.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dflash_moe.engine.request import STOP, TokenDelta
from dflash_moe.errors import DflashError
from dflash_moe.integrations.generation import TextStream

if TYPE_CHECKING:
    from dflash_moe.engine.delivery import TokenStream
    from dflash_moe.engine.sampling.sampling_params import SamplingParams
    from dflash_moe.engine.sampling.token_logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a step added to one choice. `text` is final; text that may belong to a stop string, and
    bytes that are no character yet, come later. `time_s` is when the step ended, in seconds of
    time.monotonic, and `stop_string` the one that has ended the choice. With log-probabilities
    `text_offsets` says how many characters of the choice's text are before each token; a token that
    begins within a character is where that is.
    """

    text: str
    token_ids: tuple[int, ...]
    choice: int = 0
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    time_s: float = field(default=0.0, compare=False)
    stop_string: str | None = None
    text_offsets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished choice. `finish_reason` is "stop" (an end-of-text token, a stop id or a stop
    string, which is `stop_string`), "length" (max_tokens) or "cancelled". `prompt` is its place
    among the prompts.
    `ttft_s` is the time from its submission to its first token, and `tpot_s` the mean time of a
    later one; None where there is no such token. `num_cached_tokens`, `queue_s` and
    `num_preemptions` are those of its last `TokenDelta`. `text_offsets` are as a `Chunk` has them.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt: int = 0
    choice: int = 0
    prompt_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    ttft_s: float | None = field(default=None, compare=False)
    tpot_s: float | None = field(default=None, compare=False)
    num_cached_tokens: int = field(default=0, compare=False)
    queue_s: float = field(default=0.0, compare=False)
    num_preemptions: int = field(default=0, compare=False)
    stop_string: str | None = None
    text_offsets: tuple[int, ...] = field(default=(), compare=False)


class ChoiceText:
    """The text of one choice while it grows, empty without a tokenizer. `is_stopped` is set once a
    stop string was found, and whatever comes later is dropped.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], choice: int) -> None:
        self._stream = TextStream(tokenizer) if tokenizer is not None else None
        self._stops = tuple(stops)
        self._held = ""
        # Characters that the stream has given.
        self._num_given = 0
        self.choice = choice
        self.is_stopped = False
        self._stop_string: str | None = None
        self.parts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.text_offsets: list[int] = []
        self.finish_reason: str | None = None
        self._submitted = time.monotonic()
        # Of the first tokens and of the latest.
        self._first = self._latest = 0.0
        self._num_first = 0
        # The engine's last one, which says what the choice has cost.
        self._end = TokenDelta(choice)

    def push(self, delta: TokenDelta) -> Chunk | None:
        """Takes a delta of this choice and returns what it adds; None where nothing does. Raises
        the error that has ended the choice.
        """
        if delta.finish_reason is not None:
            self._end = delta
        if self.is_stopped:
            return None
        if delta.error is not None:
            self.finish_reason = delta.finish_reason
            raise _copy(delta.error)
        text, taken, offsets = "", 0, list[int]()
        for taken, token in enumerate(delta.token_ids, start=1):  # noqa: B007 - how many it took
            offsets.append(self._num_given)
            if self._stream is not None:
                fresh = self._stream.push(token)
                self._num_given += len(fresh)
                text += self._until_stop(fresh, is_last=False)
            if self.is_stopped:
                break
        if delta.finish_reason is not None and not self.is_stopped and self._stream is not None:
            text += self._until_stop(self._stream.finish(), is_last=True)
        # Tokens behind a stop string are not the choice's, however many a step gave.
        token_ids = delta.token_ids[:taken]
        logprobs = None if delta.logprobs is None else delta.logprobs[:taken]
        self._clock(delta.time_s, taken)
        self.token_ids += token_ids
        if logprobs is None:
            offsets = []
        self.logprobs += logprobs or ()
        self.text_offsets += offsets
        self.finish_reason = STOP if self.is_stopped else delta.finish_reason
        self.parts.append(text)
        return Chunk(
            text, token_ids, self.choice, self.finish_reason, logprobs, delta.time_s, self._stop_string, tuple(offsets)
        )

    def stop(self) -> None:
        """Ends the choice with what it has, as a stop string would."""
        self.is_stopped = True
        self.finish_reason = STOP

    def completion(self, prompt: int, prompt_tokens: int) -> Completion:
        """Returns the finished choice."""
        logprobs = tuple(self.logprobs) or None
        reason = self.finish_reason or "cancelled"
        num_later = len(self.token_ids) - self._num_first
        return Completion(
            "".join(self.parts), tuple(self.token_ids), reason, prompt, self.choice, prompt_tokens, logprobs,
            ttft_s=self._first - self._submitted if self.token_ids else None,
            tpot_s=(self._latest - self._first) / num_later if num_later else None,
            num_cached_tokens=self._end.num_cached_tokens,
            queue_s=self._end.queue_s,
            num_preemptions=self._end.num_preemptions,
            stop_string=self._stop_string,
            text_offsets=tuple(self.text_offsets),
        )  # fmt: skip

    def _clock(self, now: float, num_tokens: int) -> None:
        if num_tokens:
            if not self.token_ids:
                self._first, self._num_first = now, num_tokens
            self._latest = now

    def _until_stop(self, fresh: str, *, is_last: bool) -> str:
        """Returns the text that is certain: what is before a stop string, and without one what
        cannot be the beginning of one.
        """
        text = self._held + fresh
        # The one that is whole first, as if characters came one by one.
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            _, at, self._stop_string = min(found)
            return text[:at]
        held = 0 if is_last else max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` with which `stop` begins."""
    tail = text[max(0, len(text) - len(stop) + 1) :]
    at = tail.find(stop[0])
    while at >= 0:
        if stop.startswith(tail[at:]):
            return len(tail) - at
        at = tail.find(stop[0], at + 1)
    return 0


def _copy(error: DflashError) -> DflashError:
    # One error may end many requests, and each raises one of its own: a traceback belongs to one.
    return error.reworded(str(error))


class RequestText:
    """The choices of one submission. One thread or task reads it."""

    def __init__(self, stream: TokenStream, tokenizer: Any, params: SamplingParams) -> None:
        """Without a `tokenizer` its chunks have tokens and no text."""
        self.stream = stream
        self.choices = [ChoiceText(tokenizer, params.stop, choice) for choice in range(params.n)]
        self._num_open = params.n

    def chunks(self, deltas: Sequence[TokenDelta]) -> Iterator[Chunk]:
        """Yields the chunks of deltas. A choice that has met its stop string is cancelled. Raises
        the error that has ended a choice.
        """
        for delta in deltas:
            self._num_open -= delta.finish_reason is not None
            choice = self.choices[delta.choice]
            chunk = choice.push(delta)
            if chunk is not None:
                if choice.is_stopped and delta.finish_reason is None:
                    self.stream.cancel(delta.choice)
                yield chunk

    def read(self) -> Generator[Chunk, None, None]:
        """Yields chunks as they come. Leaving it cancels the request."""
        try:
            while deltas := self.stream.take():
                yield from self.chunks(deltas)
        finally:
            self.stream.cancel()

    async def aread(self) -> AsyncGenerator[Chunk, None]:
        """As `read`, for an event loop."""
        try:
            while deltas := await self.stream.atake():
                for chunk in self.chunks(deltas):
                    yield chunk
        finally:
            self.stream.cancel()

    @property
    def has_ended(self) -> bool:
        """Whether the engine has ended each choice, and its last tokens were read."""
        return self._num_open == 0

    def completions(self, prompt: int, prompt_tokens: int) -> list[Completion]:
        """Returns the finished choices."""
        return [choice.completion(prompt, prompt_tokens) for choice in self.choices]
