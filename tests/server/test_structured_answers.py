"""Answers of the demo's model that keep to a form: whatever a model of this size would say, what
comes is JSON by its schema, streamed or not, alone or with others.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("openai")
pytest.importorskip("llguidance")

from tests.server import test_serve
from tests.server.test_serve import HELLO, client, serving

pytestmark = pytest.mark.transformers
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["one", "two"]},
        "parts": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "size", "kind", "parts"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("served"), "--max-context", "600") as (_, found):
        # The processes that render templates and follow grammars live as long as all tests.
        with client(found) as asked:
            asked.chat.completions.create(model="demo", messages=HELLO, max_tokens=1, response_format=FORM)
        yield found


def check(text: str) -> None:
    """Fails for what is not by SCHEMA."""
    found = json.loads(text)
    assert list(found) == ["name", "size", "kind", "parts"]
    assert isinstance(found["name"], str)
    assert len(found["name"]) <= 12
    assert type(found["size"]) is int
    assert 0 <= found["size"] <= 999
    assert found["kind"] in ("one", "two")
    assert 1 <= len(found["parts"]) <= 3
    assert all(isinstance(part, bool) for part in found["parts"])


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_whole_answers_are_by_their_schema(url, temperature):
    with client(url) as asked:
        for seed in range(4):
            found = asked.chat.completions.create(
                model="demo", messages=HELLO, max_tokens=200, response_format=FORM, temperature=temperature, seed=seed
            )
            check(found.choices[0].message.content)
            assert found.choices[0].finish_reason == "stop"


def test_choices_are_each_by_the_schema_and_not_all_the_same(url):
    with client(url) as asked:
        found = asked.chat.completions.create(
            model="demo", messages=HELLO, max_tokens=200, response_format=FORM, temperature=1.5, seed=3, n=4
        )
        texts = [choice.message.content for choice in found.choices]
        for text in texts:
            check(text)
        assert len(set(texts)) > 1


def test_a_streamed_answer_is_the_whole_one(url):
    with client(url) as asked:
        given = {"model": "demo", "messages": HELLO, "max_tokens": 200, "response_format": FORM, "temperature": 1.0, "seed": 5}
        whole = asked.chat.completions.create(**given).choices[0].message.content
        chunks = asked.chat.completions.create(**given, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_an_answer_does_not_depend_on_its_company(url):
    def text(seed: int) -> str:
        with client(url) as asked:
            found = asked.completions.create(
                model="demo", prompt="def", max_tokens=200, temperature=1.2, seed=seed, extra_body={"guided_json": SCHEMA}
            )
            return found.choices[0].text

    alone = [text(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(text, range(6))) == alone


@pytest.mark.parametrize(
    ("form", "allowed"),
    [
        ({"guided_regex": "[a-c]{3}-[0-9]{1,5}x"}, "[a-c]{3}-[0-9]{1,5}x"),
        ({"guided_choice": ["yes", "no", 'it "is" é\n']}, 'yes|no|it "is" é\n'),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"grammar": 'root ::= "<" [a-z]{1,4} ">"'}, "<[a-z]{1,4}>"),
        ({"guided_grammar": 'start: "a" B\nB: /[0-9]{2}/'}, "a[0-9]{2}"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_forms_are_kept_to(url, form, allowed):
    with client(url) as asked:
        found = asked.completions.create(model="demo", prompt="def", max_tokens=60, temperature=1.0, seed=1, extra_body=form)
        choice = found.choices[0]
        assert re.fullmatch(allowed, choice.text, re.DOTALL), choice.text


def test_guesses_of_tokens_change_nothing(url, tmp_path, monkeypatch):
    def texts(found: str) -> list[str]:
        with client(found) as asked:
            return [
                asked.chat.completions.create(
                    model="demo", messages=HELLO, max_tokens=200, response_format=FORM, temperature=0.7, seed=seed
                ).choices[0].message.content
                for seed in range(3)
            ]  # fmt: skip

    monkeypatch.setattr(
        test_serve, "TOPOLOGY", test_serve.TOPOLOGY.replace("kv_memory: 16MiB", "kv_memory: 16MiB, speculate: prompt")
    )
    with serving(tmp_path, "--max-context", "600") as (_, guessing):
        assert texts(guessing) == texts(url)
