"""Answers whose message is a list of blocks: thoughts, text, calls. What the replies of Anthropic's
Messages and OpenAI's Responses have in common.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_moe.engine.text import Chunk, Completion
from dflash_moe.server.front.answer import Usage
from dflash_moe.server.front.message_pieces import Messages

THOUGHT, TEXT, CALL = "thought", "text", "call"
# An encoder is made once: a stream has an event for each token.
_json_text = json.JSONEncoder(separators=(",", ":")).encode


def named_event(content: Mapping[str, Any]) -> bytes:
    """Returns an event that is named by its `type`."""
    return f"event: {content['type']}\ndata: {_json_text(content)}\n\n".encode("ascii")


@dataclass(slots=True)
class MessageBlock:
    """A block of a message, at a place of its own. A call has an id and a name. One that is broken
    was none after all, and its text comes again as text.
    """

    kind: str
    place: int
    call_id: str = ""
    name: str = ""
    is_broken: bool = False
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it; of a call the JSON text of its arguments."""
        return "".join(self.parts)


class BlockReply(ABC):
    """Writes one choice. A whole answer is made as a stream is, and its events are dropped, so that
    both say the same.
    """

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._blocks: list[MessageBlock] = []
        self._is_open = False
        self._finish_reason: str | None = None
        self._stop_string: str | None = None

    def chunk(self, place: int, chunk: Chunk) -> bytes:
        """As `Reply.chunk`."""
        piece, reason = self._messages.push(place, chunk)
        found = b""
        if any(call.is_broken for call in piece.calls):
            self._blocks[-1].is_broken = True
            found += self._close()
        for kind, text in ((THOUGHT, piece.reasoning), (TEXT, piece.content)):
            if text:
                if not self._is_open or self._blocks[-1].kind != kind:
                    found += self._open(kind)
                found += self._add(text)
        for call in piece.calls:
            if call.call_id:
                found += self._open(CALL, call.call_id, call.name)
            if call.arguments and not call.is_broken:
                found += self._add(call.arguments)
        if reason is not None:
            self._finish_reason, self._stop_string = reason, chunk.stop_string
            found += self._close()
        return found

    def _open(self, kind: str, call_id: str = "", name: str = "") -> bytes:
        closed = self._close()
        self._blocks.append(MessageBlock(kind, len(self._blocks), call_id, name))
        self._is_open = True
        return closed + self._begun(self._blocks[-1])

    def _add(self, text: str) -> bytes:
        self._blocks[-1].parts.append(text)
        return self._added(self._blocks[-1], text)

    def _close(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        return self._ended(self._blocks[-1])

    def read(self, place: int, chunk: Chunk) -> None:
        """As `Reply.read`."""
        self.chunk(place, chunk)

    def whole(self, _choices: Sequence[Completion], usage: Usage) -> dict[str, Any]:
        """As `Reply.whole`."""
        return self._message(usage.with_thoughts(self._messages.num_thought))

    @property
    def _said(self) -> list[MessageBlock]:
        """The blocks of the message so far."""
        return [block for block in self._blocks if not block.is_broken]

    @abstractmethod
    def _begun(self, block: MessageBlock) -> bytes:
        """Returns the events of a block that begins."""

    @abstractmethod
    def _added(self, block: MessageBlock, text: str) -> bytes:
        """Returns the events of a text that was added to a block."""

    @abstractmethod
    def _ended(self, block: MessageBlock) -> bytes:
        """Returns the events of a block that has ended."""

    @abstractmethod
    def _message(self, usage: Usage) -> dict[str, Any]:
        """Returns the whole answer, once it has ended."""
