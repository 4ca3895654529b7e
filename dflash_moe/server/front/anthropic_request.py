"""Makes a body of OpenAI's chat of one of Anthropic's Messages API.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from dflash_moe.server.front.api_error import ApiError, brief
from dflash_moe.server.front.translation import (
    mapping,
    mappings,
    one_of,
    passed,
    refusal,
    set_effort,
    set_thinking,
    text_in,
    text_part,
    text_parts,
    unsupported,
)  # fmt: skip

# Fields of the API under the names that a chat has for them, by which a chat's errors are reworded.
NAMES = {"stop": "stop_sequences", "response_format": "output_config.format", "reasoning_effort": "output_config.effort"}
_TRANSLATED = ("messages", "tools", "tool_choice")
# Claude Code begins a system text with a line about billing that has another number in each
# request. No prefix of a prompt would ever be found again with it.
_BILLING = re.compile(r"^x-anthropic-[^\n]*(?:\n|\Z)", re.IGNORECASE | re.MULTILINE)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_body(body: Mapping[str, Any], *, is_answered: bool = True) -> dict[str, Any]:
    """Returns the body of a chat; of one that is only counted where it is not answered. Raises
    ApiError for what is wrong or has no form there.
    """
    if is_answered and body.get("max_tokens") is None:
        raise ApiError(400, "max_tokens is missing: the most tokens that the answer may have", param="max_tokens")
    chat = passed(body, "messages", _TRANSLATED)
    if body.get("stop_sequences") is not None:
        chat["stop"] = body["stop_sequences"]
    chat["messages"] = _system(body.get("system")) + _messages(body.get("messages"))
    if body.get("tools") is not None:
        chat["tools"] = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(mappings(body["tools"], "tools"))]
    if body.get("tool_choice") is not None:
        _set_tool_choice(chat, mapping(body["tool_choice"], "tool_choice"))
    if body.get("thinking") is not None:
        _set_thinking(chat, mapping(body["thinking"], "thinking"))
    if body.get("output_config") is not None:
        _set_output(chat, mapping(body["output_config"], "output_config"))
    return chat


def _system(found: object) -> list[dict[str, Any]]:
    text = "" if found is None else _BILLING.sub("", text_parts(found, "system", ("text",)))
    return [{"role": "system", "content": text}] if text else []


def _messages(found: object) -> list[dict[str, Any]]:
    given = mappings(found, "messages")
    if not given:
        raise refusal("messages", found, "a list of at least one message")
    chat: list[dict[str, Any]] = []
    for at, message in enumerate(given):
        place = f"messages[{at}]"
        role = one_of(message.get("role"), f"{place}.role", ("user", "assistant", "system"))
        content = message.get("content")
        if role == "assistant":
            chat.append(_of_assistant(content, f"{place}.content"))
        elif role == "system":
            chat.append({"role": role, "content": text_parts(content, f"{place}.content", ("text",))})
        else:
            chat += _of_user(content, f"{place}.content")
    if given[-1]["role"] == "assistant":
        raise unsupported(f"messages[{len(given) - 1}]", "an answer that is to be continued (prefill)")
    return chat


def _of_user(content: object, place: str) -> list[dict[str, Any]]:
    """Returns what a user said, and what tools did, in their order."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    chat: list[dict[str, Any]] = []
    texts: list[str] = []
    for at, block in enumerate(mappings(content, place)):
        where = f"{place}[{at}]"
        if block.get("type") != "tool_result":
            texts.append(text_part(block, where, ("text",)))
            continue
        if texts:
            chat.append({"role": "user", "content": "\n".join(texts)})
            texts = []
        result = block.get("content")
        text = "" if result is None else text_parts(result, f"{where}.content", ("text",))
        chat.append({"role": "tool", "tool_call_id": text_in(block, "tool_use_id", where), "content": text})
    if texts or not chat:
        chat.append({"role": "user", "content": "\n".join(texts)})
    return chat


def _of_assistant(content: object, place: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    text, thought = "", ""
    calls: list[dict[str, Any]] = []
    for at, block in enumerate(mappings(content, place)):
        where = f"{place}[{at}]"
        kind = block.get("type")
        if kind == "text":
            text += text_in(block, "text", where)
        elif kind == "thinking":
            thought += text_in(block, "thinking", where)
        elif kind == "tool_use":
            function = {"name": text_in(block, "name", where), "arguments": _json_text(block.get("input"), f"{where}.input")}
            calls.append({"id": text_in(block, "id", where), "type": "function", "function": function})
        else:
            raise unsupported(where, f"a block of type {brief(kind)}")
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _json_text(found: object, place: str) -> str:
    try:
        return json.dumps(mapping(found, place), ensure_ascii=False)
    except RecursionError:
        raise ApiError(400, f"{place} is nested too deeply", param="messages") from None


def _tool(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise unsupported(place, f"tools of type {brief(kind)}, which Anthropic's servers run or know")
    function = {"name": text_in(tool, "name", place), "parameters": mapping(tool.get("input_schema"), f"{place}.input_schema")}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _set_tool_choice(chat: dict[str, Any], choice: Mapping[str, Any]) -> None:
    kind = one_of(choice.get("type"), "tool_choice.type", (*_CHOICES, "tool"))
    if kind == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": text_in(choice, "name", "tool_choice")}}
    else:
        chat["tool_choice"] = _CHOICES[kind]
    is_single = choice.get("disable_parallel_tool_use")
    if is_single is not None:
        if not isinstance(is_single, bool):
            raise refusal("tool_choice.disable_parallel_tool_use", is_single, "true or false")
        chat["parallel_tool_calls"] = not is_single


def _set_thinking(chat: dict[str, Any], thinking: Mapping[str, Any]) -> None:
    kind = one_of(thinking.get("type"), "thinking.type", ("enabled", "disabled", "adaptive"))
    budget = thinking.get("budget_tokens")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        raise refusal("thinking.budget_tokens", budget, "a whole number from 1 on")
    if kind != "adaptive":
        set_thinking(chat, is_on=kind == "enabled")


def _set_output(chat: dict[str, Any], config: Mapping[str, Any]) -> None:
    if config.get("effort") is not None:
        set_effort(chat, config["effort"], "output_config.effort")
    form = config.get("format")
    if form is not None:
        one_of(mapping(form, "output_config.format").get("type"), "output_config.format.type", ("json_schema",))
        schema = mapping(form.get("schema"), "output_config.format.schema")
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
