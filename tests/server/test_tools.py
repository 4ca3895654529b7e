"""Tools and thoughts over HTTP, with OpenAI's own client before a front whose model has a published
template, and an engine that writes what the test says.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("openai")
pytest.importorskip("jinja2")

import openai

from tests.server.scripted_engine import ScriptedEngine
from tests.server.served import LARGE, Served, ids_of, prompt_of, served, tokenizer
from tests.server.template_cases import TOKENS, form_of, text_of

ASKED = [{"role": "user", "content": "How is the weather?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'
THOUGHT = "<think>\nLet me look.\n</think>\n\n"


class Script:
    """What the engine answers, which each test sets."""

    def __init__(self) -> None:
        self.text = "Hello."

    def __call__(self, _prompt: list[int], _choice: int) -> list[int]:
        # Each character is a token of its own, as no tokenizer would have it: so ids that come back
        # are seen to be those that were written.
        return [token for character in self.text for token in ids_of(character)]


def told(name: str) -> dict[str, object]:
    return {
        "template": text_of(name), "special_tokens": TOKENS, "no_template": "", "chat_form": form_of(name).facts(),
        "max_model_len": 4096,
    }  # fmt: skip


def client_of(front: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0, timeout=60)


@contextmanager
def asked(name: str) -> Iterator[tuple[Served, openai.OpenAI, Script]]:
    script = Script()
    with served(ScriptedEngine(script), told=told(name)) as front, client_of(front) as client:
        yield front, client, script


@pytest.fixture(scope="module")
def qwen_front() -> Iterator[tuple[Served, Script]]:
    script = Script()
    with served(ScriptedEngine(script), told=told("qwen3")) as front:
        # The processes that read, render and compile what was sent live as long as all tests.
        front.post("/v1/chat/completions", {"messages": ASKED, "max_tokens": 1, "guided_regex": "a", **LARGE})
        yield front, script


@pytest.fixture
def qwen(qwen_front) -> Iterator[tuple[Served, openai.OpenAI, Script]]:
    front, script = qwen_front
    with client_of(front) as client:
        yield front, client, script


def streamed(client: openai.OpenAI, **more):
    """What the parts of a stream say together: text, thought, calls, and the reasons of its end."""
    content, thought, calls, reasons = "", "", {}, []
    for chunk in client.chat.completions.create(model="demo", messages=ASKED, stream=True, **more):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            thought += (choice.delta.model_extra or {}).get("reasoning_content") or ""
            for part in choice.delta.tool_calls or ():
                if part.function.name:
                    assert part.index not in calls
                    assert (part.type, part.id.startswith("call_")) == ("function", True)
                    calls[part.index] = [part.function.name, ""]
                else:
                    assert (part.id, part.type) == (None, None)
                calls[part.index][1] += part.function.arguments
            reasons += [choice.finish_reason] if choice.finish_reason else []
    return content, thought, [tuple(call) for call in calls.values()], reasons


def test_calls_thoughts_and_text_are_apart(qwen):
    _, client, script = qwen
    script.text = THOUGHT + "One moment.\n" + CALL % "Bern" + "\n" + CALL % "Rome"
    found = client.chat.completions.create(model="demo", messages=ASKED, tools=[WEATHER])
    (choice,) = found.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "One moment.")
    assert choice.message.model_extra["reasoning_content"] == "Let me look."
    assert [(call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
        ("function", "get_weather", '{"city": "Bern"}'), ("function", "get_weather", '{"city": "Rome"}'),
    ]  # fmt: skip
    assert len({call.id for call in choice.message.tool_calls}) == 2
    num_thought = found.usage.completion_tokens_details.reasoning_tokens
    assert len("Let me look.") <= num_thought <= len(THOUGHT)
    calls = [("get_weather", '{"city": "Bern"}'), ("get_weather", '{"city": "Rome"}')]
    assert streamed(client, tools=[WEATHER], tool_choice="auto") == ("One moment.", "Let me look.", calls, ["tool_calls"])


def test_only_a_call_leaves_no_content(qwen):
    _, client, script = qwen
    script.text = CALL % "Bern"
    message = client.chat.completions.create(model="demo", messages=ASKED, tools=[WEATHER]).choices[0].message
    assert (message.content, len(message.tool_calls)) == (None, 1)
    assert "reasoning_content" not in (message.model_extra or {})


@pytest.mark.parametrize("more", [{}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}])
def test_without_tools_a_text_that_looks_like_a_call_is_text(qwen, more):
    front, client, script = qwen
    script.text = CALL % "Bern"
    message = client.chat.completions.create(model="demo", messages=ASKED, **more).choices[0].message
    assert (message.content, message.tool_calls) == (script.text, None)
    assert "get_weather" not in prompt_of(front)
    assert streamed(client, **more) == (script.text, "", [], ["stop"])


def test_what_is_no_call_is_text_in_a_whole_answer(qwen):
    _, client, script = qwen
    script.text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": Bern}}\n</tool_call>'
    choice = client.chat.completions.create(model="demo", messages=ASKED, tools=[WEATHER]).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (script.text, None, "stop")


def test_without_parallel_calls_the_first_one_ends_the_answer(qwen):
    front, client, script = qwen
    script.text = CALL % "Bern" + ("\n" + CALL % "Rome") * 20
    found = client.chat.completions.create(model="demo", messages=ASKED, tools=[WEATHER], parallel_tool_calls=False)
    assert [call.function.arguments for call in found.choices[0].message.tool_calls] == ['{"city": "Bern"}']
    assert found.choices[0].finish_reason == "tool_calls"
    assert front.engine.cancelled
    assert streamed(client, tools=[WEATHER], parallel_tool_calls=False) == (
        "", "", [("get_weather", '{"city": "Bern"}')], ["tool_calls"]
    )  # fmt: skip


def test_choices_are_read_apart_and_logprobs_are_of_all_tokens(qwen):
    _, client, script = qwen
    script.text = THOUGHT + CALL % "Bern"
    found = client.chat.completions.create(model="demo", messages=ASKED, tools=[WEATHER], n=2, logprobs=True)
    assert [len(choice.message.tool_calls) for choice in found.choices] == [1, 1]
    assert [len(choice.logprobs.content) for choice in found.choices] == [len(script.text)] * 2
    chunks = list(client.chat.completions.create(model="demo", messages=ASKED, tools=[WEATHER], logprobs=True, stream=True))
    listed = [one for chunk in chunks for choice in chunk.choices if choice.logprobs for one in choice.logprobs.content]
    assert len(listed) == len(script.text)


def test_thoughts_can_be_left_out_and_a_prompt_may_begin_or_end_them(qwen):
    front, client, script = qwen
    script.text = THOUGHT + "Fine."
    found = client.chat.completions.create(model="demo", messages=ASKED, extra_body={"include_reasoning": False})
    assert found.choices[0].message.content == "Fine."
    assert "reasoning_content" not in (found.choices[0].message.model_extra or {})
    assert found.usage.completion_tokens_details.reasoning_tokens > 0
    script.text = "Fine."
    body = {"chat_template_kwargs": {"enable_thinking": False}}
    assert client.chat.completions.create(model="demo", messages=ASKED, extra_body=body).choices[0].message.content == "Fine."
    assert prompt_of(front).endswith("<think>\n\n</think>\n\n")


def test_a_prompt_that_begins_the_thought_is_seen():
    with asked("qwq-32b") as (_, client, script):
        script.text = "Let me look.\n</think>\n\nFine."
        message = client.chat.completions.create(model="demo", messages=ASKED).choices[0].message
        assert (message.content, message.model_extra["reasoning_content"]) == ("Fine.", "Let me look.")
        script.text = "No end of it"
        message = client.chat.completions.create(model="demo", messages=ASKED).choices[0].message
        assert (message.content, message.model_extra["reasoning_content"]) == ("", "No end of it")


def test_a_result_goes_on_from_the_very_ids_of_the_call(qwen):
    front, client, script = qwen
    script.text = THOUGHT + CALL % "Bern"
    message = client.chat.completions.create(model="demo", messages=ASKED, tools=[WEATHER]).choices[0].message
    prompt, _, _ = front.engine.submitted[-1]
    (call,) = message.tool_calls
    back = message.model_dump()
    turns = [*ASKED, back, {"role": "tool", "tool_call_id": call.id, "content": "It rains."}]
    script.text = "Rain."
    found = client.chat.completions.create(model="demo", messages=turns, tools=[WEATHER])
    assert found.choices[0].message.content == "Rain."
    asked_next, _, _ = front.engine.submitted[-1]
    written = [*prompt, *(token for character in THOUGHT + CALL % "Bern" for token in ids_of(character))]
    assert asked_next[: len(written)] == written
    assert "It rains." in tokenizer().decode(asked_next)


def test_tokenize_counts_tools(qwen):
    front, _, _ = qwen
    body = {"messages": ASKED}
    plain = front.post("/tokenize", body)[1]["count"]
    status, found = front.post("/tokenize", {**body, "tools": [WEATHER]})
    assert (status, found["count"] > plain + 20) == (200, True)
    assert "get_weather" in tokenizer().decode(found["tokens"])


def test_a_model_whose_calls_are_not_proven_says_why_and_chats():
    with asked("gemma-3") as (front, client, script):
        script.text = "Fine."
        assert client.chat.completions.create(model="demo", messages=ASKED).choices[0].message.content == "Fine."
        with pytest.raises(openai.BadRequestError, match=r"tools.*says nothing of tools") as caught:
            client.chat.completions.create(model="demo", messages=ASKED, tools=[WEATHER])
        assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        answered = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]
        assert front.post("/v1/chat/completions", {"messages": answered})[0] == 400


@pytest.mark.parametrize(
    ("name", "text", "content", "thought"),
    [
        ("gpt-oss", "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary "
         'to=functions.get_weather <|constrain|>json<|message|>{"city": "Bern"}<|call|>', None, "Look."),
        ("qwen3-coder", "Well.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n"
         "</tool_call>", "Well.", None),
        ("mistral-nemo", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Bern"}, "id": "abcdefgh1"}]', None, None),
        ("deepseek-v3.1", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
         '{"city": "Bern"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', None, None),
        ("lfm2.5", "<|tool_call_start|>[get_weather(city='Bern')]<|tool_call_end|>", None, None),
    ],
)  # fmt: skip
def test_models_of_other_forms_call_and_are_answered(name, text, content, thought):
    with asked(name) as (front, client, script):
        script.text = text
        choice = client.chat.completions.create(model="demo", messages=ASKED, tools=[WEATHER]).choices[0]
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Bern"})
        assert (choice.message.content, choice.finish_reason) == (content, "tool_calls")
        assert (choice.message.model_extra or {}).get("reasoning_content") == thought
        turns = [*ASKED, choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "It rains."}]
        script.text = "<|channel|>final<|message|>Rain." if name == "gpt-oss" else "Rain."
        found = client.chat.completions.create(model="demo", messages=turns, tools=[WEATHER])
        assert found.choices[0].message.content == "Rain."
        assert "It rains." in prompt_of(front)


def test_a_template_for_tools_is_rendered_where_there_are_tools():
    script = Script()
    other = {**told("qwen2.5"), "template": "plain {{ messages[0].content }}", "tool_template": text_of("qwen2.5")}
    with served(ScriptedEngine(script), told=other) as front:
        for body, is_shown in (({}, False), ({"tools": [WEATHER]}, True)):
            assert front.post("/v1/chat/completions", {"messages": ASKED, **body})[0] == 200
            prompt = prompt_of(front)
            assert (prompt.startswith("plain"), "get_weather" in prompt) == (not is_shown, is_shown)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_must_come_is_a_grammar_for_the_engine(qwen, choice):
    front, client, _ = qwen
    client.chat.completions.create(model="demo", messages=ASKED, tools=[WEATHER], tool_choice=choice)
    assert "get_weather" in front.engine.grammars[-1]


def function(**changed):
    return {"type": "function", "function": {"name": "f", **changed}}


CALLED = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": {}}, "tools"), ({"tools": [5]}, "tools"), ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [function(name="")]}, "tools"), ({"tools": [function(name="a b")]}, "tools"),
        ({"tools": [function(name="a" * 65)]}, "tools"), ({"tools": [function(parameters=[])]}, "tools"),
        ({"tools": [function(description=5)]}, "tools"), ({"tools": [function(), function()]}, "tools"),
        ({"tools": [function(name=f"f{place}") for place in range(129)]}, "tools"),
        ({"tools": [function(description="x" * 600_000)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"), ({"tools": [function()], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [function()], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [function()], "tool_choice": []}, "tool_choice"), ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"include_reasoning": 1}, "include_reasoning"), ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"messages": [*ASKED, {"role": "tool", "content": "x", "tool_call_id": "none"}]}, "messages"),
        ({"messages": [*ASKED, {"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [*ASKED, {"role": "assistant", "tool_calls": 5}]}, "messages"),
        ({"messages": [*ASKED, {"role": "assistant", "tool_calls": [5]}]}, "messages"),
        ({"messages": [*ASKED, {"role": "assistant", "tool_calls": [CALLED] * 129}]}, "messages"),
        ({"messages": [*ASKED, {"role": "assistant", "tool_calls": [{**CALLED, "function": {"name": "f", "arguments": "{"}}]}]},
         "messages"),
        ({"messages": [*ASKED, {"role": "assistant", "tool_calls": [{**CALLED, "id": 5}]}]}, "messages"),
    ],
)  # fmt: skip
def test_what_is_no_tool_or_no_call_is_refused_by_the_name_of_its_field(qwen, body, param):
    front, _, _ = qwen
    status, found = front.post("/v1/chat/completions", {"messages": ASKED, **body})
    assert (status, found["error"]["param"]) == (400, param)
