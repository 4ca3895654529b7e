"""Answers in the shape of Anthropic's Messages API, whole and in parts.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from dflash_moe.engine.request import LENGTH, STOP
from dflash_moe.server.front import api_error
from dflash_moe.server.front.answer import Usage
from dflash_moe.server.front.api_error import ApiError
from dflash_moe.server.front.message_blocks import CALL, THOUGHT, BlockReply, MessageBlock, named_event
from dflash_moe.server.front.message_pieces import TOOL_CALLS, Messages
from dflash_moe.server.front.replies import Heading

_STOP_REASONS = {STOP: "end_turn", TOOL_CALLS: "tool_use", LENGTH: "max_tokens"}


class AnthropicReply(BlockReply):
    """Writes a message of the assistant."""

    silence = named_event({"type": "ping"})

    def __init__(self, heading: Heading, messages: Messages) -> None:
        super().__init__(messages)
        self._heading = heading

    def first(self, usage: Usage) -> bytes:
        """As `Reply.first`."""
        # What a cache had of the prompt is known with the last event.
        return named_event({"type": "message_start", "message": self._message(usage)})

    def last(self, usage: Usage) -> bytes:
        """As `Reply.last`."""
        delta = self._ended_by()
        found = _usage(usage.with_thoughts(self._messages.num_thought))
        ended = named_event({"type": "message_delta", "delta": delta, "usage": found})
        return ended + named_event({"type": "message_stop"})

    def failure(self, error: ApiError) -> bytes:
        """As `Reply.failure`."""
        return named_event(api_error.anthropic_body(error))

    def _begun(self, block: MessageBlock) -> bytes:
        return named_event({"type": "content_block_start", "index": block.place, "content_block": _content(block)})

    def _added(self, block: MessageBlock, text: str) -> bytes:
        if block.kind == CALL:
            delta = {"type": "input_json_delta", "partial_json": text}
        elif block.kind == THOUGHT:
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            delta = {"type": "text_delta", "text": text}
        return named_event({"type": "content_block_delta", "index": block.place, "delta": delta})

    def _ended(self, block: MessageBlock) -> bytes:
        return named_event({"type": "content_block_stop", "index": block.place})

    def _message(self, usage: Usage) -> dict[str, Any]:
        return {
            "id": f"msg_{self._heading.name}", "type": "message", "role": "assistant", "model": self._heading.model,
            "content": [_content(block) for block in self._said], **self._ended_by(),
            "usage": _usage(usage),
        }  # fmt: skip

    def _ended_by(self) -> dict[str, Any]:
        reason = None if self._finish_reason is None else _STOP_REASONS[self._finish_reason]
        # A call is to be answered, whatever has ended the message behind it.
        if self._stop_string is not None and self._finish_reason == STOP:
            return {"stop_reason": "stop_sequence", "stop_sequence": self._stop_string}
        return {"stop_reason": reason, "stop_sequence": None}


def _content(block: MessageBlock) -> dict[str, Any]:
    if block.kind == CALL:
        arguments: dict[str, Any] = {}
        # A call at its beginning has none, and one that max_tokens has cut none that can be read.
        with contextlib.suppress(ValueError):
            arguments = json.loads(block.text)
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}
    if block.kind == THOUGHT:
        # Nobody checks a signature here, and clients expect one.
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def _usage(usage: Usage) -> dict[str, Any]:
    # This API counts what a cache had apart.
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens, "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0, "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.thought_tokens or 0},
    }  # fmt: skip
