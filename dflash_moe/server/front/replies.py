"""Answers in the shapes of OpenAI's two APIs, whole and in parts.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as json_text
from typing import Any, Protocol

from dflash_moe.engine.text import Chunk, Completion
from dflash_moe.server.front import token_logprobs
from dflash_moe.server.front.answer import Usage
from dflash_moe.server.front.api_error import ApiError
from dflash_moe.server.front.message_pieces import CallPiece, Message, Messages
from dflash_moe.server.front.tokens import FrontTokenizer

COMMENT = b": waiting\n\n"
_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Heading:
    """What stands in each part of an answer."""

    prefix: str
    model: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))
    name: str = field(default_factory=lambda: secrets.token_hex(12))

    def fields(self, kind: str) -> dict[str, Any]:
        """Returns its fields for an object of this kind."""
        return {
            "id": f"{self.prefix}-{self.name}", "object": kind, "created": self.created, "model": self.model,
            "system_fingerprint": self.fingerprint,
        }  # fmt: skip


class Reply(Protocol):
    """One API's way of writing an answer."""

    # Is sent while nothing comes.
    silence: bytes

    def first(self, usage: Usage) -> bytes:
        """Returns the events before all others, at the time of the first one."""
        ...

    def chunk(self, place: int, chunk: Chunk) -> bytes:
        """Returns the events of a choice's chunk."""
        ...

    def last(self, usage: Usage) -> bytes:
        """Returns the events behind all chunks."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """Returns the events that end a stream which has begun, instead of `last`."""
        ...

    def read(self, place: int, chunk: Chunk) -> None:
        """Takes a choice's chunk of an answer that is not streamed."""
        ...

    def whole(self, choices: Sequence[Completion], usage: Usage) -> dict[str, Any]:
        """Returns the body of an answer that is not streamed, all of whose chunks were read."""
        ...


class _Parts:
    """Events whose beginning is the same for all chunks of an answer."""

    def __init__(self, heading: Heading, kind: str, *, has_usage: bool) -> None:
        self._fields = heading.fields(kind)
        self._has_usage = has_usage
        self._begin = b"data: " + json.dumps(self._fields, separators=(",", ":"))[:-1].encode() + b',"choices":['
        # OpenAI's clients are told of usage in each event where they asked for it.
        self._end = b'],"usage":null}\n\n' if has_usage else b"]}\n\n"

    def event(self, place: int, named: str, content: str, *, logprobs: Any = None, reason: str | None = None) -> bytes:
        """Returns the event of a choice, which has `content`, that is JSON, under a name. It is put
        together by hand, because a server writes nothing as often.
        """
        listed = "null" if logprobs is None else json.dumps(logprobs, separators=(",", ":"))
        ended = "null" if reason is None else f'"{reason}"'
        text = f'{{"index":{place},"{named}":{content},"logprobs":{listed},"finish_reason":{ended}}}'
        return self._begin + text.encode("ascii") + self._end

    def last(self, usage: Usage) -> bytes:
        text = _event({**self._fields, "choices": [], "usage": usage.fields()}) if self._has_usage else b""
        return text + _DONE


def _event(content: Any) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


class _ChoicesReply:
    """What streams of both APIs have in common."""

    silence = COMMENT
    _parts: _Parts

    def first(self, _usage: Usage) -> bytes:
        """As `Reply.first`."""
        return b""

    def last(self, usage: Usage) -> bytes:
        """As `Reply.last`."""
        return self._parts.last(usage)

    def failure(self, error: ApiError) -> bytes:
        """As `Reply.failure`."""
        return _event(error.body()) + _DONE


class ChatReply(_ChoicesReply):
    """Writes the answers to a conversation."""

    def __init__(
        self, heading: Heading, tokenizer: FrontTokenizer, messages: Messages, *, has_logprobs: bool, has_usage: bool
    ) -> None:
        self._heading = heading
        self._tokenizer = tokenizer
        self._messages = messages
        self._has_logprobs = has_logprobs
        self._parts = _Parts(heading, "chat.completion.chunk", has_usage=has_usage)
        self._begun: set[int] = set()

    def chunk(self, place: int, chunk: Chunk) -> bytes:
        """As `Reply.chunk`."""
        text = b""
        if place not in self._begun:
            self._begun.add(place)
            text += self._parts.event(place, "delta", '{"role":"assistant","content":""}')
        piece, reason = self._messages.push(place, chunk)
        logprobs = self._logprobs(chunk.logprobs) if chunk.logprobs else None
        if piece.reasoning:
            text += self._parts.event(place, "delta", f'{{"reasoning_content":{json_text(piece.reasoning)}}}')
        if piece.content or logprobs:
            text += self._parts.event(place, "delta", f'{{"content":{json_text(piece.content)}}}', logprobs=logprobs)
        if calls := [_call_part(part) for part in piece.calls if not part.is_broken]:
            text += self._parts.event(place, "delta", json.dumps({"tool_calls": calls}, separators=(",", ":")))
        if reason is not None:
            text += self._parts.event(place, "delta", "{}", reason=reason)
        return text

    def last(self, usage: Usage) -> bytes:
        """As `Reply.last`."""
        return self._parts.last(usage.with_thoughts(self._messages.num_thought))

    def read(self, place: int, chunk: Chunk) -> None:
        """As `Reply.read`."""
        self._messages.push(place, chunk)

    def whole(self, choices: Sequence[Completion], usage: Usage) -> dict[str, Any]:
        """As `Reply.whole`."""
        listed = [
            {
                "index": place, "message": _message(self._messages[place]),
                "logprobs": self._logprobs(one.logprobs), "finish_reason": self._messages[place].finish_reason,
            }
            for place, one in enumerate(choices)
        ]  # fmt: skip
        usage = usage.with_thoughts(self._messages.num_thought)
        return {**self._heading.fields("chat.completion"), "choices": listed, "usage": usage.fields()}

    def _logprobs(self, found: Any) -> dict[str, Any] | None:
        return token_logprobs.for_chat(self._tokenizer, found or ()) if self._has_logprobs else None


def _message(found: Message) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": found.content, "refusal": None}
    if found.reasoning:
        message["reasoning_content"] = found.reasoning
    if calls := found.calls:
        message["content"] = found.content or None
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message


def _call_part(part: CallPiece) -> dict[str, Any]:
    """Returns a part of a call as OpenAI's streams have it: who is called stands in the first."""
    if not part.name:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.call_id, "type": "function", "function": function}


class CompletionReply(_ChoicesReply):
    """Writes the choices of texts that are completed. `echo` gives the text of the prompt of a
    choice, which stands before it.
    """

    def __init__(
        self, heading: Heading, tokenizer: FrontTokenizer, *, has_logprobs: bool, has_usage: bool, echo: Callable[[int], str]
    ) -> None:
        self._heading = heading
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs
        self._parts = _Parts(heading, "text_completion", has_usage=has_usage)
        self._echo = echo
        self._begun: set[int] = set()

    def chunk(self, place: int, chunk: Chunk) -> bytes:
        """As `Reply.chunk`. A choice begins with an event, whether its first token has text or
        not, as a chat does.
        """
        text = chunk.text
        if place not in self._begun:
            self._begun.add(place)
            text = self._echo(place) + text
        elif not text and chunk.finish_reason is None and not (self._has_logprobs and chunk.logprobs):
            return b""
        logprobs = self._logprobs(chunk)
        return self._parts.event(place, "text", json_text(text), logprobs=logprobs, reason=chunk.finish_reason)

    def read(self, place: int, chunk: Chunk) -> None:
        """As `Reply.read`; the texts of its choices are all that it needs."""

    def whole(self, choices: Sequence[Completion], usage: Usage) -> dict[str, Any]:
        """As `Reply.whole`."""
        listed = [
            {
                "index": place, "text": self._echo(place) + one.text, "logprobs": self._logprobs(one),
                "finish_reason": one.finish_reason,
            }
            for place, one in enumerate(choices)
        ]  # fmt: skip
        return {**self._heading.fields("text_completion"), "choices": listed, "usage": usage.fields()}

    def _logprobs(self, found: Chunk | Completion) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        return token_logprobs.for_completion(self._tokenizer, found.logprobs or (), found.text_offsets)
