"""OpenAI's own client before a front: chats and completions, whole and streamed, and its errors.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

pytest.importorskip("openai")

import openai

from tests.server.scripted_engine import MAX_MODEL_LEN, QUEUE_S
from tests.server.served import Served, ids_of, repeated, tokenizer

HELLO = [{"role": "user", "content": "def main"}]


@pytest.fixture
def client(front: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_models_say_their_length(client):
    first, second = client.models.list().data
    assert (first.id, second.id) == ("demo", "gpt-4o")
    assert first.model_dump()["max_model_len"] == MAX_MODEL_LEN
    assert client.models.retrieve("gpt-4o").id == "gpt-4o"
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        client.models.retrieve("other")


def test_a_chat_is_answered(client):
    found = client.chat.completions.create(model="demo", messages=HELLO, max_tokens=6)
    (choice,) = found.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.message.content == repeated("def main", 6)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (3, 6, 9)
    assert found.usage.prompt_tokens_details.cached_tokens == 0
    assert found.usage.model_dump()["queue_time"] == QUEUE_S
    assert (found.model, found.object, found.system_fingerprint) == ("demo", "chat.completion", "fp_0123456789abcdef")


def test_a_stream_has_the_same_text_its_usage_and_an_end(client):
    chunks = list(
        client.chat.completions.create(
            model="gpt-4o", messages=HELLO, max_tokens=6, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == repeated("def main", 6)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 6)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_without_include_usage_no_event_has_any(client):
    chunks = list(client.chat.completions.create(model="demo", messages=HELLO, max_tokens=2, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_absent_max_tokens_is_what_has_room(client):
    found = client.completions.create(model="demo", prompt=[5] * 500)
    assert (found.usage.completion_tokens, found.choices[0].finish_reason) == (MAX_MODEL_LEN - 500, "length")


def test_choices_are_apart(client):
    found = client.chat.completions.create(model="demo", messages=HELLO, max_tokens=3, n=3)
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    streamed: dict[int, str] = {}
    for chunk in client.chat.completions.create(model="demo", messages=HELLO, max_tokens=3, n=3, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    assert list(streamed.values()) == [choice.message.content for choice in found.choices]
    assert found.usage.completion_tokens == 9


@pytest.mark.parametrize("prompt", [["def", "return a"], [[5, 6], [7]]])
def test_lists_of_prompts_are_completed_in_their_order(client, prompt):
    found = client.completions.create(model="demo", prompt=prompt, max_tokens=2, n=2)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    first = client.completions.create(model="demo", prompt=prompt[0], max_tokens=2)
    last = client.completions.create(model="demo", prompt=prompt[1], max_tokens=2)
    assert found.choices[0].text == found.choices[1].text == first.choices[0].text
    assert found.choices[3].text == last.choices[0].text
    assert found.usage.prompt_tokens == first.usage.prompt_tokens + last.usage.prompt_tokens


def test_echo_puts_the_prompt_before_the_completion(client):
    plain = client.completions.create(model="demo", prompt="def main", max_tokens=2).choices[0].text
    assert (
        client.completions.create(model="demo", prompt="def main", max_tokens=2, echo=True).choices[0].text
        == "def main" + plain
    )
    streamed = client.completions.create(model="demo", prompt="def main", max_tokens=2, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "def main" + plain
    with pytest.raises(openai.BadRequestError, match="echo"):
        client.completions.create(model="demo", prompt="def main", max_tokens=2, echo=True, logprobs=1)


def test_a_stop_string_ends_the_text_and_the_request(client, front):
    text = repeated("def main", 30)
    stop = text[4:7]
    found = client.completions.create(model="demo", prompt="def main", max_tokens=30, stop=stop)
    assert (found.choices[0].text, found.choices[0].finish_reason) == (text[: text.index(stop)], "stop")
    streamed = list(client.completions.create(model="demo", prompt="def main", max_tokens=300, stop=[stop, "zzz"], stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == text[: text.index(stop)]
    assert front.engine.cancelled


def test_characters_of_several_tokens_come_whole(client):
    text = "naïve 漢字 🎉 done"
    ids = ids_of(text)
    found = client.completions.create(model="demo", prompt=ids, max_tokens=len(ids), stream=True)
    pieces = [chunk.choices[0].text for chunk in found]
    assert "".join(pieces) == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_logprobs_of_a_chat_have_bytes_and_alternatives(client):
    found = client.chat.completions.create(model="demo", messages=HELLO, max_tokens=2, logprobs=True, top_logprobs=2)
    content = found.choices[0].logprobs.content
    assert len(content) == 2
    assert [len(one.top_logprobs) for one in content] == [2, 2]
    assert "".join(one.token for one in content) == found.choices[0].message.content
    assert bytes(content[0].bytes).decode() == content[0].token
    streamed = client.chat.completions.create(model="demo", messages=HELLO, max_tokens=2, logprobs=True, stream=True)
    tokens = [
        one.token
        for chunk in streamed
        if chunk.choices and chunk.choices[0].logprobs
        for one in chunk.choices[0].logprobs.content
    ]
    assert tokens == [one.token for one in content]


def test_logprobs_of_a_completion_have_offsets(client):
    found = client.completions.create(model="demo", prompt="def main", max_tokens=3, logprobs=1).choices[0]
    assert found.logprobs.token_logprobs == [-0.5] * 3
    assert "".join(found.logprobs.tokens) == found.text
    assert [
        found.text[at:].startswith(token) for at, token in zip(found.logprobs.text_offset, found.logprobs.tokens, strict=True)
    ] == [True] * 3


def test_every_field_of_sampling_reaches_the_engine(client, front):
    client.chat.completions.create(
        model="demo", messages=HELLO, max_completion_tokens=3, temperature=0.5, top_p=0.9, presence_penalty=0.1,
        frequency_penalty=0.2, logit_bias={"7": 1}, seed=11, n=2,
        extra_body={"top_k": 4, "min_p": 0.05, "repetition_penalty": 1.2, "stop_token_ids": [9], "ignore_eos": True},
    )  # fmt: skip
    _, params, _ = front.engine.submitted[-1]
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (3, 0.5, 0.9, 4, 0.05)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.1, 0.2, 1.2)
    assert (params.logit_bias, params.seed, params.n, params.stop_token_ids, params.ignore_eos) == ({7: 1.0}, 11, 2, (9,), True)


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(client):
    with pytest.raises(openai.BadRequestError, match=r"maximum context length is 512 tokens.*600 in the prompt") as caught:
        client.completions.create(model="demo", prompt=[5] * 600)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(
        openai.BadRequestError, match=r"maximum context length is 512 tokens.*1003 tokens \(3 in the prompt, 1000"
    ):
        client.chat.completions.create(model="demo", messages=HELLO, max_tokens=1000)
    with pytest.raises(openai.BadRequestError, match="at least"):
        client.completions.create(model="demo", prompt="word " * 400_000)


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="--alias") as caught:
        client.chat.completions.create(model="other", messages=HELLO)
    assert caught.value.code == "model_not_found"


def test_images_and_tools_are_refused_by_name(client):
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        client.chat.completions.create(model="demo", messages=image)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with pytest.raises(openai.BadRequestError, match="tools") as caught:
        client.chat.completions.create(model="demo", messages=HELLO, tools=tools)
    assert caught.value.param == "tools"


def test_ignored_fields_are_named_in_a_header(client):
    raw = client.chat.completions.with_raw_response.create(
        model="demo", messages=HELLO, max_tokens=1, user="me", store=True, extra_body={"quite_unknown": 1}
    )
    assert set(raw.headers["x-dflash-ignored"].split(", ")) == {"user", "store", "quite_unknown"}
    with pytest.raises(openai.BadRequestError, match="did you mean temperature"):
        client.chat.completions.create(model="demo", messages=HELLO, extra_body={"temprature": 1})


def test_many_clients_stream_at_the_same_time(front):
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        chunks = await client.completions.create(model="demo", prompt=[number + 300] * 3, max_tokens=20, stream=True)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(20)))

    found = asyncio.run(all_of_them())
    assert found == [tokenizer().decode([number + 300] * 20, skip_special_tokens=True) for number in range(20)]


def test_leaving_a_stream_cancels_the_request(client, front):
    before = len(front.engine.cancelled)
    with client.completions.create(model="demo", prompt="def", max_tokens=500, stream=True) as chunks:
        next(iter(chunks))
    from tests.server.served import wait_for

    wait_for(lambda: len(front.engine.cancelled) > before and not front.engine.open)
