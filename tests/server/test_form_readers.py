"""Readers of messages: what a text says does not depend on how it is cut, what is no call stays
text as it was written, and a text of any length is looked at once.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_moe.engine.request import LENGTH, STOP
from dflash_moe.engine.text import Chunk
from dflash_moe.server.front.call_forms import HARMONY, JSON, NAMED, PYTHON, TAGGED, CallForm, ChatForm, ThoughtForm
from dflash_moe.server.front.call_values import json_of_python, json_of_raw
from dflash_moe.server.front.message_pieces import Message
from dflash_moe.server.front.readers import new_reader
from dflash_moe.server.front.text_source import TextSource

TOOLS = {"f": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}, "g": {}}
THINK = ThoughtForm("<think>", "</think>")
PATHS = {"name_path": ("name",), "arguments_path": ("arguments",)}
HERMES = ChatForm(CallForm(JSON, begin="<tool_call>\n", end="\n</tool_call>", separator="\n", lead="\n", **PATHS), THINK)
MISTRAL = ChatForm(
    CallForm(JSON, section_begin="[TOOL_CALLS][", section_end="]", separator=", ", id_path=("id",), has_short_ids=True, **PATHS)
)
LLAMA = ChatForm(CallForm(JSON, name_path=("name",), arguments_path=("parameters",), is_parallel=False))
KIMI = ChatForm(
    CallForm(NAMED, section_begin="<|calls|>", section_end="<|calls_end|>", begin="<|call|>functions.", end="<|end|>",
             middle="<|args|>", id_prefix="functions."), THINK,
)  # fmt: skip
CODER = ChatForm(
    CallForm(TAGGED, begin="<tool_call>\n<function=", end="\n</function>\n</tool_call>", separator="\n", lead="\n",
             name_end=">\n", key_begin="<parameter=", key_end=">\n", value_end="\n</parameter>\n")
)  # fmt: skip
LFM = ChatForm(CallForm(PYTHON, section_begin="<|start|>[", section_end="]<|end|>", separator=", "), THINK)
OSS = ChatForm(CallForm(HARMONY, is_parallel=False), ThoughtForm("", "", "thinking"))
FORMS = {"hermes": HERMES, "mistral": MISTRAL, "llama": LLAMA, "kimi": KIMI, "coder": CODER, "lfm": LFM, "oss": OSS}


def read(form: ChatForm, parts, *, reason: str = STOP, tools=TOOLS, **more) -> Message:
    found = Message(new_reader(form, tools, **more), is_single=more.get("is_single", False))
    for part in parts:
        found.push(Chunk(part, ()))
    found.push(Chunk("", (), finish_reason=reason))
    return found


def said(found: Message) -> tuple:
    return found.reasoning, found.content, [(call.name, call.arguments) for call in found.calls]


# -- calls -----------------------------------------------------------------------------------------
HERMES_CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
WRITTEN = [
    (HERMES, "Hi.\n" + HERMES_CALL, "Hi.", [("f", '{"a": "x"}')]),
    (HERMES, HERMES_CALL + "\n" + HERMES_CALL, "", [("f", '{"a": "x"}')] * 2),
    (HERMES, HERMES_CALL + " and " + HERMES_CALL + "\n", " and ", [("f", '{"a": "x"}')] * 2),
    (HERMES, HERMES_CALL[:-12], "", [("f", '{"a": "x"}')]),
    (HERMES, '<tool_call>{"arguments":{"n":1} , "name" :"g", "x": [1, "}"]}</tool_call>', "", [("g", '{"n":1}')]),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"b": [1, {}]}}]', "",
     [("f", "{}"), ("g", '{"b": [1, {}]}')]),
    (LLAMA, ' {"name": "f", "parameters": {"a": "1"}}', "", [("f", '{"a": "1"}')]),
    (KIMI, '<think>t</think>So.<|calls|><|call|>functions.f:0<|args|>{"a": "<|end|>"}<|end|><|calls_end|>', "So.",
     [("f", '{"a": "<|end|>"}')]),
    (CODER, "<tool_call>\n<function=f>\n<parameter=a>\n12\n\n</parameter>\n<parameter=n>\n7\n</parameter>\n</function>\n"
     "</tool_call>", "", [("f", '{"a": "12\\n", "n": 7}')]),
    (CODER, "<tool_call>\n<function=g>\n<parameter=q>\n{'k': [True, None]}\n</parameter>\n</function>\n</tool_call>", "",
     [("g", '{"q": {"k": [true, null]}}')]),
    (CODER, "<tool_call><function=g></function></tool_call>", "", [("g", "{}")]),
    (LFM, "<|start|>[f(a='it\\'s', n=-1), g()]<|end|>ok", "ok", [("f", '{"a": "it\'s", "n": -1}'), ("g", "{}")]),
    (OSS, '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "b"}<|call|>', "", [("f", '{"a": "b"}')]),
    (OSS, ' to=functions.f<|channel|>commentary json<|message|>{"a": "b"}<|call|>', "", [("f", '{"a": "b"}')]),
    (OSS, "<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>commentary<|message|>Let me.<|end|>"
     "<|start|>assistant<|channel|>commentary to=functions.g<|message|>{}<|call|>", "Let me.", [("g", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), WRITTEN)
def test_calls_are_read_wherever_they_are_cut(form, text, content, calls):
    for parts in ([text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))):
        found = read(form, parts)
        assert said(found)[1:] == (content, calls), parts
        assert found.finish_reason == "tool_calls"
        assert len({call.call_id for call in found.calls}) == len(calls)


NO_CALLS = [
    (HERMES, '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": "text"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "more": [1,], "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "more": nil, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x'),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}} but no'),
    (HERMES, "Write <tool_call> and \n</tool_call>, then <tool_cal"),
    (HERMES, "text\n\n<tool_call>\n"),
    (HERMES, '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 100 + "1" + "}" * 100 + "}</tool_call>"),
    (MISTRAL, '[TOOL_CALLS][{"name": "unknown", "arguments": {}}]'),
    (LLAMA, 'See: {"name": "f", "parameters": {}}'),
    (LLAMA, '{"title": "f", "parameters": {}}'),
    (KIMI, "<|calls|><|call|>functions.f<|args|>{}<|end|><|calls_end|>"),
    (KIMI, "<|calls|><|call|>functions.h:0<|args|>{}<|end|><|calls_end|>"),
    (CODER, "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>"),
    (CODER, "<tool_call>\n<function=" + "f" * 100 + ">\n</function>\n</tool_call>"),
    (LFM, "<|start|>[f('positional')]<|end|>"),
    (LFM, "<|start|>[f(a=open('x'))]<|end|>"),
    (LFM, "<|start|>[f(a=1"),
    (OSS, "<|channel|>commentary to=functions.f<|message|>{broken<|call|>"),
]


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_what_is_no_call_stays_text_as_it_was_written(form, text):
    for parts in ([text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))):
        found = read(form, parts)
        assert said(found)[1:] == (text, []), parts
        assert found.finish_reason == STOP


@pytest.mark.parametrize(("form", "call", "none"), [
    (HERMES, HERMES_CALL, '<tool_call>\n{"name": "f", "arguments": {x}}\n</tool_call>'),
    (OSS, "<|channel|>commentary to=functions.f<|message|>{}<|call|>",
     "<|channel|>commentary to=functions.f<|message|>{x}<|call|>"),
])  # fmt: skip
def test_a_call_that_begins_and_breaks_in_one_piece_is_text_alone(form, call, none):
    # Several tokens come at once where drafts were right.
    piece = new_reader(form, TOOLS).push(call + none + call, is_last=True)
    assert piece.content == none
    assert [(part.index, part.name, part.is_broken) for part in piece.calls] == [(0, "f", False), (1, "f", False)]
    reader = new_reader(form, TOOLS)
    half = none.index("x")
    assert [part.is_broken for part in reader.push(none[:half], is_last=False).calls] == [False]
    found = [(part.index, part.is_broken) for part in reader.push(none[half:] + call, is_last=True).calls]
    assert found == [(0, True), (1, False)]


def test_a_call_behind_what_is_none_is_found():
    found = read(HERMES, ["<tool_call> is a mark. ", HERMES_CALL, '\n<tool_call>{"name": "no"}</tool_call>'])
    assert said(found) == ("", '<tool_call> is a mark. \n<tool_call>{"name": "no"}</tool_call>', [("f", '{"a": "x"}')])


def test_a_call_that_a_limit_cuts_is_none():
    found = read(HERMES, [HERMES_CALL[:-22]], reason=LENGTH)
    assert (found.content, found.calls, found.finish_reason) == (HERMES_CALL[:-22], [], LENGTH)


def test_without_tools_nothing_is_a_call_and_with_one_call_the_rest_is_dropped():
    assert said(read(HERMES, [HERMES_CALL], tools={})) == ("", HERMES_CALL, [])
    found = read(HERMES, list(HERMES_CALL + "\n" + HERMES_CALL + " more"), is_single=True)
    assert said(found) == ("", "", [("f", '{"a": "x"}')])
    assert found.finish_reason == "tool_calls"


def test_more_calls_than_are_allowed_are_text():
    found = read(HERMES, [HERMES_CALL * 130])
    assert (len(found.calls), found.content) == (128, HERMES_CALL * 2)


def test_ids_are_the_models_own_where_it_writes_them_and_as_the_template_wants_them():
    (call,) = read(MISTRAL, ['[TOOL_CALLS][{"id": "abc123DEF", "name": "f", "arguments": {}}]']).calls
    assert call.call_id == "abc123DEF"
    (call,) = read(MISTRAL, ['[TOOL_CALLS][{"name": "f", "arguments": {}}]']).calls
    assert (len(call.call_id), call.call_id.isalnum()) == (9, True)
    (call,) = read(KIMI, ["<|calls|><|call|>functions.g:4<|args|>{}<|end|><|calls_end|>"]).calls
    assert call.call_id == "functions.g:4"
    (call,) = read(HERMES, [HERMES_CALL]).calls
    assert call.call_id.startswith("call_")


def test_arguments_come_as_they_are_written():
    reader = new_reader(HERMES, TOOLS)
    first = reader.push('<tool_call>{"name": "f", "arguments": {"a": "one', is_last=False)
    (call,) = first.calls
    assert (call.name, call.arguments, first.content) == ("f", '{"a": "one', "")
    assert [part.arguments for part in reader.push(" two", is_last=False).calls] == [" two"]
    assert not reader.has_called
    assert [part.arguments for part in reader.push('"}}</tool_call>', is_last=False).calls] == ['"}']
    assert reader.has_called


def test_text_is_held_back_only_while_it_may_be_a_mark():
    reader = new_reader(HERMES, TOOLS)
    assert reader.push("a < b <tool", is_last=False).content == "a < b "
    assert reader.push("box", is_last=False).content == "<toolbox"


# -- any text --------------------------------------------------------------------------------------
MARKS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[", "]", ", ", "\n", " ", "<think>", "</think>", '{"name": "f"',
    ', "arguments": ', '"parameters": ', "{", "}", '"', "\\", "<|calls|>", "<|call|>", "functions.", "f", ":0", "<|args|>",
    "<|end|>", "<|calls_end|>", "<function=", ">", "<parameter=", "</parameter>", "</function>", "<|start|>", "f(", "a=", "'x'",
    ")", "assistant", "<|channel|>", "analysis", "final", "commentary", " to=functions.f", "<|message|>", "<|return|>", "1",
    "true", HERMES_CALL,
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(MARKS) | st.text(max_size=4), max_size=25).map("".join)


@pytest.mark.parametrize("name", FORMS)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=8), is_thinking=st.booleans())
def test_what_a_text_says_does_not_depend_on_its_cuts(name, text, cuts, is_thinking):
    whole = read(FORMS[name], [text], is_thinking=is_thinking)
    places = sorted({min(cut, len(text)) for cut in cuts})
    parts = [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert said(read(FORMS[name], parts, is_thinking=is_thinking)) == said(whole)
    assert said(read(FORMS[name], list(text), is_thinking=is_thinking)) == said(whole)
    for call in whole.calls:
        assert isinstance(json.loads(call.arguments), dict)
        assert call.name in TOOLS
    if not whole.calls and not whole.reasoning and name in ("mistral", "llama", "coder"):
        assert whole.content == text


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>", '<tool_call>{"name": "f", "arguments": {"a": "x', "{", " ", "[TOOL_CALLS]", "<", "<|start|>", '"', "\\",
        "<|channel|>analysis<|message|>", "<|start|>[f(a=(", "<|calls|>", "<tool_call><function=f>",
    ],
)  # fmt: skip
def test_each_character_is_looked_at_a_bounded_number_of_times(name, unit, monkeypatch):
    taken = 0
    feed = TextSource.feed

    def counted(source, text, *, is_last):
        nonlocal taken
        feed(source, text, is_last=is_last)
        taken += len(source._text)

    monkeypatch.setattr(TextSource, "feed", counted)
    text = unit * (4_000 // len(unit))
    read(FORMS[name], list(text))
    # What is held back is looked at again: at most the longest mark, and a name or a header.
    assert taken <= 80 * len(text)


# -- values ----------------------------------------------------------------------------------------
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=8) | st.floats(-9, 9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=8,
    )
)
def test_values_as_python_writes_them_become_json(value):
    found = json_of_python(repr(value))
    assert found is not None
    assert json.loads(found) == value


@pytest.mark.parametrize(
    "text", ["", "open('x')", "a", "[1", "1 2", "{1: 2}", "'a' 'b'", "lambda: 1", "__import__('os')", "f''", "[1e999]"]
)
def test_what_is_no_literal_is_none(text):
    assert json_of_python(text) is None


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("12", {"type": "string"}, "12"), ("12", {"type": "integer"}, 12), ("12", {}, 12), ("True", {"type": "boolean"}, True),
        ("None", {"type": ["string", "null"]}, None),
        ("12", {"type": ["string", "null"]}, "12"), ("x y", {"type": "integer"}, "x y"),
        (" padded ", {}, " padded "), ("[1, 2]", {"anyOf": [{"type": "array"}, {"type": "null"}]}, [1, 2]),
        ("{'a': True}", {"type": "object"}, {"a": True}), ("{", {"type": 5, "anyOf": 3, "oneOf": [None, {"type": [4]}]}, "{"),
    ],
)  # fmt: skip
def test_a_raw_value_has_the_type_that_its_schema_says(text, schema, value):
    assert json.loads(json_of_raw(text, {"properties": {"k": schema}}, "k")) == value
