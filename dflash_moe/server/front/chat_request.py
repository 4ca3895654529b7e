"""What a chat asks for, checked and as the model's template takes it: messages, tools, how they may
be called, and further variables of the template.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_moe.server.front.api_error import ApiError, brief
from dflash_moe.server.front.call_forms import MAX_CALLS, ChatForm
from dflash_moe.server.front.request_fields import flag

MAX_TOOLS = 128
# Of all tools of a request as JSON: a hundred long descriptions, and more than most contexts take.
MAX_TOOLS_CHARACTERS = 1 << 19
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
# Variables of a template that a request may not set: the conversation is given otherwise.
_NO_VARIABLES = ("messages", "tools", "documents", "template", "add_generation_prompt")
NONE, AUTO, REQUIRED = "none", "auto", "required"
# Thoughts of earlier messages, as clients send them back.
_THOUGHTS = ("reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked chat. `variables` are those of the template, the tools that it is shown among
    them. `schemas` are the arguments' schemas of the tools that may be called, by name, and
    `forced` names those one of which must be.
    """

    messages: list[Any]
    variables: dict[str, Any]
    schemas: Mapping[str, Any] = field(default_factory=dict)
    forced: tuple[str, ...] = ()
    # Whether the first call ends a message.
    is_single: bool = False
    # Whether thoughts are given out.
    has_reasoning: bool = True


def chat_request(body: Mapping[str, Any], form: ChatForm) -> ChatRequest:
    """Returns what a body in the form of OpenAI's chats asks for, for a model whose template has a
    form. Raises ApiError naming the field that is wrong, or that the model has not.
    """
    tools = _tools(body.get("tools"))
    choice = _choice(body.get("tool_choice"), tools)
    variables = _variables(body)
    if choice == NONE:
        tools = {}
    if tools:
        _need_calls(form, "tools")
        variables["tools"] = list(tools.values())
    schemas = {name: tool["function"]["parameters"] for name, tool in tools.items()}
    is_parallel = flag(body, "parallel_tool_calls", default=True) and (form.calls is None or form.calls.is_parallel)
    forced = tuple(tools) if choice == REQUIRED else () if choice in (NONE, AUTO) else (choice,)
    return ChatRequest(
        _messages(body.get("messages"), form), variables, schemas, forced, not is_parallel,
        flag(body, "include_reasoning", default=True),
    )  # fmt: skip


def _need_calls(form: ChatForm, param: str) -> None:
    if form.calls is None:
        text = f"{param}: this model's answers cannot be read for calls of tools: {form.no_calls}; leave {param} out"
        raise ApiError(400, text, param=param, code="unsupported_parameter")


# -- tools -----------------------------------------------------------------------------------------
def _tools(given: object) -> dict[str, dict[str, Any]]:
    """Returns tools by name, with all that templates ask of one."""
    if given is None:
        return {}
    if not isinstance(given, list) or len(given) > MAX_TOOLS:
        raise ApiError(400, f"tools={brief(given)} is not allowed; allowed: a list of at most {MAX_TOOLS} tools", param="tools")
    found: dict[str, dict[str, Any]] = {}
    for place, tool in enumerate(given):
        one = _tool(tool, f"tools[{place}]")
        name = one["function"]["name"]
        if name in found:
            raise ApiError(400, f"tools[{place}]: the name {name} is given twice", param="tools")
        found[name] = one
    # A request's tools are a part of each of its prompts.
    try:
        size = len(json.dumps(list(found.values()), ensure_ascii=False))
    except RecursionError:
        raise ApiError(400, "tools: a schema is nested too deeply", param="tools") from None
    if size > MAX_TOOLS_CHARACTERS:
        raise ApiError(
            400, f"tools: they have more than {MAX_TOOLS_CHARACTERS:,} characters; shorten their schemas", param="tools"
        )
    return found


def _tool(tool: object, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
    if not isinstance(function, dict):
        raise ApiError(
            400, f'{where}={brief(tool)} is not allowed; allowed: {{"type": "function", "function": {{...}}}}', param="tools"
        )
    name, description, parameters = function.get("name"), function.get("description"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        text = f"{where}: the name {brief(name)} is not allowed; allowed: 1 to 64 letters, digits, underscores, dots and dashes"
        raise ApiError(400, text, param="tools")
    if not isinstance(description, str | None) or not isinstance(parameters, dict | None):
        raise ApiError(400, f"{where}: of {name}, description is no text or parameters no object", param="tools")
    parameters = {"type": "object", "properties": {}, **(parameters or {})}
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": parameters}}


def _choice(given: object, tools: Mapping[str, Any]) -> str:
    """Returns none, auto, required, or the name of the tool that must be called."""
    if given is None or given in (NONE, AUTO):
        return str(given or AUTO)
    name = None
    if isinstance(given, dict) and given.get("type") == "function" and isinstance(given.get("function"), dict):
        name = given["function"].get("name")
    if given != REQUIRED and not isinstance(name, str):
        raise ApiError(
            400, f"tool_choice={brief(given)} is not allowed; allowed: none, auto, required, or "
            '{"type": "function", "function": {"name": ...}}', param="tool_choice",
        )  # fmt: skip
    if not tools or (name is not None and name not in tools):
        raise ApiError(400, f"tool_choice={brief(given)}: there is no such tool in tools", param="tool_choice")
    return REQUIRED if name is None else name


def _variables(body: Mapping[str, Any]) -> dict[str, Any]:
    given = body.get("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        raise ApiError(
            400, f"chat_template_kwargs={brief(given)} is not allowed; allowed: an object", param="chat_template_kwargs"
        )
    found: dict[str, Any] = dict(given or {})
    for name in _NO_VARIABLES:
        if name in found:
            raise ApiError(400, f"chat_template_kwargs: {name} is not allowed there", param="chat_template_kwargs")
    effort = body.get("reasoning_effort")
    if effort is not None:
        if not isinstance(effort, str):
            raise ApiError(400, f"reasoning_effort={brief(effort)} is not allowed; allowed: a text", param="reasoning_effort")
        found.setdefault("reasoning_effort", effort)
    return found


# -- messages --------------------------------------------------------------------------------------
def _messages(given: object, form: ChatForm) -> list[Any]:
    """Returns messages with calls, results and thoughts as the template takes them. What else is
    wrong with them is found where they are rendered.
    """
    if not isinstance(given, list):
        return [given]
    # By the id that a client sent: the id that the template is given, and the tool's name.
    ids: dict[str, tuple[str, str]] = {}
    return [_message(place, one, form, ids) if isinstance(one, dict) else one for place, one in enumerate(given, start=1)]


def _message(place: int, given: Mapping[str, Any], form: ChatForm, ids: dict[str, tuple[str, str]]) -> dict[str, Any]:
    # Clients send back fields without a value, which templates take for ones that are there.
    found = {name: value for name, value in given.items() if value is not None or name == "content"}
    if given.get("role") == "tool":
        _need_calls(form, "messages")
        call_id = given.get("tool_call_id")
        if not isinstance(call_id, str) or call_id not in ids:
            text = f"message {place}: tool_call_id {brief(call_id)} is none of a call in an earlier message"
            raise ApiError(400, text, param="messages")
        found["tool_call_id"], name = ids[call_id]
        return {"name": name, **found}
    if given.get("role") != "assistant":
        return found
    thought = next((found[name] for name in _THOUGHTS if found.get(name)), None)
    if form.thoughts is not None:
        found = {name: value for name, value in found.items() if name not in _THOUGHTS}
        if isinstance(thought, str):
            found[form.thoughts.field] = thought
    if found.pop("tool_calls", None):
        _need_calls(form, "messages")
        found["tool_calls"] = _calls(place, given["tool_calls"], form, ids)
        found["content"] = found.get("content") or ""
        if form.is_harmony and thought:
            # Its template takes one of both.
            found["content"] = ""
    return found


def _calls(place: int, given: object, form: ChatForm, ids: dict[str, tuple[str, str]]) -> list[dict[str, Any]]:
    if not isinstance(given, list) or len(given) > MAX_CALLS:
        raise ApiError(
            400, f"message {place}: tool_calls {brief(given)}, expected a list of at most {MAX_CALLS}", param="messages"
        )
    assert form.calls is not None
    if len(given) > 1 and not form.calls.is_parallel:
        raise ApiError(400, f"message {place}: this model's template takes one tool call in a message", param="messages")
    return [_call(place, one, form, ids) for one in given]


def _call(place: int, given: object, form: ChatForm, ids: dict[str, tuple[str, str]]) -> dict[str, Any]:
    assert form.calls is not None
    function = given.get("function") if isinstance(given, dict) else None
    call_id = given.get("id") if isinstance(given, dict) else None
    name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, dict) else (None, None)
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else None
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(call_id, str) or not isinstance(name, str) or not isinstance(parsed, dict):
        text = (
            f"message {place}: tool call {brief(given)}, expected an id, and a function with a name and arguments that are the "
            "text of a JSON object"
        )
        raise ApiError(400, text, param="messages")
    ids[call_id] = (_id_for(call_id, name, len(ids), form), name)
    function = {"name": name, "arguments": arguments if form.calls.takes_text else parsed}
    return {"id": ids[call_id][0], "type": "function", "function": function}


def _id_for(call_id: str, name: str, place: int, form: ChatForm) -> str:
    """Returns an id that the template takes for one that another server may have given."""
    assert form.calls is not None
    if form.calls.has_short_ids and not _SHORT_ID.fullmatch(call_id):
        return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]
    prefix = form.calls.id_prefix
    if prefix is not None and not re.fullmatch(re.escape(f"{prefix}{name}:") + "[0-9]+", call_id):
        return f"{prefix}{name}:{place}"
    return call_id
