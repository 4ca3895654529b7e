"""OpenAI's own client before a front: responses, whole and as typed events, and their errors.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

pytest.importorskip("openai")

import openai

from dflash_moe.errors import QueueFull, WorkerLost
from tests.server.scripted_engine import MAX_MODEL_LEN
from tests.server.served import UNICODE, Served, prompt_of, repeated, served, tokenizer, wait_for

HELLO = "def main"
LONG = "def main return a " * 8
LOGPROBS = ["message.output_text.logprobs"]
# What differs between two answers to one request.
OWN = ("id", "created_at")


@pytest.fixture
def client(front: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def ask(client: openai.OpenAI, given: object = HELLO, max_output_tokens: int = 2, **more: object) -> object:
    return client.responses.create(model="demo", input=given, max_output_tokens=max_output_tokens, **more)


def events_of(client: openai.OpenAI, given: object = HELLO, **more: object) -> list:
    return list(ask(client, given, stream=True, **more))


def said(response: object) -> dict:
    """All of a response but names and times."""
    found = {name: value for name, value in response.to_dict().items() if name not in OWN}
    found["output"] = [{name: value for name, value in item.items() if name not in OWN} for item in found["output"]]
    return found


def test_a_response_is_answered(client):
    found = ask(client, max_output_tokens=6)
    assert (found.object, found.model, found.id[:5]) == ("response", "demo", "resp_")
    assert (found.output_text, [item.type for item in found.output]) == (repeated(HELLO, 6), ["message"])
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (found.usage.input_tokens, found.usage.output_tokens, found.usage.total_tokens) == (3, 6, 9)
    assert (found.store, found.previous_response_id, found.error) == (False, None, None)


def test_a_response_that_the_model_ends_is_complete(client, says):
    says("return a")
    found = ask(client, max_output_tokens=30)
    assert (found.status, found.incomplete_details, found.output_text) == ("completed", None, "return a")
    assert found.output[0].status == "completed"


@pytest.mark.parametrize(
    "more", [{"max_output_tokens": 1}, {"max_output_tokens": 40}, {"given": LONG}, {"include": LOGPROBS, "top_logprobs": 2}]
)
def test_a_stream_ends_with_the_response_that_is_answered_whole(client, more):
    last = events_of(client, **more)[-1]
    assert last.type == "response.incomplete"
    assert said(last.response) == said(ask(client, **more))


def test_the_clients_stream_puts_together_what_is_answered_whole(client, says):
    says("return a + b")
    with client.responses.stream(model="demo", input=HELLO, max_output_tokens=30) as stream:
        final = stream.get_final_response()
    assert final.output_text == ask(client, max_output_tokens=30).output_text == "return a + b"
    assert final.status == "completed"


def test_events_are_numbered_and_come_in_the_order_of_the_api(client, says):
    says("return a")
    events = events_of(client, max_output_tokens=30)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])
    assert "".join(event.delta for event in events[4:-4]) == events[-4].text == "return a"
    assert {event.item_id for event in events[3:-2]} == {events[2].item.id}
    assert {event.response.id for event in (*events[:2], events[-1])} == {events[0].response.id}


@pytest.mark.parametrize("text", UNICODE)
def test_characters_of_several_tokens_come_whole(client, says, text):
    says(text)
    deltas = [event.delta for event in events_of(client, max_output_tokens=200) if event.type == "response.output_text.delta"]
    assert "".join(deltas) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in delta for delta in deltas)
    assert ask(client, max_output_tokens=200).output_text == text


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        ([{"role": "user", "content": "def main"}], "def main"),
        ([{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "def main"}]}], "def main"),
        ([{"role": "user", "content": [{"type": "input_text", "text": "def"}, {"type": "input_text", "text": "x"}]}], "def\nx"),
        ([{"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}, {"type": "output_text",
          "text": "b"}]}, {"role": "user", "content": "x"}], "ab<eos>x"),
    ],
)  # fmt: skip
def test_items_of_input_are_messages(client, front, given, prompt):
    ask(client, given)
    assert prompt_of(front).replace(tokenizer().eos_token, "<eos>").replace("<eos>\n", "<eos>") == prompt


@pytest.mark.parametrize(
    ("instructions", "given"),
    [
        ("be kind", HELLO),
        (None, [{"role": "developer", "content": "be kind"}, {"role": "user", "content": HELLO}]),
        (None, [{"role": "system", "content": "be kind"}, {"role": "user", "content": HELLO}]),
    ],
)
def test_instructions_stand_first_whoever_gives_them(client, front, instructions, given):
    ask(client, given, instructions=instructions)
    of_instructions = prompt_of(front)
    client.chat.completions.create(
        model="demo", max_tokens=1, messages=[{"role": "system", "content": "be kind"}, {"role": "user", "content": HELLO}]
    )
    assert of_instructions == prompt_of(front)


def test_the_output_of_a_response_is_input_of_the_next_one(client, front, says):
    says("return a")
    first = ask(client, max_output_tokens=30)
    ask(client, [{"role": "user", "content": HELLO}, *first.output, {"role": "user", "content": "more"}])
    assert "return a" in prompt_of(front)
    assert prompt_of(front).endswith("more")


def test_log_probabilities_have_bytes_and_alternatives(client):
    found = ask(client, max_output_tokens=3, include=LOGPROBS, top_logprobs=2)
    logprobs = found.output[0].content[0].logprobs
    assert [len(one.top_logprobs) for one in logprobs] == [2, 2, 2]
    assert "".join(one.token for one in logprobs) == found.output_text
    assert bytes(logprobs[0].bytes).decode() == logprobs[0].token
    events = events_of(client, max_output_tokens=3, include=LOGPROBS)
    streamed = [one.token for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert streamed == [one.token for one in logprobs]
    assert [one.token for one in events[-4].logprobs] == streamed


def test_no_logprobs_are_given_that_were_not_asked_for(client):
    assert ask(client).output[0].content[0].logprobs == []


def test_what_a_cache_had_is_counted(client):
    usage = ask(client, LONG).usage
    assert usage.input_tokens_details.cached_tokens == usage.input_tokens // 16 * 16 > 0


def test_every_field_of_sampling_reaches_the_engine(client, front):
    found = ask(client, temperature=0.5, top_p=0.9, extra_body={"seed": 11, "top_k": 4, "min_p": 0.05})
    _, params, _ = front.engine.submitted[-1]
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (2, 0.5, 0.9, 4)
    assert (params.seed, params.min_p) == (11, 0.05)
    assert (found.temperature, found.top_p, found.max_output_tokens) == (0.5, 0.9, 2)


def test_absent_max_output_tokens_is_what_has_room(client):
    found = client.responses.create(model="demo", input=HELLO)
    assert found.usage.total_tokens == MAX_MODEL_LEN
    assert found.max_output_tokens is None


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"given": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}]}, "input"),
        ({"given": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input"),
        ({"given": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"given": [{"type": "web_search_call", "id": "ws_1"}]}, "input"),
        ({"given": []}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": MAX_MODEL_LEN}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": LOGPROBS, "top_logprobs": 99}, "logprobs"),
        ({"extra_body": {"max_tokens": 3}}, "max_tokens"),
        ({"extra_body": {"stop": ["x"]}}, "stop"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
    ],
)
def test_what_is_wrong_or_not_honoured_is_refused_by_name(client, more, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **more)
    assert caught.value.param == param
    assert param.rpartition(".")[2] in str(caught.value)


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="--alias") as caught:
        client.responses.create(model="other", input=HELLO)
    assert caught.value.code == "model_not_found"


def test_nothing_is_kept_of_a_response(client):
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(ask(client).id)


def test_a_key_is_needed_where_there_are_keys():
    with served(keys=["a-key-of-some-length-0123456789"]) as front, pytest.raises(openai.AuthenticationError):
        ask(openai.OpenAI(base_url=front.url + "/v1", api_key="wrong", max_retries=0))


def test_a_full_queue_is_a_rate_limit(client, front):
    front.engine.refusal = QueueFull("9 requests wait", code="queue_full", retry_after_s=3.0)
    try:
        with pytest.raises(openai.RateLimitError):
            ask(client)
    finally:
        front.engine.refusal = None


def test_an_engine_that_fails_is_a_status_and_later_a_failed_response(client, front):
    front.engine.failure = WorkerLost("worker w1 is lost")
    try:
        with pytest.raises(openai.InternalServerError, match="worker w1 is lost"):
            ask(client, max_output_tokens=9)
        events = events_of(client, max_output_tokens=9)
    finally:
        front.engine.failure = None
    assert events[-2].type == "response.output_text.delta"
    assert (events[-1].type, events[-1].response.status) == ("response.failed", "failed")
    assert (events[-1].response.error.code, events[-1].response.error.message) == ("worker_lost", "worker w1 is lost")


def test_leaving_a_stream_cancels_the_request(client, front):
    before = len(front.engine.cancelled)
    with ask(client, max_output_tokens=500, stream=True) as events:
        next(iter(events))
    wait_for(lambda: len(front.engine.cancelled) > before and not front.engine.open)


def test_ignored_fields_are_named_in_a_header(client):
    raw = client.responses.with_raw_response.create(
        model="demo", input=HELLO, max_output_tokens=1, store=True, metadata={"a": "b"}, user="me",
        reasoning={"summary": "auto"}, extra_body={"quite_unknown": 1}, include=["reasoning.encrypted_content"],
    )  # fmt: skip
    assert set(raw.headers["x-dflash-ignored"].split(", ")) == {
        "store", "metadata", "user", "reasoning.summary", "quite_unknown",
    }  # fmt: skip
    assert (raw.parse().store, raw.parse().metadata) == (False, {})


def test_many_clients_stream_at_the_same_time(front):
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        events = await client.responses.create(model="demo", input=f"def f{number}", max_output_tokens=20, stream=True)
        return "".join([event.delta async for event in events if event.type == "response.output_text.delta"])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(20)))

    assert asyncio.run(all_of_them()) == [repeated(f"def f{number}", 20) for number in range(20)]
