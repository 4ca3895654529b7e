"""The prompts of one `LLM.generate`: as many run as the queue takes, all are read as their tokens
come, and their outcomes are given in the order of the prompts.

There is no torch here, so that every Python that the project names can run its tests.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from dflash_moe.engine.delivery import StreamGroup
from dflash_moe.errors import DflashError, QueueFull

if TYPE_CHECKING:
    from dflash_moe.engine.delivery import TokenStream
    from dflash_moe.engine.request import TokenDelta
    from dflash_moe.engine.text import Chunk, Completion, RequestText


class PromptRun:
    """One prompt and what came of it."""

    def __init__(self, place: int, num_tokens: int, submit: Callable[[], RequestText]) -> None:
        """`place` is that among the prompts; `submit` starts the request."""
        self.place = place
        self._num_tokens = num_tokens
        self._submit = submit
        self.text: RequestText | None = None
        self.error: DflashError | None = None

    def begin(self) -> bool:
        """Submits the prompt, and returns whether the queue had room for it. What else refuses it
        is its outcome.
        """
        self.error = None
        try:
            self.text = self._submit()
        except DflashError as error:
            self.error = error
        return not isinstance(self.error, QueueFull)

    @property
    def has_ended(self) -> bool:
        """Whether its outcome is known."""
        return self.error is not None or (self.text is not None and self.text.has_ended)

    def outcome(self) -> list[Completion] | DflashError:
        """Returns the finished choices, or the error that ended it."""
        if self.error is not None:
            return self.error
        assert self.text is not None
        return self.text.completions(self.place, self._num_tokens)

    def push(self, deltas: Sequence[TokenDelta]) -> Iterator[Chunk]:
        """Yields the chunks of deltas. An error that they bring is the outcome; none is raised."""
        assert self.text is not None
        chunks = self.text.chunks(deltas)
        while True:
            try:
                chunk = next(chunks, None)
            except DflashError as error:
                self.fail(error)
                return
            if chunk is None:
                return
            yield chunk

    def fail(self, error: DflashError) -> None:
        """Ends it with an error."""
        self.error = error
        self.cancel()

    def cancel(self) -> None:
        """Ends what has not ended."""
        if self.text is not None:
            self.text.stream.cancel()


class PromptRuns:
    """The prompts of one call. The thread that made it uses it."""

    def __init__(self, runs: Sequence[PromptRun], on_chunk: Callable[[int, Chunk], None] | None) -> None:
        self._waiting = deque(runs)
        # In the order of the prompts, those whose outcome was not given yet.
        self._begun: deque[PromptRun] = deque()
        self._reading: dict[TokenStream, PromptRun] = {}
        self._group = StreamGroup()
        self._on_chunk = on_chunk

    def outcomes(self) -> Iterator[list[Completion] | DflashError]:
        """Yields the outcome of each prompt. Leaving it cancels what has not ended, and so does
        whatever `on_chunk` raises, which passes through.
        """
        try:
            while self._waiting or self._begun:
                self._begin()
                while self._begun and not self._begun[0].has_ended:
                    if self._read():
                        self._begin()
                # Where none was taken, others fill the queue: the first prompt's outcome says so.
                yield (self._begun or self._waiting)[0].outcome()
                (self._begun or self._waiting).popleft()
        finally:
            for run in (*self._begun, *self._waiting):
                run.cancel()

    def _begin(self) -> None:
        while self._waiting and self._waiting[0].begin():
            run = self._waiting[0]
            # In this order, so that an interrupt between the two leaves it in one of them.
            self._begun.append(run)
            self._waiting.popleft()
            if run.text is not None and not run.has_ended:
                self._reading[run.text.stream] = run
                self._group.add(run.text.stream)

    def _read(self) -> bool:
        """Waits for tokens of any prompt and takes them. Returns whether one has ended."""
        arrived = self._group.take()
        if not arrived:
            self._lose()
            return True
        has_room = False
        for stream, deltas in arrived:
            run = self._reading.get(stream)
            if run is None:
                continue
            for chunk in run.push(deltas):
                if self._on_chunk is not None:
                    self._on_chunk(run.place, chunk)
            if run.has_ended:
                del self._reading[stream]
                has_room = True
        return has_room

    def _lose(self) -> None:
        """Ends all prompts with their errors where the engine thread is gone."""
        for stream, run in self._reading.items():
            try:
                stream.take(0.0)
            except DflashError as error:
                run.fail(error)
        self._reading.clear()
