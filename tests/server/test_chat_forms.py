"""How published models write calls and thoughts is found in their templates, and proven; what
cannot be proven says why.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("jinja2")

from dflash_moe.engine.request import STOP
from dflash_moe.engine.text import Chunk
from dflash_moe.integrations.chat_template import ChatTemplate, TemplateRenderer, find_tool_template
from dflash_moe.server import chat_probes
from dflash_moe.server.chat_form import find_chat_form
from dflash_moe.server.chat_probes import Probes
from dflash_moe.server.front.call_forms import ChatForm, chat_form
from dflash_moe.server.front.message_pieces import Message
from dflash_moe.server.front.readers import new_reader
from tests.server.template_cases import CASES, FOLDER, KINDS, TOKENS, form_of, special_of, text_of

TOOLS = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {"type": "object", "properties": {}},
}
SHOWN = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}
    for name, schema in TOOLS.items()
]
ARGUMENTS = {"city": 'Zürich, "the" <b>city</b>\nof 2', "days": 3}


def message_of(form: ChatForm, parts: list[str], *, is_thinking: bool = False) -> Message:
    found = Message(new_reader(form, TOOLS, is_thinking=is_thinking))
    for part in parts:
        found.push(Chunk(part, (1,)))
    found.push(Chunk("", (), finish_reason=STOP))
    return found


def test_each_file_is_a_case_and_its_origin_is_said():
    files = {path.stem for path in FOLDER.glob("*.jinja")}
    assert files == set(CASES)
    said = (FOLDER / "README.md").read_text()
    assert all(f"| {name}.jinja |" in said for name in files)


@pytest.mark.parametrize("name", CASES)
def test_what_a_template_has_is_found_and_what_it_lacks_is_said(name):
    kind, begin = CASES[name]
    form = form_of(name)
    if kind in KINDS:
        assert form.calls is not None, form.no_calls
        assert (form.calls.kind, form.no_calls) == (kind, "")
    else:
        assert form.calls is None
        assert kind in form.no_calls
    assert (form.thoughts and form.thoughts.begin) == begin
    assert bool(form.no_thoughts) is (begin is None)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][0] in KINDS])
def test_calls_that_a_template_writes_are_read_wherever_they_are_cut(name):
    form = form_of(name)
    calls = [("get_weather", ARGUMENTS), ("now", {})][: 1 + form.calls.is_parallel]
    ids = ["abcdefgh1", "abcdefgh2"] if form.calls.id_prefix is None else ["functions.get_weather:0", "functions.now:1"]
    written = [
        {"id": call_id, "type": "function", "function": {"name": called, "arguments": arguments}}
        for call_id, (called, arguments) in zip(ids, calls, strict=False)
    ]
    if form.calls.takes_text:
        for one in written:
            one["function"]["arguments"] = json.dumps(one["function"]["arguments"], ensure_ascii=False)
    asked = [{"role": "user", "content": "How is it?"}]
    answer = {"role": "assistant", "content": "", "tool_calls": written}
    with TemplateRenderer(ChatTemplate(text_of(name), name), TOKENS) as renderer:
        whole = renderer.render([*asked, answer], tools=SHOWN, add_generation_prompt=False)
    for special in special_of(name):
        if not any(special in mark for mark in form.marks):
            whole = whole.replace(special, "")
    # From the last mark that may begin calls on, or where there is none, from the first name.
    opening = form.calls.opening or ['{"name"']
    at = whole.rfind("to=functions" if form.is_harmony else opening[0], 0, whole.rfind("get_weather"))
    turn = ("<|channel|>commentary " if form.is_harmony else "") + whole[at:]
    for parts in ([turn], list(turn), *([turn[:cut], turn[cut:]] for cut in range(1, len(turn)))):
        found = message_of(form, parts)
        assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls, parts
        assert (found.content.strip(), found.finish_reason) == ("", "tool_calls")


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][1]])
def test_thoughts_are_apart_whether_the_prompt_or_the_model_began_them(name):
    form = form_of(name)
    begin, end = form.thoughts.begin, form.thoughts.end
    thought = "First this:\n\n  then < that."
    for text, is_thinking in ((f"{begin}\n{thought}\n{end}\n\nSo.", False), (f"{thought}\n{end}\n\nSo.", True)):
        for parts in ([text], list(text)):
            found = message_of(form, parts, is_thinking=is_thinking)
            assert (found.reasoning, found.content, found.calls) == (thought, "So.", [])
    unended = message_of(form, [thought], is_thinking=True)
    assert (unended.reasoning, unended.content) == (thought, "")
    assert form.begins_thought(f"user: hello\nassistant: {begin}\n")
    assert not form.begins_thought(f"user: hello\nassistant: {begin}\n\n{end}\n\n")


@pytest.mark.parametrize("name", CASES)
def test_a_form_travels(name):
    form = form_of(name)
    assert chat_form(json.loads(json.dumps(form.facts()))) == form


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('no') }}", "refuses"),
        ("{{ messages[0].content }}", "says nothing of tools"),
        ("{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}", "writes no calls"),
        ("{{ tools | tojson }}{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}", "not known"),
        ("{% for m in messages %}", "does not compile"),
        ("{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ '<' * 5000 }}"
         "{{ c.function | tojson }}{% endfor %}{% endfor %}", "more than"),
        # It forgets what tools have returned.
        ("{{ tools | tojson }}{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% for c in m.tool_calls or [] %}"
         "<call>{{ c.function | tojson }}</call>{% endfor %}{% endif %}\n{% endfor %}", "leaves out what a tool has returned"),
    ],
)  # fmt: skip
def test_a_template_without_a_provable_form_says_why(template, why):
    with TemplateRenderer(ChatTemplate(template, "the template"), TOKENS) as renderer:
        found = find_chat_form(Probes(template, renderer.render, []))
    assert found.calls is None
    assert why in found.no_calls


def test_another_template_of_a_known_form_needs_no_code():
    template = (
        "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '\n' }}@@run {{ c.function.name }} with {{ c.function.arguments | tojson }} @@done"
        "{% endfor %}"
        "<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    with TemplateRenderer(ChatTemplate(template, "the template"), TOKENS) as renderer:
        form = find_chat_form(Probes(template, renderer.render, []))
    assert form.calls is not None, form.no_calls
    found = message_of(form, ["Let me see.\n@@run now with {} @@done"])
    assert [(call.name, call.arguments) for call in found.calls] == [("now", "{}")]
    assert found.content == "Let me see."


def test_a_template_that_is_probed_for_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(chat_probes, "PROBE_S", -1.0)
    found = find_chat_form(Probes("", lambda *_messages, **_variables: "", []))
    assert (found.calls, found.thoughts) == (None, None)
    assert "probed for over" in found.no_calls


def test_a_template_for_tools_is_found_where_there_is_one(tmp_path):
    tokenizer = SimpleNamespace(chat_template={"default": "a", "tool_use": "b"})
    found = find_tool_template(tmp_path, tokenizer)
    assert found is not None
    assert found.text == "b"
    assert find_tool_template(tmp_path, SimpleNamespace(chat_template={"default": "a"})) is None
    assert find_tool_template(tmp_path, SimpleNamespace(chat_template="a")) is None
