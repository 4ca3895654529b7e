"""`dm.LLM` with the demo's model: conversations in, answers out, whole, streamed and awaited; what
is no conversation; and a checkpoint without a tokenizer.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import dflash_moe as dm
from dflash_moe.engine.chat_history import ChatHistory
from dflash_moe.integrations.chat_template import TemplateRenderer, find_chat_template, special_tokens

pytestmark = pytest.mark.transformers
MODEL = Path(__file__).parents[2] / "bench" / "demo_model" / "dflash_moe_demo" / "model"
HELLO = [{"role": "user", "content": "def main"}]
TALK = [*HELLO, {"role": "assistant", "content": "():"}, {"role": "user", "content": "return a list"}]
GREEDY = dm.SamplingParams(temperature=0, max_tokens=12)


def start(path: Path = MODEL) -> dm.LLM:
    text = "version: 1\nhost: {threads: 1}\nworkers:\n  - {name: w0, backend: cpu, address: loopback}\n"
    return dm.LLM(path, dm.Topology.parse(text), kv_memory="16MiB")


@pytest.fixture(scope="module")
def llm() -> Iterator[dm.LLM]:
    with start() as made:
        # Its process, too, lives as long as all tests.
        made.token_ids(HELLO)
        yield made


def rendered(llm: dm.LLM, messages: list[dict[str, str]]) -> list[int]:
    """The ids that `dflash-moe chat` computes for a conversation."""
    with TemplateRenderer(find_chat_template(MODEL, llm.tokenizer), special_tokens(llm.tokenizer)) as renderer:
        history = ChatHistory(renderer, llm.tokenizer)
        history.load(messages[:-1])
        return history.ask(messages[-1]["content"]).token_ids


def test_a_conversation_is_rendered_by_the_models_template_and_answered(llm):
    (found,) = llm.chat(TALK, GREEDY)
    expected = rendered(llm, TALK)
    assert llm.token_ids(TALK) == expected != llm.token_ids(TALK[-1]["content"])
    assert [found] == llm.generate(expected, GREEDY) == llm.generate(TALK, GREEDY)
    assert found.prompt_tokens == len(expected)
    assert found.text == llm.tokenizer.decode(found.token_ids, skip_special_tokens=True) != ""


def test_several_conversations_are_answered_together(llm):
    chunks: list[int] = []
    found = llm.chat([TALK, HELLO], [GREEDY, GREEDY], on_chunk=lambda place, _chunk: chunks.append(place))
    assert [one.prompt for one in found] == [0, 1]
    assert [one.token_ids for one in found] == [llm.chat(one, GREEDY)[0].token_ids for one in (TALK, HELLO)]
    assert set(chunks) == {0, 1}
    assert [one.token_ids for one in llm.generate([TALK, "def", HELLO], GREEDY)][::2] == [one.token_ids for one in found]


def test_a_conversation_is_streamed_and_awaited(llm):
    async def awaited() -> str:
        return "".join([chunk.text async for chunk in llm.astream(TALK, GREEDY)])

    (whole,) = llm.chat(TALK, GREEDY)
    assert "".join(chunk.text for chunk in llm.stream(TALK, GREEDY)) == whole.text == asyncio.run(awaited())


def test_contents_may_come_in_parts_and_variables_reach_the_template(tmp_path):
    path = tmp_path / "model"
    shutil.copytree(MODEL, path)
    (path / "chat_template.jinja").write_text(
        "{{ kind }}:{% for m in messages %}{{ m['role'] }}={{ m['content'] }};{% endfor %}"
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    with start(path) as llm:
        found = llm.token_ids(parts, chat_template_kwargs={"kind": "k"})
        assert llm.tokenizer.decode(found) == "k:user=one\ntwo;"
        (answer,) = llm.chat(parts, GREEDY, chat_template_kwargs={"kind": "k"})
        assert answer.prompt_tokens == len(found)
        with pytest.raises(dm.ConfigError, match="chat_template_kwargs: messages is not allowed"):
            llm.chat(parts, GREEDY, chat_template_kwargs={"messages": []})
        with pytest.raises(dm.ConfigError, match="holds something that no template can be given: .*set.* pass texts"):
            llm.chat(parts, GREEDY, chat_template_kwargs={"kind": {1, 2}})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([], r"messages \[\]: expected a list of messages such as"),
        ("Hello", "messages 'Hello': expected a list of messages"),
        (7, "messages 7: expected a list of messages"),
        ([*HELLO, "Hello"], "expected a list of messages"),
        ([[1, 2, 3]], r"messages \[1, 2, 3\]: expected a list of messages"),
        ([{"content": "Hello"}], 'message 1: role None, expected a text such as "user"'),
        ([*HELLO, {"role": "user", "content": 7}], "message 2: content 7, expected a text"),
        ([{"role": "user"}], "message 1, of user, has no content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "message 1: a part of its content is .*image_url.* is read"),
        ([{"role": "user", "content": "\ud800"}], "character .* is no Unicode text"),
    ],
)
def test_what_is_no_conversation_is_refused_by_name(llm, wrong, said):
    before = llm.stats()["engine"]["generated_tokens"]
    with pytest.raises(dm.ConfigError, match=said):
        llm.chat(wrong, GREEDY)
    assert llm.stats()["engine"]["generated_tokens"] == before


def test_a_conversation_that_is_too_long_names_its_tokens_and_the_limit(llm):
    long = [{"role": "user", "content": "list " * llm.engine.length_limit.num_tokens}]
    with pytest.raises(
        dm.ConfigError, match=rf"prompt of {len(llm.token_ids(long))} tokens and max_tokens 12: .* was asked for"
    ):
        llm.chat(long, GREEDY)


def test_a_model_without_a_template_says_so_when_it_is_asked_to_talk(tmp_path):
    path = tmp_path / "model"
    shutil.copytree(MODEL, path)
    (path / "chat_template.jinja").unlink()
    with start(path) as llm:
        with pytest.raises(dm.UnsupportedError, match="the model has no chat template"):
            llm.chat(HELLO, GREEDY)
        assert llm.generate("def main", GREEDY)[0].text


def test_the_process_that_renders_ends_with_the_llm():
    with start() as llm:
        assert llm._chats._renderer is None, "nobody has talked yet"
        llm.chat(HELLO, GREEDY)
        process = llm._chats._renderer._process._process
        assert process.poll() is None
    assert process.poll() is not None
    with pytest.raises(dm.RequestCancelled, match="the engine is closed"):
        llm.chat(HELLO, GREEDY)


@pytest.mark.parametrize("files", ["gone", "damaged"])
def test_a_checkpoint_without_a_tokenizer_takes_token_ids_and_asks_for_one_when_text_comes(llm, tmp_path, files, caplog):
    path = tmp_path / "model"
    shutil.copytree(MODEL, path)
    (path / "tokenizer_config.json").unlink()
    if files == "gone":
        os.remove(path / "tokenizer.json")
    else:
        (path / "tokenizer.json").write_text("{}")
    ids = llm.token_ids("def main")
    params = dm.SamplingParams(temperature=0, max_tokens=12, n=2)
    with caplog.at_level(logging.WARNING), start(path) as bare:
        assert "only token ids are taken, and completions have no text" in caplog.text
        expected = [one.token_ids for one in llm.generate(ids, params)]
        found = bare.generate(ids, params)
        assert [one.token_ids for one in found] == expected
        assert {one.text for one in found} == {""}
        assert {one.finish_reason for one in found} <= {"length", "stop"}
        chunks = list(bare.stream(ids, GREEDY))
        assert [token for chunk in chunks for token in chunk.token_ids] == list(expected[0])
        assert sum(len(delta.token_ids) for delta in bare.submit(ids, GREEDY)) == len(expected[0])
        before = bare.stats()["engine"]["generated_tokens"]
        asking = {
            "a text": lambda: bare.generate("def main", GREEDY),
            "a conversation": lambda: bare.chat(HELLO, GREEDY),
            "a stop string": lambda: list(bare.stream(ids, dm.SamplingParams(stop=["x"]))),
        }
        for what, ask in asking.items():
            with pytest.raises(dm.UnsupportedError, match=f"^{what} needs a tokenizer, and .* pass token ids, or LLM"):
                ask()
        outcomes = list(bare.generate_each([ids, ids], [dm.SamplingParams(stop="x"), GREEDY]))
        assert isinstance(outcomes[0], dm.UnsupportedError)
        assert outcomes[1][0].token_ids == expected[0]
        assert bare.stats()["engine"]["generated_tokens"] == before + len(expected[0])
