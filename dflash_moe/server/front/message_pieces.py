"""What the text of an answer says: visible text, thoughts and calls of tools, as they come.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from dflash_moe.engine.request import STOP
from dflash_moe.engine.text import Chunk

# Why a choice has ended whose message calls tools.
TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A part of a tool call: `index` among the calls of a message; `call_id` and `name` on the
    first part of each, empty after. `arguments` is a piece of the JSON text of the arguments; their
    concatenation is the whole. `is_broken` ends a call that has turned out to be none: its whole
    text is in `content` of the same piece.
    """

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    is_broken: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """What a chunk of an answer's text says: thought, visible text and parts of calls, which stand
    in this order in a message.
    """

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPiece, ...] = ()


class MessageReader(Protocol):
    """Reads one choice's text as it comes. There is one for each choice."""

    def push(self, text: str, *, is_last: bool) -> Piece:
        """Returns what is certain with this text; `is_last` gives out all that was held back."""
        ...

    @property
    def has_called(self) -> bool:
        """Whether a call was completed."""
        ...

    @property
    def is_thinking(self) -> bool:
        """Whether the text is within a thought now."""
        ...


class PlainReader:
    """Takes all text for visible text."""

    has_called = False
    is_thinking = False

    def push(self, text: str, *, is_last: bool) -> Piece:  # noqa: ARG002 - nothing is held back
        """As `MessageReader.push`."""
        return Piece(content=text)


@dataclass(slots=True)
class ToolCall:
    """A whole call of a tool; `arguments` is JSON text."""

    call_id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Message:
    """One choice's message while it grows: what a reader makes of its chunks. `finish_reason` is
    None until it has ended, and `num_thought` counts tokens of thoughts.
    """

    reader: MessageReader
    # Whether the first call ends it, and whether thoughts are given out.
    is_single: bool = False
    has_reasoning: bool = True
    finish_reason: str | None = None
    num_thought: int = 0
    _reasoning: list[str] = field(default_factory=list)
    _content: list[str] = field(default_factory=list)
    _calls: dict[int, tuple[str, str, list[str]]] = field(default_factory=dict)

    def push(self, chunk: Chunk) -> Piece:
        """Takes a chunk and returns what it says, which is nothing once the message has ended."""
        if self.finish_reason is not None:
            return Piece()
        was_thinking = self.reader.is_thinking
        piece = self.reader.push(chunk.text, is_last=chunk.finish_reason is not None)
        if was_thinking or self.reader.is_thinking:
            self.num_thought += len(chunk.token_ids)
        if not self.has_reasoning:
            piece = Piece(content=piece.content, calls=piece.calls)
        self._reasoning.append(piece.reasoning)
        self._content.append(piece.content)
        for part in piece.calls:
            if part.is_broken:
                self._calls.pop(part.index, None)
            else:
                self._calls.setdefault(part.index, (part.call_id, part.name, []))[2].append(part.arguments)
        self.finish_reason = chunk.finish_reason
        if self.reader.has_called and (self.finish_reason == STOP or (self.is_single and self.finish_reason is None)):
            self.finish_reason = TOOL_CALLS
        return piece

    @property
    def reasoning(self) -> str:
        """All of its thoughts."""
        return "".join(self._reasoning)

    @property
    def content(self) -> str:
        """All of its visible text."""
        return "".join(self._content)

    @property
    def calls(self) -> list[ToolCall]:
        """Its calls."""
        return [ToolCall(call_id, name, "".join(parts)) for call_id, name, parts in self._calls.values()]


class Messages:
    """The messages of all choices of an answer, by their places."""

    def __init__(
        self, new_reader: Callable[[], MessageReader] = PlainReader, *, is_single: bool = False, has_reasoning: bool = True
    ) -> None:
        """`is_single` ends a message with its first call; without `has_reasoning` thoughts are left
        out.
        """
        self._has_reasoning = has_reasoning
        self._new_reader = new_reader
        self._is_single = is_single
        self._by_place: dict[int, Message] = {}
        # Ends a choice of the engine. Whoever begins the answer sets it.
        self.end: Callable[[int], None] = lambda _place: None

    def __getitem__(self, place: int) -> Message:
        if place not in self._by_place:
            self._by_place[place] = Message(self._new_reader(), self._is_single, self._has_reasoning)
        return self._by_place[place]

    def push(self, place: int, chunk: Chunk) -> tuple[Piece, str | None]:
        """Returns what a chunk says, and why the message has ended with it, where it has."""
        message = self[place]
        if message.finish_reason is not None:
            return Piece(), None
        piece = message.push(chunk)
        if message.finish_reason is not None and chunk.finish_reason is None:
            self.end(place)
        return piece, message.finish_reason

    @property
    def num_thought(self) -> int:
        """Tokens of thoughts of all choices."""
        return sum(message.num_thought for message in self._by_place.values())
