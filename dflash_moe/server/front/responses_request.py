"""Makes a body of OpenAI's chat of one of OpenAI's Responses API. Nothing is kept of a response, so
that a request brings its whole conversation.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

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
    text_in,
    text_part,
    text_parts,
    unsupported,
)  # fmt: skip

# Fields of the API under the names that a chat has for them, by which a chat's errors are reworded.
NAMES = {
    "messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format",
    "reasoning_effort": "reasoning.effort", "verbosity": "text.verbosity",
}  # fmt: skip
LOGPROBS = "message.output_text.logprobs"
_TRANSLATED = ("tools", "tool_choice", "top_logprobs")
_TEXTS = ("input_text", "output_text", "text")


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body of a chat. Raises ApiError for what is wrong or has no form there."""
    chat = passed(body, "responses", _TRANSLATED)
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    chat["messages"] = _messages(body.get("instructions"), body.get("input"))
    if body.get("tools") is not None:
        chat["tools"] = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(mappings(body["tools"], "tools"))]
    if body.get("tool_choice") is not None:
        chat["tool_choice"] = _tool_choice(body["tool_choice"])
    if body.get("reasoning") is not None:
        effort = mapping(body["reasoning"], "reasoning").get("effort")
        if effort is not None:
            set_effort(chat, effort, "reasoning.effort")
    if body.get("text") is not None:
        _set_text(chat, mapping(body["text"], "text"))
    _set_logprobs(chat, body.get("include"), body.get("top_logprobs"))
    return chat


def _messages(instructions: object, given: object) -> list[dict[str, Any]]:
    chat: list[dict[str, Any]] = []
    if instructions is not None:
        if not isinstance(instructions, str):
            raise refusal("instructions", instructions, "a text")
        chat.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*chat, {"role": "user", "content": given}]
    items = mappings(given, "input")
    if not items:
        raise refusal("input", given, "a text, or a list of at least one item")
    # Templates know no developer, and most take one system message at the beginning.
    num_first = next((at for at, item in enumerate(items) if not _is_system(item)), len(items))
    texts = [text_parts(item.get("content"), f"input[{at}].content", _TEXTS) for at, item in enumerate(items[:num_first])]
    if texts:
        chat = [{"role": "system", "content": "\n\n".join([*(one["content"] for one in chat), *texts])}]
    for at, item in enumerate(items[num_first:], start=num_first):
        _add_item(chat, item, f"input[{at}]")
    return chat


def _is_system(item: Mapping[str, Any]) -> bool:
    return (item.get("type") or "message") == "message" and item.get("role") in ("system", "developer")


def _add_item(chat: list[dict[str, Any]], item: Mapping[str, Any], place: str) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        _add_message(chat, item, place)
    elif kind == "reasoning":
        if thought := _thought(item, place):
            _turn(chat, "reasoning_content")["reasoning_content"] = thought
    elif kind == "function_call":
        function = {"name": text_in(item, "name", place), "arguments": text_in(item, "arguments", place)}
        call = {"id": text_in(item, "call_id", place), "type": "function", "function": function}
        _turn(chat).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        text = text_parts(item.get("output"), f"{place}.output", _TEXTS)
        chat.append({"role": "tool", "tool_call_id": text_in(item, "call_id", place), "content": text})
    else:
        raise unsupported(place, f"an item of type {brief(kind)}")


def _add_message(chat: list[dict[str, Any]], item: Mapping[str, Any], place: str) -> None:
    role = one_of(item.get("role"), f"{place}.role", ("user", "assistant", "system", "developer"))
    content = item.get("content")
    if role == "assistant":
        # The parts of an answer are pieces of one text.
        parts = [content] if isinstance(content, str) else [
            text_part(part, f"{place}.content[{at}]", _TEXTS) for at, part in enumerate(mappings(content, f"{place}.content"))
        ]  # fmt: skip
        _turn(chat, "content")["content"] = "".join(parts)
        return
    text = text_parts(content, f"{place}.content", _TEXTS)
    chat.append({"role": "system" if role == "developer" else role, "content": text})


def _turn(chat: list[dict[str, Any]], name: str = "") -> dict[str, Any]:
    """Returns the assistant's message that an item belongs to: the last one, unless it has `name`
    or what comes behind it in a message already.
    """
    last = chat[-1] if chat else {}
    order = ("reasoning_content", "content", "tool_calls")
    behind = order[order.index(name) :] if name else ()
    if last.get("role") != "assistant" or any(last.get(one) is not None for one in behind):
        last = {"role": "assistant", "content": None}
        chat.append(last)
    return last


def _thought(item: Mapping[str, Any], place: str) -> str:
    """Returns what an item of reasoning says, where that can be read: a summary where there is
    nothing else.
    """
    for name, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = item.get(name)
        if parts:
            return "".join(
                text_part(part, f"{place}.{name}[{at}]", (kind,)) for at, part in enumerate(mappings(parts, f"{place}.{name}"))
            )
    return ""


def _tool(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unsupported(place, f"tools of type {brief(tool.get('type'))}, which OpenAI's servers run or know")
    function: dict[str, Any] = {"name": text_in(tool, "name", place)}
    function |= {name: tool[name] for name in ("description", "parameters", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: object) -> Any:
    if isinstance(choice, str):
        return one_of(choice, "tool_choice", ("none", "auto", "required"))
    found = mapping(choice, "tool_choice")
    if found.get("type") != "function":
        raise unsupported("tool_choice", f"a choice of type {brief(found.get('type'))}")
    return {"type": "function", "function": {"name": text_in(found, "name", "tool_choice")}}


def _set_text(chat: dict[str, Any], text: Mapping[str, Any]) -> None:
    if text.get("verbosity") is not None:
        chat["verbosity"] = text["verbosity"]
    if text.get("format") is None:
        return
    form = mapping(text["format"], "text.format")
    kind = one_of(form.get("type"), "text.format.type", ("text", "json_object", "json_schema"))
    if kind == "json_schema":
        schema = {name: form[name] for name in ("name", "schema", "strict", "description") if form.get(name) is not None}
        chat["response_format"] = {"type": kind, "json_schema": schema}
    elif kind == "json_object":
        chat["response_format"] = {"type": kind}


def _set_logprobs(chat: dict[str, Any], include: object, top: object) -> None:
    if include is not None and not (isinstance(include, list) and all(isinstance(one, str) for one in include)):
        raise refusal("include", include, "a list of texts")
    if include and LOGPROBS in include:
        chat["logprobs"] = True
    elif top:
        raise ApiError(400, f'top_logprobs needs include: ["{LOGPROBS}"]', param="top_logprobs")
    if top is not None:
        chat["top_logprobs"] = top
