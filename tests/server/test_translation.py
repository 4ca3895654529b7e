"""What a chat becomes of the bodies of Anthropic's Messages and OpenAI's Responses.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_moe.server.front import anthropic_request, responses_request
from dflash_moe.server.front.api_error import ApiError

HELLO = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def of_messages(**body):
    return anthropic_request.chat_body({"messages": HELLO, "max_tokens": 5, **body})


def of_responses(**body):
    return responses_request.chat_body({"input": "hi", **body})


def test_calls_results_and_thoughts_of_messages():
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I look.", "signature": "x"}, {"type": "text", "text": "I "},
            {"type": "text", "text": "look"}, {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "ü"}},
            {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [
                {"type": "text", "text": "12"}, {"type": "text", "text": "C"},
            ]},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": True}, {"type": "text", "text": "so?"},
        ]},
    ]  # fmt: skip
    assert of_messages(messages=messages)["messages"] == [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "I look", "reasoning_content": "I look.", "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a": "ü"}'}},
            {"id": "t2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ]},
        {"role": "tool", "tool_call_id": "t1", "content": "12\nC"}, {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": "so?"},
    ]  # fmt: skip


def test_calls_results_and_thoughts_of_responses():
    items = [
        {"role": "user", "content": "weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I look."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "12"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Cold."}]},
        {"role": "assistant", "content": "Cold"},
        {"role": "assistant", "content": "Very"},
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "so?"},
    ]
    assert of_responses(input=items)["messages"] == [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "I look", "reasoning_content": "I look.", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "12"}, {"role": "tool", "tool_call_id": "c2", "content": "x"},
        {"role": "assistant", "content": "Cold", "reasoning_content": "Cold."}, {"role": "assistant", "content": "Very"},
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "so?"},
    ]  # fmt: skip


def test_instructions_and_the_first_system_message_are_one():
    found = of_responses(instructions="a", input=[{"role": "developer", "content": "b"}, *HELLO])["messages"]
    assert found == [{"role": "system", "content": "a\n\nb"}, *HELLO]
    texts = [{"role": "system", "content": text} for text in ("b", "c")]
    found = of_responses(input=[*texts, *HELLO, {"role": "developer", "content": "d"}])["messages"]
    assert found == [{"role": "system", "content": "b\n\nc"}, *HELLO, {"role": "system", "content": "d"}]


def test_system_messages_take_time_in_proportion():
    class Counted(str):
        """A text that counts what is made of it."""

        def __add__(self, other):
            raise AssertionError("the text so far is copied for each message")

        __radd__ = __add__

    found = of_responses(input=[{"role": "system", "content": Counted("a")}, {"role": "system", "content": Counted("b")}])
    assert found["messages"] == [{"role": "system", "content": "a\n\nb"}]


@pytest.mark.parametrize(
    ("system", "text"),
    [
        ("x-anthropic-billing-header: cch=1;", None), ("x-anthropic-billing-header: cch=1;\n\nA", "\nA"),
        ("A", "A"), ("", None),
        ("say x-anthropic-y", "say x-anthropic-y"), ("A\nX-Anthropic-z: 1\nB", "A\nB"),
        ([{"type": "text", "text": "x-anthropic-a: 1"}, {"type": "text", "text": "A"}, {"type": "text", "text": "B"}], "A\nB"),
    ],
)  # fmt: skip
def test_lines_about_billing_are_dropped_from_a_system_text(system, text):
    first = [] if text is None else [{"role": "system", "content": text}]
    assert of_messages(system=system)["messages"] == [*first, *HELLO]


def test_a_user_may_say_what_a_system_may_not():
    said = [{"role": "user", "content": "x-anthropic-billing-header: 1"}]
    assert of_messages(messages=said)["messages"] == said


def test_tools_and_their_choice_have_the_form_of_a_chat():
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}}
    of_anthropic = {"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True, "cache_control": {"type": "x"}}
    found = of_messages(tools=[of_anthropic, {**of_anthropic, "type": "custom"}])
    assert found["tools"] == [tool, tool]
    assert "tool_choice" not in found
    of_openai = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
    assert of_responses(tools=[of_openai])["tools"] == [tool]


def test_what_is_nested_too_deeply_is_refused():
    deep: dict = {}
    for _ in range(200_000):
        deep = {"a": deep}
    call = {"type": "tool_use", "id": "t", "name": "f", "input": deep}
    with pytest.raises(ApiError, match="nested too deeply"):
        of_messages(messages=[{"role": "assistant", "content": [call]}, *HELLO])


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("choice", "of_chat"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, NAMED),
    ],
)
def test_a_choice_of_tools_of_messages(choice, of_chat):
    assert of_messages(tool_choice=choice)["tool_choice"] == of_chat
    found = of_messages(tool_choice={**choice, "disable_parallel_tool_use": True})
    assert (found["tool_choice"], found["parallel_tool_calls"]) == (of_chat, False)


@pytest.mark.parametrize(
    ("choice", "of_chat"),
    [("auto", "auto"), ("required", "required"), ("none", "none"), ({"type": "function", "name": "f"}, NAMED)],
)
def test_a_choice_of_tools_of_responses(choice, of_chat):
    assert of_responses(tool_choice=choice)["tool_choice"] == of_chat


@pytest.mark.parametrize(
    ("thinking", "variables"),
    [
        ({"type": "enabled", "budget_tokens": 2000}, {"enable_thinking": True, "thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False, "thinking": False}),
        ({"type": "adaptive"}, None),
    ],
)
def test_whether_to_think_is_said_to_the_template(thinking, variables):
    assert of_messages(thinking=thinking).get("chat_template_kwargs") == variables
    own = of_messages(thinking=thinking, chat_template_kwargs={"enable_thinking": 1})["chat_template_kwargs"]
    assert own["enable_thinking"] == 1


def test_efforts_and_schemas_have_the_form_of_a_chat():
    found = of_messages(output_config={"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}})
    assert found["reasoning_effort"] == "high"
    assert found["response_format"]["json_schema"]["schema"] == SCHEMA
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    found = of_responses(reasoning={"effort": "low", "summary": "auto"}, text={"format": form})
    assert found["reasoning_effort"] == "low"
    assert found["response_format"] == {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    assert of_responses(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    assert "response_format" not in of_responses(text={"format": {"type": "text"}})
    assert of_responses(reasoning={"effort": "none"})["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}


ODD = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["user", "assistant", "text", "tool_use", "tool_result", "function_call", "reasoning", "message", "tool"])
)  # fmt: skip
NAMES = st.sampled_from(
    [
        "type", "role", "content", "text", "name", "input", "id", "call_id", "output", "summary", "thinking", "effort",
        "format",
        "tool_use_id", "arguments", "schema", "input_schema", "budget_tokens", "disable_parallel_tool_use", "verbosity",
    ]
)  # fmt: skip
VALUES = st.recursive(ODD, lambda more: st.lists(more, max_size=3) | st.dictionaries(NAMES, more, max_size=5), max_leaves=12)


@pytest.mark.parametrize("module", [anthropic_request, responses_request])
@given(
    st.dictionaries(
        st.sampled_from(
            ["messages", "system", "tools", "tool_choice", "thinking", "output_config", "stop_sequences", "input", "text",
             "instructions", "reasoning", "include", "top_logprobs", "max_tokens", "max_output_tokens", "chat_template_kwargs"]
        ),
        VALUES,
    )
)  # fmt: skip
def test_whatever_stands_in_a_body_is_translated_or_refused(module, body):
    refused = None
    try:
        found = module.chat_body(body)
    except ApiError as error:
        refused = error
    if refused is None:
        assert isinstance(found["messages"], list)
        assert found["messages"]
    else:
        assert (refused.status, bool(refused.param)) == (400, True)
        json.dumps(refused.body())
