"""Tools and thoughts by Anthropic's and OpenAI's own clients: what a model writes, in Messages and
in Responses, whole and streamed, and what the next turn says to it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("anthropic")
pytest.importorskip("openai")
pytest.importorskip("llguidance")

import anthropic
import openai
import pydantic

from dflash_moe.integrations.chat_template import ChatTemplate, TemplateRenderer
from dflash_moe.server.chat_form import find_chat_form
from dflash_moe.server.chat_probes import Probes
from tests.server.served import LARGE, Served, ids_of, prompt_of, served
from tests.server.test_body_fuzz import ODD

# Thoughts and calls as Qwen's models write them.
TEMPLATE = """
{%- if tools %}TOOLS {{ tools | tojson }}\n{% endif -%}
{%- for message in messages %}<|{{ message.role }}|>
{%- if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif -%}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>
{%- endfor %}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"""
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
ZURICH, BASEL = {"city": "Zürich", "days": 2}, {"city": "Basel"}
HELLO = [{"role": "user", "content": "weather?"}]


def call(arguments: dict, name: str = "weather") -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


THOUGHT = "<think>\nI look.\n</think>\n\n"
# What a model writes, and thought, text and arguments of calls therein.
ANSWERS = [
    (call(ZURICH), "", "", [ZURICH]),
    ("Let me see.\n" + call(ZURICH), "", "Let me see.", [ZURICH]),
    (THOUGHT + call(ZURICH) + "\n" + call(BASEL), "I look.", "", [ZURICH, BASEL]),
    (THOUGHT + "Let me see.\n" + call(BASEL), "I look.", "Let me see.", [BASEL]),
    (THOUGHT + "Cold.", "I look.", "Cold.", []),
    ("I cannot call <tool_call> things.", "", "I cannot call <tool_call> things.", []),
    (call(ZURICH, "unknown"), "", call(ZURICH, "unknown"), []),
]


@pytest.fixture(scope="module")
def front() -> Iterator[Served]:
    with TemplateRenderer(ChatTemplate(TEMPLATE, "a test"), {}) as renderer:
        form = find_chat_form(Probes(TEMPLATE, renderer.render, []))
    assert (form.no_calls, form.no_thoughts) == ("", "")
    with served(told={"template": TEMPLATE, "chat_form": form.facts(), "max_model_len": 4096}) as found:
        # The processes that read, render and compile what was sent live as long as all tests.
        form = {"text": {"format": {"type": "json_object"}}}
        assert found.post("/v1/responses", {"input": "hi", "max_output_tokens": 1, **form, **LARGE})[0] == 200
        yield found


@pytest.fixture
def claude(front: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=front.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
def client(front: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def say(front: Served, text: str) -> None:
    ids = ids_of(text)
    front.engine.answer = lambda _prompt, _choice: ids


MESSAGES: dict[str, Any] = {
    "model": "demo", "max_tokens": 300, "messages": HELLO,
    "tools": [{"name": "weather", "description": "Says it.", "input_schema": SCHEMA}],
}  # fmt: skip
RESPONSES: dict[str, Any] = {
    "model": "demo", "max_output_tokens": 300, "input": "weather?",
    "tools": [{"type": "function", "name": "weather", "description": "Says it.", "parameters": SCHEMA}],
}  # fmt: skip


def blocks_of(message: Any) -> list[tuple[str, Any]]:
    fields = {"thinking": "thinking", "text": "text", "tool_use": "input"}
    return [(block.type, getattr(block, fields[block.type])) for block in message.content]


@pytest.mark.parametrize(("written", "thought", "text", "calls"), ANSWERS)
def test_a_message_of_thought_text_and_calls(claude, front, written, thought, text, calls):
    say(front, written)
    expected = [("thinking", thought)] * bool(thought) + [("text", text)] * bool(text) + [("tool_use", one) for one in calls]
    whole = claude.messages.create(**MESSAGES)
    with claude.messages.stream(**MESSAGES) as stream:
        streamed = stream.get_final_message()
    for found in (whole, streamed):
        assert [(kind, said.strip() if isinstance(said, str) else said) for kind, said in blocks_of(found)] == expected
        assert found.stop_reason == ("tool_use" if calls else "end_turn")
        assert (found.usage.output_tokens_details.thinking_tokens > 0) == bool(thought)
    assert blocks_of(whole) == blocks_of(streamed)
    assert whole.usage == streamed.usage


@pytest.mark.parametrize(("written", "thought", "text", "calls"), ANSWERS)
def test_a_response_of_thought_text_and_calls(client, front, written, thought, text, calls):
    say(front, written)
    whole = client.responses.create(**RESPONSES)
    with client.responses.stream(**RESPONSES) as stream:
        streamed = stream.get_final_response()
    kinds = ["reasoning"] * bool(thought) + ["message"] * bool(text) + ["function_call"] * len(calls)
    for found in (whole, streamed):
        assert [item.type for item in found.output] == kinds
        assert found.output_text.strip() == text
        assert [json.loads(item.arguments) for item in found.output if item.type == "function_call"] == calls
        assert [item.content[0].text.strip() for item in found.output if item.type == "reasoning"] == [thought] * bool(thought)
        assert (found.usage.output_tokens_details.reasoning_tokens > 0) == bool(thought)
        assert found.status == "completed"


def test_arguments_are_streamed_as_they_come(claude, client, front):
    say(front, call(ZURICH))
    events = list(claude.messages.create(**MESSAGES, stream=True))
    parts = [event.delta.partial_json for event in events if event.type == "content_block_delta"]
    assert len(parts) > 3
    assert json.loads("".join(parts)) == ZURICH
    deltas = [
        event.delta for event in client.responses.create(**RESPONSES, stream=True)
        if event.type == "response.function_call_arguments.delta"
    ]  # fmt: skip
    assert len(deltas) > 3
    assert json.loads("".join(deltas)) == ZURICH


def test_the_next_turn_of_messages_says_what_was_thought_called_and_found(claude, front):
    say(front, THOUGHT + "Let me see.\n" + call(ZURICH))
    first = claude.messages.create(**MESSAGES)
    (asked,) = [block for block in first.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": asked.id, "content": [{"type": "text", "text": "12 C"}]}
    turn = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    claude.messages.create(**{**MESSAGES, "messages": turn})
    assert f"<|assistant|>{THOUGHT}Let me see.\n{call(ZURICH)}<|end|>" in prompt_of(front)
    assert prompt_of(front).endswith("<|tool|>12 C<|end|>\n<|assistant|>")
    assert claude.messages.count_tokens(model="demo", messages=turn, tools=MESSAGES["tools"]).input_tokens == len(
        front.engine.submitted[-1][0]
    )


def test_the_next_turn_of_responses_says_what_was_thought_called_and_found(client, front):
    say(front, THOUGHT + "Let me see.\n" + call(ZURICH))
    first = client.responses.create(**RESPONSES)
    (asked,) = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": asked.call_id, "output": "12 C"}
    client.responses.create(**{**RESPONSES, "input": [*HELLO, *first.output, result]})
    assert f"<|assistant|>{THOUGHT}Let me see.\n{call(ZURICH)}<|end|>" in prompt_of(front)
    assert prompt_of(front).endswith("<|tool|>12 C<|end|>\n<|assistant|>")


def test_all_apis_make_one_prompt_of_one_conversation(claude, client, front):
    say(front, "Cold.")
    claude.messages.create(**MESSAGES, system="be kind")
    of_messages = prompt_of(front)
    client.responses.create(**RESPONSES, instructions="be kind")
    of_responses = prompt_of(front)
    tool = {"type": "function", "function": {"name": "weather", "description": "Says it.", "parameters": SCHEMA}}
    client.chat.completions.create(model="demo", messages=[{"role": "system", "content": "be kind"}, *HELLO], tools=[tool])
    assert of_messages == of_responses == prompt_of(front)


def test_a_choice_of_none_shows_no_tools(claude, client, front):
    say(front, "Cold.")
    claude.messages.create(**MESSAGES, tool_choice={"type": "none"})
    assert "TOOLS" not in prompt_of(front)
    client.responses.create(**RESPONSES, tool_choice="none")
    assert "TOOLS" not in prompt_of(front)


def test_one_call_ends_the_answer_where_only_one_is_wanted(claude, client, front):
    say(front, call(ZURICH) + "\n" + call(BASEL))
    found = claude.messages.create(**MESSAGES, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert (blocks_of(found), found.stop_reason) == ([("tool_use", ZURICH)], "tool_use")
    response = client.responses.create(**RESPONSES, parallel_tool_calls=False)
    assert [json.loads(item.arguments) for item in response.output] == [ZURICH]
    assert (response.parallel_tool_calls, response.tools[0].name, response.tool_choice) == (False, "weather", "auto")


def test_thinking_is_turned_off_by_the_template(claude, client, front):
    say(front, "Cold.")
    claude.messages.create(**MESSAGES, thinking={"type": "disabled"})
    assert prompt_of(front).endswith("<think>\n\n</think>\n\n")
    claude.messages.create(**MESSAGES, thinking={"type": "enabled", "budget_tokens": 1024})
    assert prompt_of(front).endswith("<|assistant|>")
    client.responses.create(**RESPONSES, reasoning={"effort": "none"})
    assert prompt_of(front).endswith("<think>\n\n</think>\n\n")


def test_an_answer_that_max_tokens_cuts_within_a_call_has_no_call_to_be_made(claude, client, front):
    say(front, call(ZURICH))
    found = claude.messages.create(**{**MESSAGES, "max_tokens": 14})
    assert found.stop_reason == "max_tokens"
    response = client.responses.create(**{**RESPONSES, "max_output_tokens": 14})
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert not [item for item in response.output if item.type == "function_call" and item.status == "completed"]


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([{"name": "a b", "input_schema": SCHEMA}], "the name 'a b'"),
        ([MESSAGES["tools"][0], MESSAGES["tools"][0]], "twice"),
        ([{"name": "f", "input_schema": {"type": "object", "x": "y" * 600_000}}], "characters"),
    ],
)
def test_tools_that_are_none_are_refused(claude, tools, said):
    with pytest.raises(anthropic.BadRequestError, match=said):
        claude.messages.create(**{**MESSAGES, "tools": tools})


def test_a_result_without_its_call_is_refused(claude, client):
    with pytest.raises(anthropic.BadRequestError, match="none of a call"):
        claude.messages.create(
            **{**MESSAGES, "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}
        )
    with pytest.raises(openai.BadRequestError, match="none of a call"):
        client.responses.create(**{**RESPONSES, "input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]})


class Weather(pydantic.BaseModel):
    city: str
    days: int


def test_answers_are_by_a_schema(claude, client, front):
    say(front, json.dumps(ZURICH))
    plain = {"model": "demo", "max_tokens": 100, "messages": HELLO}
    for ask, found in (
        (lambda: claude.messages.parse(**plain, output_format=Weather), "parsed_output"),
        (lambda: client.responses.parse(model="demo", input="weather?", text_format=Weather), "output_parsed"),
    ):
        before = len(front.engine.grammars)
        assert getattr(ask(), found) == Weather(**ZURICH)
        (grammar,) = front.engine.grammars[before:]
        assert "days" in grammar
    with claude.messages.stream(**plain, output_format=Weather) as stream:
        assert stream.get_final_message().parsed_output == Weather(**ZURICH)
    with client.responses.stream(model="demo", input="weather?", text_format=Weather) as stream:
        assert stream.get_final_response().output_parsed == Weather(**ZURICH)
    client.responses.create(model="demo", input="weather?", text={"format": {"type": "json_object"}})
    assert len(front.engine.grammars) == before + 4


@pytest.mark.parametrize(
    ("of_claude", "of_openai"),
    [({"type": "any"}, "required"), ({"type": "tool", "name": "weather"}, {"type": "function", "name": "weather"})],
)
def test_a_call_that_must_come_is_a_grammar(claude, client, front, of_claude, of_openai):
    say(front, call(ZURICH))
    before = len(front.engine.grammars)
    assert blocks_of(claude.messages.create(**MESSAGES, tool_choice=of_claude)) == [("tool_use", ZURICH)]
    response = client.responses.create(**RESPONSES, tool_choice=of_openai)
    assert [item.name for item in response.output] == ["weather"]
    assert getattr(response.tool_choice, "name", response.tool_choice) in ("weather", "required")
    assert all("weather" in grammar for grammar in front.engine.grammars[before:])
    assert len(front.engine.grammars) == before + 2


def test_a_schema_that_is_none_is_refused_by_its_place(claude, client):
    wrong = {"type": "json_schema", "name": "n", "schema": {"type": "nothing"}}
    with pytest.raises(anthropic.BadRequestError, match="output_config.format"):
        claude.messages.create(**{**MESSAGES, "tools": []}, output_config={"format": wrong})
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="demo", input="x", text={"format": wrong})
    assert caught.value.param == "text.format"


def places_of(found: Any) -> list[tuple[Any, Any]]:
    """Each container and key or index in a body."""
    inner = list(found.items() if isinstance(found, dict) else enumerate(found)) if isinstance(found, dict | list) else []
    return [(found, key) for key, _ in inner] + [place for _, value in inner for place in places_of(value)]


WHOLE: dict[str, Any] = {
    "/v1/messages": {
        **MESSAGES, "max_tokens": 2, "system": [{"type": "text", "text": "be kind"}], "stop_sequences": ["zzz"],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "thinking": {"type": "enabled", "budget_tokens": 9},
        "output_config": {"effort": "low"},
        "messages": [*HELLO, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "x", "signature": ""}, {"type": "text", "text": "x"},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "x"}},
        ]}, {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "is_error": False, "content": [{"type": "text", "text": "x"}]},
            {"type": "text", "text": "so?"},
        ]}],
    },
    "/v1/responses": {
        **RESPONSES, "max_output_tokens": 2, "instructions": "be kind", "tool_choice": "auto", "parallel_tool_calls": True,
        "reasoning": {"effort": "low", "summary": "auto"}, "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "include": ["message.output_text.logprobs"], "top_logprobs": 1,
        "input": [*HELLO, {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "x"}]},
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("path", WHOLE)
def test_one_odd_value_anywhere_in_a_body_is_answered_or_refused_in_the_shape_of_the_api(front, path):
    say(front, "Cold.")
    assert front.post(path, WHOLE[path])[0] == 200
    draw = random.Random(7)
    statuses = []
    for place in range(len(places_of(WHOLE[path]))):
        for value in draw.sample(ODD, 8):
            body = copy.deepcopy(WHOLE[path])
            container, key = places_of(body)[place]
            container[key] = value
            status, answer = front.post(path, body)
            assert status in (200, 400, 404), (body, answer)
            assert status == 200 or answer["error"]["message"], answer
            assert (status != 200 and path == "/v1/messages") == (answer.get("type") == "error"), answer
            statuses.append(status)
    assert 0.05 < statuses.count(200) / len(statuses) < 0.6


def test_the_beta_client_is_answered_too(claude, front):
    say(front, call(ZURICH))
    found = claude.beta.messages.create(**MESSAGES, betas=["interleaved-thinking-2025-05-14"])
    assert blocks_of(found) == [("tool_use", ZURICH)]
