"""A running request and the text of its choices, read by a thread or in an event loop.

There is no torch here, so that every Python that the project names can run its tests.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dflash_moe.engine.text import ChoiceText, Chunk, Completion

if TYPE_CHECKING:
    from dflash_moe.engine.delivery import TokenStream
    from dflash_moe.engine.request import TokenDelta
    from dflash_moe.engine.sampling.sampling_params import SamplingParams


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
