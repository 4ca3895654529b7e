"""Grammars of whole answers, in the notation of Lark that llguidance reads: a thought where the
model has one, and behind it what was asked for: an answer in a form, calls of tools, or either.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_moe.integrations.grammar_process import JSON_OPTIONS
from dflash_moe.server.front.call_forms import HARMONY, JSON, NAMED, PYTHON, TAGGED, CallForm, ChatForm, parts
from dflash_moe.server.front.structured_fields import MAX_SOURCE_BYTES

_FREE = "FREE: /(.|\\n)*/"
# Between a thought and what follows it. Readers drop it.
_SPACE = "SPACE: /[ \\t\\r\\n]{0,8}/"
# Of a value that stands between marks as it is, what its schema may say: no grammar says more.
_PLAIN_KEYS = {"type", "title", "description", "default", "examples", "enum"}


class NoGrammarError(Exception):
    """A form of calls for which there is no grammar. It says why."""


class AnswerGrammar:
    """Builds the grammar of one request's answers in one model's form."""

    def __init__(self, form: ChatForm, special: Mapping[str, int]) -> None:
        """`special` are the ids of special tokens, which no text is made into."""
        self._form = form
        self.special = special
        self._num_characters = 0
        known = sorted(special, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, known))})") if known else None

    def around(self, prompt: str) -> str:
        """Returns what stands around a grammar named `answer` for a rendered prompt, empty where
        nothing does.
        """
        lead, rules = self._lead(prompt)
        return "\n".join((f"start: {lead} {self._final()} @answer", *rules)) if rules else ""

    def of_calls(self, prompt: str, schemas: Mapping[str, Any], *, strict: Sequence[str], is_single: bool, others: str) -> str:
        """Returns the grammar of answers that call tools with these schemas of their arguments.
        Those of `strict` are kept to, others as far as the library knows them. `others` says what
        may come instead of calls: nothing (empty), `@answer`, or any text (`FREE`).

        Errors: NoGrammarError for a form of calls, or a schema, that cannot be written.
        """
        form = self._form.calls
        if form is None:
            raise NoGrammarError(self._form.no_calls)
        lead, found = self._lead(prompt)
        # Each once, in this order.
        rules: dict[str, None] = dict.fromkeys((*found, _FREE, _SPACE))
        calls = " | ".join(f"call_{place}" for place in range(len(schemas)))
        for place, (name, schema) in enumerate(schemas.items()):
            rules |= dict.fromkeys(_Call(self, form, place, name, schema, is_strict=name in strict).rules())
        rules[f"call: {calls}"] = None
        rules[f"one: {self.mark(form.begin)} call {self.mark(form.end)}"] = None
        rules['more: ""' if is_single else f"more: ({self.mark(form.separator)} one)*"] = None
        rules[f"calls: {self.mark(form.section_begin)} one more {self.mark(form.section_end)}"] = None
        return "\n".join((f"start: {lead} {self._body(form, others, rules)}", *rules))

    def _body(self, form: CallForm, others: str, rules: dict[str, None]) -> str:
        if others == "@answer":
            return f"({self._final()} @answer | calls)"
        if others != "FREE":
            return "calls"
        if form.kind == HARMONY:
            rules[f"final: {self.mark('<|channel|>final<|message|>')} FREE"] = None
            return "(final | calls)"
        opening = parts(form.section_begin + form.begin)
        if not opening:
            # Where nothing marks a call, one is what begins with its bracket.
            rules["TEXT: /[ \\t\\r\\n]*([^ \\t\\r\\n\\[{](.|\\n)*)?/"] = None
            return "(TEXT | calls)"
        if self.begins_special(opening[0]):
            return "FREE (calls FREE)*"
        # The library never takes back what it took for text, so that a text goes up to its mark and
        # with that, and another one has none.
        found = re.escape(opening[0]).replace("/", "\\/")
        rules[f"TEXT: /(.|\\n)*/ & ~/(.|\\n)*{found}(.|\\n)*/"] = None
        rules[f"before[suffix={quoted(opening[0])}]: /(.|\\n)*/"] = None
        rest = (form.section_begin + form.begin).partition(opening[0])[2]
        rules[f"behind: {self.mark(rest)} call {self.mark(form.end)} more {self.mark(form.section_end)}"] = None
        return "(before behind)* TEXT"

    def _final(self) -> str:
        return self.mark("<|channel|>final<|message|>") if self._form.is_harmony else ""

    def _lead(self, prompt: str) -> tuple[str, list[str]]:
        """Returns what stands before an answer, and its rules."""
        if self._form.is_harmony:
            begin, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
            return "analysis*", [f"analysis: {self.mark(begin)} FREE {self.mark(end)}", _FREE]
        thoughts = self._form.thoughts
        if thoughts is None or prompt.rstrip().endswith(thoughts.end):
            return "", []
        if thoughts.end in self.special:
            rules = [f"thought: FREE {self.mark(thoughts.end)} SPACE", _FREE, _SPACE]
        else:
            rules = ["thought: inner SPACE", f"inner[suffix={quoted(thoughts.end)}]: /(.|\\n)*/", _SPACE]
        has_begun = self._form.begins_thought(prompt)
        return "thought" if has_begun else f"({self.mark(thoughts.begin)} thought)?", rules

    def begins_special(self, mark: str) -> bool:
        """Says whether a mark begins with a special token, which free text does not have."""
        return any(mark.startswith(token) for token in self.special)

    def counted(self, rule: str) -> str:
        """Returns a rule of a schema, of which there may be many with the same definitions in each.
        Raises NoGrammarError where all together are longer than a grammar may be.
        """
        self._num_characters += len(rule)
        if self._num_characters > MAX_SOURCE_BYTES:
            raise NoGrammarError(f"the grammar of their schemas has more than {MAX_SOURCE_BYTES} bytes")
        return rule

    def mark(self, text: str) -> str:
        """Returns a text as a grammar has it, special tokens by their ids."""
        cut = self._cut.split(text) if self._cut is not None else [text]
        return " ".join(f"<[{self.special[part]}]>" if part in self.special else quoted(part) for part in cut if part)


class _Call:
    """The rules of one tool's calls, without the marks around each."""

    def __init__(
        self, grammar: AnswerGrammar, form: CallForm, place: int, name: str, schema: Mapping[str, Any], *, is_strict: bool
    ) -> None:
        self._grammar, self._form, self._place, self._name, self._schema = grammar, form, place, name, schema
        self._options = {**JSON_OPTIONS, "lenient": not is_strict}
        self._is_strict = is_strict

    def rules(self) -> list[str]:
        """Returns them; the first one is that of the call."""
        kinds = {JSON: self._json, NAMED: self._named, TAGGED: self._tagged, HARMONY: self._harmony, PYTHON: self._python}
        return kinds[self._form.kind]()

    def _arguments(self) -> str:
        return self._value(f"args_{self._place}", self._schema)

    def _value(self, rule: str, schema: Mapping[str, Any]) -> str:
        text = json.dumps({"x-guidance": self._options, **schema}, ensure_ascii=False)
        return self._grammar.counted(f"{rule}: %json {text}")

    def _json(self) -> list[str]:
        form = self._form
        if form.is_quoted:
            raise NoGrammarError("its calls have arguments as JSON within a string, for which there is no grammar")
        members = [(form.name_path, quoted(json.dumps(self._name))), (form.arguments_path, f"args_{self._place}")]
        if form.id_path:
            members.append((form.id_path, '"\\"" /[a-zA-Z0-9]{9}/ "\\""'))
        return [f"call_{self._place}: {_object(members)}", self._arguments()]

    def _named(self) -> list[str]:
        counted = "" if self._form.id_prefix is None else '":" /[0-9]{1,3}/'
        middle = self._grammar.mark(self._form.middle)
        return [f"call_{self._place}: {quoted(self._name)} {counted} {middle} args_{self._place}", self._arguments()]

    def _harmony(self) -> list[str]:
        head = self._grammar.mark(f"<|channel|>commentary to=functions.{self._name} <|constrain|>json<|message|>")
        return [f"call_{self._place}: {head} args_{self._place}", self._arguments()]

    def _python(self) -> list[str]:
        raise NoGrammarError("its calls are written as Python writes them, for which there is no grammar")

    def _tagged(self) -> list[str]:
        form, mark, rules = self._form, self._grammar.mark, []
        required = self._required()
        pairs = []
        for place, (key, schema) in enumerate(self._properties().items()):
            rule = f"pair_{self._place}_{place}"
            begin = mark(f"{form.key_begin}{key}{form.key_end}")
            rules += self._pair(rule, begin, schema)
            pairs.append(rule if key in required else f"{rule}?")
        return [f"call_{self._place}: {mark(self._name + form.name_end)} {' '.join(pairs)}", *rules]

    def _properties(self) -> Mapping[str, Any]:
        found = self._schema.get("properties", {})
        if not isinstance(found, Mapping) or not all(isinstance(one, Mapping) for one in found.values()):
            raise NoGrammarError(f"the properties of {self._name} are no schemas")
        return found

    def _required(self) -> set[str]:
        found = self._schema.get("required", [])
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise NoGrammarError(f"what {self._name} requires is no list of names")
        return set(found)

    def _pair(self, rule: str, begin: str, schema: Mapping[str, Any]) -> list[str]:
        """Returns the rules of a key and its value. A text stands as it is, everything else as
        JSON.
        """
        form, mark = self._form, self._grammar.mark
        if schema.get("type") != "string":
            shared = {key: self._schema[key] for key in ("$defs", "definitions") if key in self._schema}
            return [f"{rule}: {begin} {rule}_value {mark(form.value_end)}", self._value(f"{rule}_value", {**shared, **schema})]
        if self._is_strict and schema.keys() - _PLAIN_KEYS:
            said = ", ".join(sorted(schema.keys() - _PLAIN_KEYS))
            raise NoGrammarError(f"its calls have texts as they are, for which there is no grammar with {said}")
        if isinstance(schema.get("enum"), list):
            texts = " | ".join(quoted(str(one)) for one in schema["enum"])
            return [self._grammar.counted(f"{rule}: {begin} ({texts}) {mark(form.value_end)}")]
        # A reader ends a text at the first visible part of its mark.
        closing = parts(form.value_end)[0]
        if self._grammar.begins_special(closing):
            return [f"{rule}: {begin} FREE {mark(form.value_end)}"]
        rest = mark(form.value_end.partition(closing)[2])
        return [f"{rule}: {begin} {rule}_text {rest}", f"{rule}_text[suffix={quoted(closing)}]: /(.|\\n)*/"]


def _object(members: Sequence[tuple[tuple[str, ...], str]]) -> str:
    """Returns an object as templates write it, of members by their paths."""
    groups: dict[str, list[tuple[tuple[str, ...], str]]] = {}
    for path, value in members:
        groups.setdefault(path[0], []).append((path[1:], value))
    found = []
    for key, inner in groups.items():
        value = inner[0][1] if not inner[0][0] else _object(inner)
        found.append(f"{quoted(json.dumps(key) + ': ')} {value}")
    return '"{" ' + ' ", " '.join(found) + ' "}"'


def quoted(text: str) -> str:
    """Returns a text as a grammar has it."""
    return json.dumps(text, ensure_ascii=False)
