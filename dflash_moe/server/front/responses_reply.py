"""Answers in the shape of OpenAI's Responses API, whole and as typed events.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from dflash_moe.engine.request import LENGTH
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.engine.text import Chunk
from dflash_moe.server.front import token_logprobs
from dflash_moe.server.front.answer import Usage
from dflash_moe.server.front.api_error import ApiError
from dflash_moe.server.front.message_blocks import CALL, TEXT, THOUGHT, BlockReply, MessageBlock, named_event
from dflash_moe.server.front.message_pieces import Messages
from dflash_moe.server.front.replies import COMMENT, Heading
from dflash_moe.server.front.tokens import FrontTokenizer

_ITEM_PREFIXES = {THOUGHT: "rs", TEXT: "msg", CALL: "fc"}


class ResponsesReply(BlockReply):
    """Writes a response: an item of its output for each block."""

    silence = COMMENT

    def __init__(
        self, heading: Heading, messages: Messages, tokenizer: FrontTokenizer, params: SamplingParams,
        chat: Mapping[str, Any], instructions: str | None,
    ) -> None:  # fmt: skip
        """`chat` is what the request was translated into: a response repeats of it what was read,
        and `instructions`.
        """
        super().__init__(messages)
        self._heading = heading
        self._tokenizer = tokenizer
        self._has_logprobs = params.logprobs is not None
        self._number = 0
        # Of the items, one for each block.
        self._ids: list[str] = []
        self._statuses: list[str] = []
        # Of tokens whose text has not come yet, and of all whose text has.
        self._waiting: list[Any] = []
        self._logprobs: dict[int, list[Any]] = {}
        self._given = _repeated(chat, instructions, params)

    def chunk(self, place: int, chunk: Chunk) -> bytes:
        """As `Reply.chunk`."""
        if self._has_logprobs:
            self._waiting += token_logprobs.for_chat(self._tokenizer, chunk.logprobs or ())["content"]
        found = super().chunk(place, chunk)
        if self._blocks and self._blocks[-1].kind != TEXT:
            # Those of thoughts and calls have no place in a response.
            self._waiting = []
        return found

    def first(self, _usage: Usage) -> bytes:
        """As `Reply.first`."""
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event("response.in_progress", response=response)

    def last(self, usage: Usage) -> bytes:
        """As `Reply.last`."""
        response = self._message(usage.with_thoughts(self._messages.num_thought))
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> bytes:
        """As `Reply.failure`."""
        if self._is_open:
            self._statuses[-1] = "incomplete"
        said = error.body()["error"]
        found = {"code": said["code"] or "server_error", "message": said["message"]}
        return self._event("response.failed", response={**self._response("failed"), "error": found})

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        self._number += 1
        return named_event({"type": kind, "sequence_number": self._number - 1, **fields})

    def _begun(self, block: MessageBlock) -> bytes:
        self._ids.append(f"{_ITEM_PREFIXES[block.kind]}_{secrets.token_hex(12)}")
        self._statuses.append("in_progress")
        item = self._item(block)
        if block.kind == CALL:
            return self._event("response.output_item.added", output_index=block.place, item=item)
        added = self._event("response.output_item.added", output_index=block.place, item={**item, "content": []})
        return added + self._event("response.content_part.added", **self._at(block), part=item["content"][0])

    def _added(self, block: MessageBlock, text: str) -> bytes:
        if block.kind == TEXT:
            fresh = self._taken(block)
            return self._event("response.output_text.delta", **self._at(block), delta=text, logprobs=fresh)
        name = "function_call_arguments" if block.kind == CALL else "reasoning_text"
        return self._event(f"response.{name}.delta", **self._at(block), delta=text)

    def _ended(self, block: MessageBlock) -> bytes:
        is_cut = self._finish_reason == LENGTH or block.is_broken
        self._statuses[block.place] = "incomplete" if is_cut else "completed"
        if block.kind == TEXT:
            # Tokens without text may have come behind the last one with some.
            self._taken(block)
        item, at = self._item(block), self._at(block)
        if block.kind == CALL:
            done = self._event("response.function_call_arguments.done", **at, name=block.name, arguments=block.text)
        else:
            (part,) = item["content"]
            kind = "output_text" if block.kind == TEXT else "reasoning_text"
            more = {"logprobs": part["logprobs"]} if block.kind == TEXT else {}
            done = self._event(f"response.{kind}.done", **at, text=block.text, **more)
            done += self._event("response.content_part.done", **at, part=part)
        return done + self._event("response.output_item.done", output_index=block.place, item=item)

    def _taken(self, block: MessageBlock) -> list[Any]:
        fresh, self._waiting = self._waiting, []
        self._logprobs.setdefault(block.place, []).extend(fresh)
        return fresh

    def _at(self, block: MessageBlock) -> dict[str, Any]:
        found = {"item_id": self._ids[block.place], "output_index": block.place}
        return found if block.kind == CALL else {**found, "content_index": 0}

    def _item(self, block: MessageBlock) -> dict[str, Any]:
        item = {"id": self._ids[block.place], "status": self._statuses[block.place]}
        if block.kind == CALL:
            return {
                **item, "type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": block.text,
            }  # fmt: skip
        if block.kind == THOUGHT:
            content = [{"type": "reasoning_text", "text": block.text}]
            return {**item, "type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        part = {"type": "output_text", "text": block.text, "annotations": [], "logprobs": self._logprobs.get(block.place, [])}
        return {**item, "type": "message", "role": "assistant", "content": [part]}

    def _message(self, usage: Usage) -> dict[str, Any]:
        is_cut = self._finish_reason == LENGTH
        found = self._response("incomplete" if is_cut else "completed")
        if is_cut:
            found["incomplete_details"] = {"reason": "max_output_tokens"}
        return {**found, "usage": _usage(usage)}

    def _response(self, status: str) -> dict[str, Any]:
        output = [self._item(block) for block in self._said]
        return {
            "id": f"resp_{self._heading.name}", "object": "response", "created_at": self._heading.created, "status": status,
            "model": self._heading.model, "system_fingerprint": self._heading.fingerprint, "output": output, "error": None,
            "incomplete_details": None, "usage": None, **self._given,
        }  # fmt: skip


def _repeated(chat: Mapping[str, Any], instructions: str | None, params: SamplingParams) -> dict[str, Any]:
    """Returns the fields of a response that say how it was asked for."""
    choice, form = chat.get("tool_choice", "auto"), chat.get("response_format", {"type": "text"})
    return {
        "instructions": instructions, "max_output_tokens": chat.get("max_tokens"), "metadata": {},
        "parallel_tool_calls": chat.get("parallel_tool_calls", True),
        "reasoning": {"effort": chat.get("reasoning_effort"), "summary": None}, "temperature": params.temperature,
        "text": {"format": {"type": form["type"], **form.get("json_schema", {})}},
        "tool_choice": choice if isinstance(choice, str) else {"type": "function", **choice["function"]},
        "tools": [{"type": "function", **tool["function"]} for tool in chat.get("tools", ())],
        "top_logprobs": params.logprobs or 0, "top_p": params.top_p, "truncation": "disabled", "background": False,
        "previous_response_id": None, "store": False,
    }  # fmt: skip


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens, "output_tokens_details": {"reasoning_tokens": usage.thought_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }  # fmt: skip
