"""Grammars of whole answers against the readers of messages: whatever a grammar lets a model write,
its reader finds what was asked for in it. Texts are drawn by chance from what each grammar allows.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

pytest.importorskip("llguidance")

import llguidance

from dflash_moe.engine.text import Chunk
from dflash_moe.integrations.grammar_process import JSON_OPTIONS
from dflash_moe.server.front.answer_grammars import AnswerGrammar, NoGrammarError
from dflash_moe.server.front.call_forms import (
    HARMONY,
    HARMONY_MARKS,
    JSON,
    NAMED,
    PYTHON,
    TAGGED,
    CallForm,
    ChatForm,
    ThoughtForm,
    parts,
)
from dflash_moe.server.front.message_pieces import Message
from dflash_moe.server.front.readers import new_reader
from tests.server.template_cases import CASES, form_of, special_of

THINKS = ThoughtForm("<think>", "</think>")
FORMS = {
    "json": ChatForm(
        CallForm(
            JSON, begin="<tool_call>\n", end="\n</tool_call>", separator="\n", name_path=("name",),
            arguments_path=("arguments",),
        ),
        THINKS,
    ),
    "json list with ids": ChatForm(
        CallForm(
            JSON, section_begin="[TOOL_CALLS][", section_end="]", separator=", ", name_path=("name",),
            arguments_path=("arguments",), id_path=("id",), has_short_ids=True,
        )
    ),
    "bare json": ChatForm(CallForm(JSON, name_path=("name",), arguments_path=("parameters",), is_parallel=False)),
    "nested json": ChatForm(
        CallForm(JSON, begin="<call>", end="</call>", name_path=("function", "name"), arguments_path=("function", "arguments"))
    ),
    "named": ChatForm(CallForm(NAMED, begin="<|tool|>", middle="<|args|>", end="<|done|>"), THINKS),
    "counted": ChatForm(
        CallForm(
            NAMED, section_begin="<|calls|>", section_end="<|calls_end|>", begin="<|tool|>functions.", middle="<|args|>",
            end="<|done|>", id_prefix="functions.",
        )
    ),
    "tagged": ChatForm(
        CallForm(
            TAGGED, begin="<tool_call>\n<function=", name_end=">\n", key_begin="<parameter=", key_end=">\n",
            value_end="\n</parameter>\n", end="</function>\n</tool_call>", separator="\n",
        ),
        THINKS,
    ),
    "harmony": ChatForm(CallForm(HARMONY, is_parallel=False), ThoughtForm("", "", "thinking")),
}  # fmt: skip
PLAIN_MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "</parameter>\n", "\n", "[TOOL_CALLS]", "<call>", '{"']
SPECIAL_MARKS = [*HARMONY_MARKS, "<|tool|>", "<|args|>", "<|done|>", "<|calls|>", "<|calls_end|>"]
TOOLS: Mapping[str, Any] = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
        "required": ["a"], "additionalProperties": False,
    },
    "find.it": {
        "type": "object", "properties": {"text": {"type": "string"}, "kind": {"type": "string", "enum": ["x", "y z"]}},
        "required": ["text", "kind"], "additionalProperties": False,
    },
}  # fmt: skip
ANSWER = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
NUM_TEXTS = 25


class Vocabulary:
    """Bytes, some marks as tokens, and special tokens; id 0 ends a text."""

    bos_token_id = None
    eos_token_id = 0

    def __init__(self, special: list[str], marks: list[str] = PLAIN_MARKS) -> None:
        plain = [mark for mark in marks if mark not in special]
        self.words = ["<|eos|>", *special, *plain]
        self.special = {word: place for place, word in enumerate(special, start=1)}
        self.tokens = [word.encode() for word in self.words] + [bytes([byte]) for byte in range(256)]
        self.special_token_ids = list(range(len(special) + 1))
        self.tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self))

    def __call__(self, text: bytes) -> list[int]:
        return [len(self.words) + byte for byte in text]


@pytest.fixture(scope="module", params=["plain", "special"])
def vocabulary(request) -> Vocabulary:
    """One in which the marks of calls and thoughts are text, and one in which they are not."""
    return Vocabulary(SPECIAL_MARKS + (PLAIN_MARKS[:4] if request.param == "special" else []))


def texts(vocabulary: Vocabulary, grammar: str, chance: random.Random, num_texts: int = NUM_TEXTS) -> Iterator[str]:
    """Texts of a grammar."""
    matcher = llguidance.LLMatcher(vocabulary.tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error() + grammar
    for _ in range(num_texts):
        state, written = matcher.deep_copy(), b""
        while True:
            bits = state.compute_bitmask()
            assert not state.is_error(), state.get_error()
            allowed = [place for place in range(len(vocabulary.tokens)) if bits[place // 8] >> place % 8 & 1]
            assert allowed, written
            words = [place for place in allowed if place < len(vocabulary.words)]
            # A text ends soon, and is in ASCII.
            letters = [place for place in allowed if place >= len(vocabulary.words) and vocabulary.tokens[place] < b"\x7f"]
            likely = words if words and (chance.random() < 0.3 or not letters) else letters
            if not written:
                # Each way to begin.
                brackets = [place for place in allowed if vocabulary.tokens[place][:1] == b"{"]
                likely = chance.choice([one for one in (words, letters, brackets) if one])
            token = chance.choice(likely)
            if token == 0:
                break
            state.consume_token(token)
            written += vocabulary.tokens[token]
        yield written.decode()


def read(form: ChatForm, text: str, *, is_thinking: bool = False) -> Message:
    message = Message(new_reader(form, TOOLS, is_thinking=is_thinking))
    message.push(Chunk(text, (), finish_reason="stop"))
    return message


def check_call(name: str, arguments: str) -> None:
    found = json.loads(arguments)
    if name == "add":
        assert found.keys() <= {"a", "b"}
        assert 0 <= found["a"] <= 99
        assert isinstance(found.get("b", True), bool)
    else:
        assert name == "find.it"
        assert isinstance(found["text"], str)
        assert found["kind"] in ("x", "y z")
        assert len(found) == 2


def of_calls(form: ChatForm, vocabulary: Vocabulary, prompt: str = "", **changed: Any) -> str:
    given = {"strict": list(TOOLS), "is_single": False, "others": "", **changed}
    return AnswerGrammar(form, vocabulary.special).of_calls(prompt, TOOLS, **given)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("is_single", [False, True])
def test_a_call_that_must_come_is_read_as_one(vocabulary, name, is_single):
    form, chance = FORMS[name], random.Random(name)
    is_single = is_single or not form.calls.is_parallel
    counts = set()
    for text in texts(vocabulary, of_calls(form, vocabulary, is_single=is_single), chance):
        message = read(form, text)
        assert message.finish_reason == "tool_calls", text
        assert message.content.strip() == "", text
        for call in message.calls:
            check_call(call.name, call.arguments)
        counts.add(len(message.calls))
    assert (counts == {1}) is is_single


@pytest.mark.parametrize("name", FORMS)
def test_calls_of_strict_tools_are_by_their_schemas_between_any_texts(vocabulary, name):
    form, chance = FORMS[name], random.Random(name)
    num_called = 0
    for text in texts(vocabulary, of_calls(form, vocabulary, others="FREE", is_single=not form.calls.is_parallel), chance):
        message = read(form, text)
        for call in message.calls:
            check_call(call.name, call.arguments)
        num_called += bool(message.calls)
    assert 0 < num_called < NUM_TEXTS


@pytest.mark.parametrize("name", FORMS)
def test_an_answer_is_in_its_form_or_calls(vocabulary, name):
    form, chance = FORMS[name], random.Random(name)
    around = of_calls(form, vocabulary, others="@answer")
    kinds = set()
    for text in texts(vocabulary, whole(around), chance):
        message = read(form, text)
        for call in message.calls:
            check_call(call.name, call.arguments)
        if not message.calls:
            assert isinstance(json.loads(message.content)["ok"], bool)
        kinds.add(bool(message.calls))
    assert kinds == {False, True}


@pytest.mark.parametrize("name", [name for name, (kind, _) in CASES.items() if kind in (JSON, NAMED, TAGGED, HARMONY)])
def test_published_models_can_be_made_to_call(name):
    form, chance = form_of(name), random.Random(name)
    # Chance alone does not spell a mark.
    ends = [form.thoughts.end] if form.thoughts is not None and form.thoughts.end else []
    vocabulary = Vocabulary(special_of(name), [*form.calls.opening[:1], *parts(form.calls.value_end)[:1], '{"', *ends])
    is_single = not form.calls.is_parallel
    for others in ("", "FREE"):
        num_called = 0
        for text in texts(vocabulary, of_calls(form, vocabulary, others=others, is_single=is_single), chance, 10):
            message = read(form, text)
            for call in message.calls:
                check_call(call.name, call.arguments)
            assert message.calls or others, text
            num_called += bool(message.calls)
        assert num_called > 0


def whole(around: str) -> str:
    answer = {"name": "answer", "json_schema": {"x-guidance": JSON_OPTIONS, **ANSWER}}
    return json.dumps({"grammars": [{"lark_grammar": around}, answer]})


@pytest.mark.parametrize(
    ("name", "prompt", "has_thoughts"),
    [
        ("json", "hello", True),
        ("json", "hello<think>\n", True),
        ("json", "<think>\n\n</think>\n\n", False),
        ("harmony", "", True),
    ],
)
def test_a_form_begins_behind_the_thought(vocabulary, name, prompt, has_thoughts):
    form = FORMS[name]
    around = AnswerGrammar(form, vocabulary.special).around(prompt)
    thoughts = set()
    for text in texts(
        vocabulary, whole(around) if around else json.dumps({"grammars": [{"json_schema": ANSWER}]}), random.Random(1)
    ):
        message = read(form, text, is_thinking=form.begins_thought(prompt))
        assert isinstance(json.loads(message.content)["ok"], bool), text
        thoughts.add(message.reasoning)
    assert (len(thoughts) > 1) is has_thoughts


def test_a_model_without_thoughts_has_nothing_around_its_answers():
    assert AnswerGrammar(ChatForm(), {}).around("hello") == ""


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (ChatForm(no_calls="it has none"), "it has none"),
        (ChatForm(CallForm(PYTHON, begin="[", end="]")), "as Python writes them"),
        (ChatForm(CallForm(JSON, name_path=("n",), arguments_path=("a",), is_quoted=True)), "within a string"),
    ],
)
def test_forms_without_a_grammar_say_why(form, words):
    with pytest.raises(NoGrammarError, match=words):
        AnswerGrammar(form, {}).of_calls("", TOOLS, strict=[], is_single=True, others="")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        # Each value repeats them.
        ({"$defs": {"a": "x" * 30_000}, "properties": {str(place): {} for place in range(2000)}}, "65536 bytes"),
        ({"properties": {"a": {}}, "required": 5}, "no list of names"),
        ({"properties": {"a": {}}, "required": [{}]}, "no list of names"),
    ],
)
def test_schemas_of_calls_between_tags_have_bounds(schema, words):
    with pytest.raises(NoGrammarError, match=words):
        AnswerGrammar(FORMS["tagged"], {}).of_calls("", {"f": schema}, strict=["f"], is_single=True, others="")


def test_a_strict_text_between_tags_has_no_pattern():
    tools = {"f": {"properties": {"a": {"type": "string", "pattern": "x"}}}}
    grammar = AnswerGrammar(FORMS["tagged"], {})
    with pytest.raises(NoGrammarError, match="pattern"):
        grammar.of_calls("", tools, strict=["f"], is_single=True, others="")
    assert "call_0" in grammar.of_calls("", tools, strict=[], is_single=True, others="")
