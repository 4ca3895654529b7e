"""What an engine answers to one HTTP request: the tokens of its prompts as they come, made into
text, in an order that readers can follow.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dflash_moe.engine.request import CANCELLED, ERROR, TokenDelta
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.engine.text import ChoiceText, Chunk
from dflash_moe.errors import DflashError
from dflash_moe.server.front import api_error
from dflash_moe.server.front.api_error import ApiError

log = logging.getLogger(__name__)

# A reader that is so many deltas of each choice behind is too slow, and its request is cancelled.
# That is some minutes of tokens, and eight megabytes where each has twenty log-probabilities.
MAX_BEHIND = 4096

# Takes chunks, each with the place of its choice, and says whether it has.
Sink = Callable[[Sequence[tuple[int, Chunk]]], bool]


class Engine(Protocol):
    """What an answer needs of the engine process."""

    def submit(
        self, answer: Answer, place: int, token_ids: Sequence[int], params: SamplingParams, salt: bytes, grammar: str
    ) -> int:
        """Sends a prompt, and returns the number by which it is cancelled."""
        ...

    def cancel(self, request_id: int, choice: int | None = None) -> None:
        """Cancels a request or a choice of it."""
        ...

    def forget(self, request_id: int) -> None:
        """Drops what still comes of a request."""
        ...


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that were read, those of them that a cache had, and those that were written; and how
    long the choice that waited longest was in the engine's queue.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_s: float = 0.0
    # Those of the written ones that are thoughts; None where nobody looks for them.
    thought_tokens: int | None = None

    def with_thoughts(self, num_tokens: int) -> Usage:
        """Returns it with so many tokens of thoughts."""
        return dataclasses.replace(self, thought_tokens=num_tokens)

    def fields(self) -> dict[str, Any]:
        """Returns it as OpenAI's API has it, and the time in seconds under the name of Groq's."""
        thoughts = {} if self.thought_tokens is None else {"reasoning_tokens": self.thought_tokens}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **({"completion_tokens_details": thoughts} if thoughts else {}),
            "queue_time": round(self.queue_s, 6),
        }


class Answer:
    """The choices of one or several prompts. One task reads it, in the event loop of the link.

    A choice's place among all of the request is that of its prompt times n, plus its own.
    """

    def __init__(
        self, engine: Engine, tokenizer: Any, prompts: Sequence[Sequence[int]], params: SamplingParams, *, salt: bytes = b"",
        rooms: Sequence[int] = (), grammar: str = "",
    ) -> None:  # fmt: skip
        """Submits the prompts. `rooms` are the most tokens of each one's choices, where `params`
        do not say it for all. Answers keep to a `grammar` that is not empty.
        """
        self._engine = engine
        self._prompts = prompts
        self._n = params.n
        self._loop = asyncio.get_running_loop()
        # What a task that waits has not been woken for is given to this first, if it takes it.
        self.sink: Sink | None = None
        self._chunks: list[tuple[int, Chunk]] = []
        self._waiting: asyncio.Future[bool] | None = None
        self._waits_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._error: ApiError | None = None
        self._num_open = len(prompts) * params.n
        self._cached = [0] * len(prompts)
        self._queue_s = 0.0
        # When the first token has come, of time.monotonic().
        self.first_token_s: float | None = None
        self.texts = [ChoiceText(tokenizer, params.stop, choice) for _ in prompts for choice in range(params.n)]
        self._ids: list[int] = []
        self._is_cancelled = False
        try:
            for place, token_ids in enumerate(prompts):
                own = dataclasses.replace(params, max_tokens=rooms[place]) if rooms else params
                self._ids.append(engine.submit(self, place, token_ids, own, salt, grammar))
        except BaseException:
            self.close()
            raise

    @property
    def has_ended(self) -> bool:
        """Whether the engine has ended all choices, and what came of them was taken."""
        return self._num_open == 0 and not self._chunks and self._error is None

    @property
    def has_all(self) -> bool:
        """Whether nothing more comes of the engine; a task may still have to write it."""
        return self._num_open == 0

    @property
    def usage(self) -> Usage:
        """The tokens so far; cached ones and the time are known of choices that have ended."""
        written = sum(len(text.token_ids) for text in self.texts)
        return Usage(sum(map(len, self._prompts)), sum(self._cached), written, self._queue_s)

    def put(self, place: int, delta: TokenDelta, error: ApiError | None = None) -> None:
        """Makes text of what a step gave of a prompt; with an `error`, that has ended the choice.
        The link calls it, and `arrived` behind all of a step.
        """
        if self._error is not None:
            return
        if self.first_token_s is None and delta.token_ids:
            self.first_token_s = time.monotonic()
        try:
            chunk = self._chunk(place, delta, error)
        except ApiError as found:
            self.fail(found)
            return
        except Exception as found:
            # The link and all other answers go on.
            log.exception("tokens cannot be made into text")
            self.fail(ApiError(500, f"the server has failed: {type(found).__name__}", code="internal"))
            return
        if chunk is not None:
            self._chunks.append((place * self._n + delta.choice, chunk))
        most = MAX_BEHIND * len(self.texts)
        if len(self._chunks) > most:
            self.fail(ApiError(408, f"the reader is over {most} tokens behind; the request was cancelled", code="slow"))

    def fail(self, error: ApiError) -> None:
        """Ends everything with an error, which comes behind what is there already. The engine is
        told at once: a reader that is behind may not be back for long.
        """
        self._error = self._error or error
        self._cancel()
        self._wake(True)

    def arrived(self) -> None:
        """Hands what was put to the sink, or wakes who waits for it."""
        if self._waiting is None or self._waiting.done():
            return
        if self.sink is None or not self._chunks or not self._sunk(self.sink):
            self._wake(True)
            return
        self._waits_since = self._loop.time()
        if self._num_open == 0:
            self._wake(True)

    def _sunk(self, sink: Sink) -> bool:
        try:
            if not sink(self._chunks):
                return False
        except Exception as error:
            log.exception("an answer cannot be written")
            self.fail(ApiError(500, f"the server has failed: {type(error).__name__}", code="internal"))
        self._chunks = []
        return True

    def _wake(self, has_come: bool) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(has_come)

    async def take(self, timeout_s: float | None = None) -> list[tuple[int, Chunk]] | None:
        """Waits for chunks and returns those that have come, each with the place of its choice; it
        may be empty where nothing is certain yet, or the sink has had them. None where nothing came
        within `timeout_s`. Raises ApiError for what has ended the request.
        """
        if not self._chunks and self._error is None and not self.has_ended and not await self._arrived(timeout_s):
            return None
        found, self._chunks = self._chunks, []
        if self._error is not None and not found:
            raise self._error
        return found

    async def _arrived(self, timeout_s: float | None) -> bool:
        # A timer for each token would cost more than the token: one stays until its time, and looks
        # how long nothing has come by then.
        if timeout_s is not None and self._timer is None:
            self._timer = self._loop.call_later(timeout_s, self._look, timeout_s)
        self._waiting = self._loop.create_future()
        self._waits_since = self._loop.time()
        try:
            return await self._waiting
        finally:
            self._waiting = None

    def _look(self, timeout_s: float) -> None:
        self._timer = None
        if self._waiting is None or self._waiting.done():
            return
        left = self._waits_since + timeout_s - self._loop.time()
        if left <= 0:
            self._wake(False)
        else:
            self._timer = self._loop.call_later(left, self._look, timeout_s)

    def _chunk(self, place: int, delta: TokenDelta, error: ApiError | None) -> Chunk | None:
        text = self.texts[place * self._n + delta.choice]
        if delta.finish_reason is not None:
            self._num_open -= 1
            # Choices share a prompt, and the first one has found what was cached.
            self._cached[place] = max(self._cached[place], delta.num_cached_tokens)
            self._queue_s = max(self._queue_s, delta.queue_s)
            # What the engine meets behind a stop string is nothing to the answer.
            if delta.finish_reason in (CANCELLED, ERROR) and not text.is_stopped:
                raise error or ApiError(503, "the request was cancelled before it had ended", code=CANCELLED)
        try:
            chunk = text.push(delta)
        except DflashError as found:
            raise api_error.from_error(found) from None
        if text.is_stopped and delta.finish_reason is None and chunk is not None:
            self._engine.cancel(self._ids[place], delta.choice)
        return chunk

    def end(self, place: int) -> None:
        """Ends a choice where a stop string would: what the engine still gives of it is dropped."""
        text = self.texts[place]
        if not text.is_stopped:
            text.stop()
            self._engine.cancel(self._ids[place // self._n], place % self._n)

    def close(self) -> None:
        """Cancels what has not ended. It may be called twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._cancel()
        for request_id in self._ids:
            self._engine.forget(request_id)
        self._ids = []

    def _cancel(self) -> None:
        if self._num_open and not self._is_cancelled:
            self._is_cancelled = True
            for request_id in self._ids:
                self._engine.cancel(request_id)
