"""Forms that answers are to keep to, at the front: what is honoured goes to the engine as a
grammar, and everything else is 400 in the words of the library, soon, whatever a schema would cost.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("llguidance")

from bench.campaigns.serving_interference import WORST_FORMS
from dflash_moe.server.front import structured_output
from dflash_moe.server.front.call_forms import JSON, PYTHON, CallForm, ChatForm, ThoughtForm
from dflash_moe.server.front.chat_request import ChatRequest
from dflash_moe.server.front.structured_fields import MAX_SOURCE_BYTES, source_of
from tests.server.served import LARGE, Served, served

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, TEXT: {"prompt": "def"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def front() -> Iterator[Served]:
    with served() as found:
        # The processes that read, render and compile what was sent live as long as all tests.
        found.post(CHAT, {**ASKED[CHAT], "max_tokens": 1, "guided_json": {}, **LARGE})
        yield found


def ask_once(front: Served, form: dict, path: str = TEXT) -> tuple[int, dict]:
    return front.post(path, {**ASKED[path], **form, "max_tokens": 2})


def ask(front: Served, form: dict, path: str = TEXT) -> tuple[int, dict]:
    """Asks again where a busy machine did not compile the form in time, as the answer says one
    should.
    """
    for _ in range(30):
        status, found = ask_once(front, form, path)
        if status != 503 or found["error"]["code"] != "busy":
            break
    return status, found


def refused(front: Served, form: dict, path: str = TEXT) -> dict:
    """The error of a form that is refused. The next one is honoured."""
    status, found = ask(front, form, path)
    assert status == 400, found
    assert ask(front, {"guided_json": SCHEMA})[0] == 200
    return found["error"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA, "regex": None}}, {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"regex": "a+"}}, {"structured_outputs": {"choice": ["a", "b"]}},
        {"structured_outputs": {"grammar": 'root ::= "a"'}}, {"guided_json": json.dumps(SCHEMA)}, {"guided_regex": "[0-9]+"},
        {"guided_choice": ["yes", "no"]}, {"guided_grammar": 'start: "a" | "b"'}, {"json_schema": SCHEMA},
        {"json_schema": {}}, {"grammar": 'root ::= "a" root?'},
    ],
    ids=str,
)  # fmt: skip
def test_each_form_goes_to_the_engine_as_a_grammar(front, path, form):
    known = len(front.engine.grammars)
    status, found = ask(front, form, path)
    assert status == 200, found
    (grammar,) = front.engine.grammars[known:]
    assert "grammars" in grammar or "start:" in grammar
    assert callable(front.engine.submitted[-1][1].token_mask)


@pytest.mark.parametrize(
    "form",
    [
        {}, {"response_format": {"type": "text"}}, {"response_format": None}, {"structured_outputs": {}}, {"grammar": ""},
        {"guided_choice": []}, {"structured_outputs": {"json": None, "json_object": False}},
    ],
    ids=str,
)  # fmt: skip
def test_no_form_is_no_grammar(front, form):
    known = len(front.engine.grammars)
    assert ask(front, form, CHAT)[0] == 200
    assert front.engine.grammars[known:] == []
    assert front.engine.submitted[-1][1].token_mask is None


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"guided_json": {"type": "nonsense"}}, "Invalid type: nonsense"),
        ({"guided_json": "{"}, "EOF"),
        ({"guided_json": {"not": {"type": "string"}}}, 'Unimplemented keys: ["not"]'),
        ({"guided_json": {"$ref": "https://example.com/schema.json"}}, "does not fetch resources"),
        ({"guided_json": {"$ref": "file:///etc/passwd"}}, "does not fetch resources"),
        ({"guided_json": {"enum": []}}, "Unsatisfiable schema"),
        ({"guided_json": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
        ({"guided_regex": "("}, "unclosed group"),
        ({"guided_regex": "(?=a)b"}, "look-around"),
        ({"guided_grammar": "start: b"}, "b"),
        ({"grammar": 'root ::= "a'}, "GBNF"),
        ({"grammar": "root ::= root"}, "no text fits it"),
        ({"grammar": "(" * 20_000}, "GBNF"),
        ({"guided_grammar": "start: <|no_such_token|>"}, "unknown special token"),
        ({"guided_json": json.dumps({"items": {}}).replace("{}", '{"items": ' * 4000 + "{}" + "}" * 4000)}, "recursion limit"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_form_is_refused_in_the_words_of_the_library(front, form, words):
    error = refused(front, form)
    assert words in error["message"]
    assert error["param"] == next(iter(form))


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": 5}, {"response_format": {}}, {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}}, {"response_format": {"type": "json_schema", "json_schema": {}}},
        {"response_format": {"type": "json_schema", "json_schema": 5}}, {"structured_outputs": []},
        {"structured_outputs": {"json": {}, "regex": "a"}}, {"structured_outputs": {"structural_tag": "x"}},
        {"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, {"guided_json": 5}, {"guided_json": True},
        {"guided_regex": {}}, {"guided_choice": "yes"}, {"guided_choice": ["yes", 5]}, {"guided_choice": [""]},
        {"guided_grammar": []}, {"grammar": 5}, {"json_schema": []}, {"guided_regex": "\ud800"},
        {"guided_choice": ["\udfff"]}, {"guided_json": {"const": "\ud800"}},
    ],
    ids=str,
)  # fmt: skip
def test_values_of_other_types_are_refused_by_name(front, form):
    assert refused(front, form)["param"] == next(iter(form))


def test_two_forms_are_one_too_many(front):
    found = refused(front, {"guided_json": SCHEMA, "response_format": {"type": "json_object"}})
    assert found["param"] == "guided_json"
    assert "response_format" in found["message"]


def test_sources_end_at_64_kib(front):
    fits = {"const": "x" * (MAX_SOURCE_BYTES - len('{"const":""}'))}
    assert ask(front, {"guided_json": fits})[0] == 200
    for form in (
        {"guided_json": {"const": fits["const"] + "x"}}, {"guided_json": {"const": "é" * 40_000}},
        {"guided_regex": "x" * 70_000}, {"guided_choice": ["x" * 100] * 700}, {"grammar": "#" * 70_000},
        {"guided_json": {"a": ["x" * 100] * 10_000}},
    ):  # fmt: skip
        assert f"more than {MAX_SOURCE_BYTES} bytes" in refused(front, form)["message"]


# What takes minutes, gigabytes or all of a stack in the library.
HOSTILE = dict(zip(("time", "memory", "stack"), WORST_FORMS, strict=True))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_form_that_takes_all_of_something_is_stopped_alone(front, name):
    status, found = ask_once(front, HOSTILE[name])
    # A busy machine does not give it its second of processor time within two.
    words = {400: "was stopped", 503: "was not compiled within"}[status]
    assert words in found["error"]["message"]
    assert ask(front, {"guided_json": SCHEMA})[0] == 200


def test_many_of_them_are_each_answered_and_others_too(front):
    front_pid = front.keeper.pid
    with ThreadPoolExecutor(16) as threads:
        hostile = [threads.submit(ask_once, front, HOSTILE["time"]) for _ in range(12)]
        plain = threads.submit(ask, front, {})
        assert plain.result()[0] == 200
        # Those that wait too long for their turn are told to come again.
        assert {one.result()[0] for one in hostile} <= {400, 503}
    assert ask(front, {"guided_json": SCHEMA})[0] == 200
    assert front.keeper.pid == front_pid


def test_a_model_whose_texts_have_no_end_takes_no_form():
    with served(told={"end_ids": []}) as found:
        assert "no token that ends a text" in ask(found, {"guided_regex": "a"})[1]["error"]["message"]


def test_a_chat_without_a_form_builds_no_grammar(monkeypatch):
    monkeypatch.setattr(structured_output, "AnswerGrammar", None)
    output = SimpleNamespace(_special={})
    assert asyncio.run(structured_output.StructuredOutput.of_chat(output, {}, ChatRequest([], {}), ChatForm(), "")) == ""


def test_sources_of_one_body_have_the_order_of_their_fields():
    assert source_of({"messages": []}) is None
    name, source = source_of({"guided_choice": ["é"]})
    assert (name, source.kind, json.loads(source.text)) == ("guided_choice", "choice", ["é"])


TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools and tools|length }}<think>"
FORM = ChatForm(
    CallForm(JSON, begin="<tool_call>\n", end="\n</tool_call>", separator="\n", name_path=("name",), arguments_path=("args",)),
    ThoughtForm("<think>", "</think>"),
)


def tool(name: str, **more: Any) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


@pytest.fixture(scope="module")
def calling() -> Iterator[Served]:
    with served(told={"template": TEMPLATE, "chat_form": FORM.facts()}) as found:
        found.post(CHAT, {**ASKED[CHAT], "max_tokens": 1, "guided_json": {}})
        yield found


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"tools": [tool("f"), tool("g")], "tool_choice": "required"}, ["thought calls", "more: (", "call_1"]),
        (
            {"tools": [tool("f"), tool("g")], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            ["call_0", '"\\"g\\""'],
        ),
        ({"tools": [tool("f")], "tool_choice": "required", "parallel_tool_calls": False}, ['more: ""']),
        ({"tools": [tool("f", strict=True), tool("g")]}, ["(before behind)* TEXT", '"lenient": false', '"lenient": true']),
        ({"tools": [tool("f")], "response_format": {"type": "json_object"}}, ["@answer | calls"]),
        ({"tools": [tool("f")], "response_format": {"type": "json_object"}, "tool_choice": "none"}, ["thought  @answer"]),
        ({"response_format": {"type": "json_object"}}, ["thought  @answer"]),
        ({"tools": [tool("f", strict=True)], "tool_choice": "none"}, None),
        ({"tools": [tool("f")]}, None),
    ],
    ids=str,
)
def test_tools_make_grammars_of_the_form_of_the_model(calling, fields, parts):
    known = len(calling.engine.grammars)
    status, found = ask(calling, fields, CHAT)
    assert status == 200, found
    grammars = calling.engine.grammars[known:]
    assert len(grammars) == (parts is not None)
    for part in parts or ():
        assert json.dumps(part)[1:-1] in grammars[0] or part in grammars[0], (part, grammars)


def test_calls_that_no_grammar_describes_are_refused_by_name():
    form = ChatForm(CallForm(PYTHON, begin="[", end="]"))
    with served(told={"template": TEMPLATE, "chat_form": form.facts()}) as found:
        for fields, param in (
            ({"tools": [tool("f")], "tool_choice": "required"}, "tool_choice"), ({"tools": [tool("f", strict=True)]}, "tools"),
            ({"tools": [tool("f")], "response_format": {"type": "json_object"}}, "response_format"),
        ):  # fmt: skip
            status, answer = ask(found, fields, CHAT)
            assert (status, answer["error"]["param"]) == (400, param)
            assert "as Python writes them" in answer["error"]["message"]
        assert ask(found, {"tools": [tool("f")]}, CHAT)[0] == 200


def test_a_tool_whose_schema_is_none_is_refused_in_the_words_of_the_library(calling):
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"type": "x"}, "strict": True}}
    status, answer = ask(calling, {"tools": [wrong]}, CHAT)
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert "type" in answer["error"]["message"]
