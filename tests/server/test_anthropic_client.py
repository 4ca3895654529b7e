"""Anthropic's own client before a front: messages, whole and streamed, counts, and its errors.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

pytest.importorskip("anthropic")

import anthropic

from dflash_moe.errors import QueueFull, WorkerLost
from tests.server.scripted_engine import MAX_MODEL_LEN
from tests.server.served import UNICODE, Served, prompt_of, repeated, served, wait_for

HELLO = [{"role": "user", "content": "def main"}]
LONG = [{"role": "user", "content": "def main return a " * 8}]


def client_of(front: Served, **more: object) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=front.url, max_retries=0, timeout=60, **{"api_key": "none", **more})


@pytest.fixture
def client(front: Served) -> Iterator[anthropic.Anthropic]:
    with client_of(front) as made:
        yield made


def ask(client: anthropic.Anthropic, messages: object = HELLO, max_tokens: int = 2, **more: object) -> anthropic.types.Message:
    return client.messages.create(model="demo", messages=messages, max_tokens=max_tokens, **more)


def streamed(client: anthropic.Anthropic, messages: object = HELLO, max_tokens: int = 2, **more: object) -> object:
    with client.messages.stream(model="demo", messages=messages, max_tokens=max_tokens, **more) as stream:
        return stream.get_final_message()


def said(message: object) -> dict:
    """All of a message but its own name, and what the client adds to a streamed one."""
    return {name: value for name, value in message.to_dict().items() if name not in ("id", "stop_details")}


def test_a_message_is_answered(client):
    found = ask(client, max_tokens=6)
    assert (found.type, found.role, found.model, found.id[:4]) == ("message", "assistant", "demo", "msg_")
    assert [(block.type, block.text) for block in found.content] == [("text", repeated("def main", 6))]
    assert (found.stop_reason, found.stop_sequence) == ("max_tokens", None)
    assert (found.usage.input_tokens, found.usage.output_tokens, found.usage.cache_read_input_tokens) == (3, 6, 0)


@pytest.mark.parametrize(
    ("messages", "more"),
    [
        (HELLO, {"max_tokens": 1}),
        (HELLO, {"max_tokens": 40}),
        (LONG, {"max_tokens": 9}),
        (HELLO, {"max_tokens": 30, "stop_sequences": ["main"]}),
        (HELLO, {"max_tokens": 30, "stop_sequences": ["zzz", "f ma"]}),
    ],
)
def test_a_stream_ends_with_the_message_that_is_answered_whole(client, messages, more):
    assert said(streamed(client, messages, **more)) == said(ask(client, messages, **more))


def test_the_events_of_a_stream_come_in_the_order_of_the_api(client):
    events = list(ask(client, max_tokens=3, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert (events[0].message.content, events[0].message.stop_reason) == ([], None)
    assert events[0].message.usage.input_tokens == 3
    assert (events[-2].delta.stop_reason, events[-2].usage.output_tokens) == ("max_tokens", 3)


def test_a_text_stream_yields_the_text_as_it_comes(client):
    with client.messages.stream(model="demo", messages=HELLO, max_tokens=12) as stream:
        pieces = list(stream.text_stream)
    assert len(pieces) > 4
    assert "".join(pieces) == repeated("def main", 12)


@pytest.mark.parametrize(
    ("stops", "found", "text"),
    [
        (["main"], "main", "def "),
        (["zzz", "ef m"], "ef m", "d"),
        (["maindef", "in"], "in", "def ma"),
        (["indef"], "indef", "def ma"),
    ],
)
def test_the_stop_sequence_that_ended_a_message_is_named(client, stops, found, text):
    message = ask(client, max_tokens=30, stop_sequences=stops)
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == ("stop_sequence", found, text)


def test_a_message_that_the_model_ends_has_ended_its_turn(client, says):
    says("return a")
    found = ask(client, max_tokens=30, stop_sequences=["zzz"])
    assert (found.stop_reason, found.stop_sequence, found.content[0].text) == ("end_turn", None, "return a")


def test_what_a_cache_had_is_counted_apart(client):
    found = ask(client, LONG)
    whole = client.messages.count_tokens(model="demo", messages=LONG).input_tokens
    assert found.usage.cache_read_input_tokens == whole // 16 * 16 > 0
    assert found.usage.input_tokens == whole % 16
    assert said(streamed(client, LONG))["usage"] == said(found)["usage"]


@pytest.mark.parametrize("text", UNICODE)
def test_characters_of_several_tokens_come_whole(client, says, text):
    says(text)
    with client.messages.stream(model="demo", messages=HELLO, max_tokens=200) as stream:
        pieces = list(stream.text_stream)
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert ask(client, max_tokens=200).content[0].text == text


@pytest.mark.parametrize(
    "system",
    [
        "be kind",
        [{"type": "text", "text": "be kind"}],
        [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}],
        "x-anthropic-billing-header: cc_version=2.1; cch=36ee5;\nbe kind",
        [{"type": "text", "text": "x-anthropic-billing-header: cch=0aaa9;"}, {"type": "text", "text": "be kind"}],
    ],
)
def test_a_system_text_stands_first_without_the_line_that_changes_with_each_request(client, front, system):
    ask(client, system=system)
    assert prompt_of(front).startswith("be kind")
    assert "anthropic" not in prompt_of(front)
    assert prompt_of(front).endswith("def main")


def test_a_system_text_with_nothing_but_such_a_line_is_none(client, front):
    ask(client, system="X-Anthropic-Billing-Header: cch=1;")
    assert prompt_of(front) == "def main"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "def main"}], "def main"),
        ([{"type": "text", "text": "def"}, {"type": "text", "text": "main"}], "def\nmain"),
        ("def", "def"),
    ],
)
def test_blocks_of_text_are_read_as_a_text(client, front, content, text):
    ask(client, [{"role": "user", "content": content}])
    assert prompt_of(front) == text


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"system": "be kind"},
        {"messages": LONG},
        {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}, *HELLO]},
        {"thinking": {"type": "disabled"}},
    ],
)
def test_a_count_is_what_the_message_then_reads(client, more):
    body = {"messages": HELLO, **more}
    counted = client.messages.count_tokens(model="demo", **body).input_tokens
    usage = client.messages.create(model="demo", max_tokens=1, **body).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens > 0


def test_every_field_of_sampling_reaches_the_engine(client, front):
    # The client has no arguments for the API's older fields any more.
    older = {"temperature": 0.5, "top_p": 0.9, "top_k": 4}
    ours = {"seed": 11, "min_p": 0.05, "repetition_penalty": 1.2}
    ask(client, max_tokens=3, extra_body={**older, **ours})
    _, params, _ = front.engine.submitted[-1]
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (3, 0.5, 0.9, 4)
    assert (params.seed, params.min_p, params.repetition_penalty) == (11, 0.05, 1.2)


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://x.example/a.png"}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}


@pytest.mark.parametrize(
    ("more", "said_of_it"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [DOCUMENT]}]}, "'document'"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "so"}]}, "prefill"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]}, "redacted"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"messages": []}, "at least one message"),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": MAX_MODEL_LEN}, "maximum context length is 512"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"extra_body": {"temprature": 1}}, "did you mean temperature"),
        ({"extra_body": {"min_tokens": 4}}, "min_tokens"),
        ({"extra_body": {"stop": ["x"]}}, "stop"),
        ({"extra_body": {"mcp_servers": [{"type": "url"}]}}, "mcp_servers"),
    ],
)
def test_what_is_wrong_or_not_honoured_is_refused_by_name(client, more, said_of_it):
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, **more)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert said_of_it in caught.value.body["error"]["message"]


def test_without_max_tokens_there_is_no_message(front):
    status, answer = front.post("/v1/messages", {"model": "demo", "messages": HELLO})
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert "max_tokens" in answer["error"]["message"]


def test_another_model_is_not_found(client):
    with pytest.raises(anthropic.NotFoundError, match="--alias") as caught:
        client.messages.create(model="claude-opus-5", messages=HELLO, max_tokens=1)
    assert caught.value.body["error"]["type"] == "not_found_error"
    assert client.messages.create(model="gpt-4o", messages=HELLO, max_tokens=1).model == "gpt-4o"


def test_a_path_that_there_is_not_is_not_found_in_the_shape_of_the_api(front):
    status, answer = front.post("/v1/messages/batches", {})
    assert (status, answer["error"]["type"]) == (404, "not_found_error")


def test_a_key_is_needed_where_there_are_keys():
    key = "a-key-of-some-length-0123456789"
    with served(keys=[key]) as front:
        assert ask(client_of(front, api_key=key)).usage.output_tokens == 2
        with pytest.raises(anthropic.AuthenticationError) as caught:
            ask(client_of(front, api_key="wrong"))
        assert caught.value.body["error"]["type"] == "authentication_error"


def test_a_strange_page_is_not_permitted(front):
    with pytest.raises(anthropic.PermissionDeniedError) as caught:
        ask(client_of(front, default_headers={"origin": "https://evil.example"}))
    assert caught.value.body["error"]["type"] == "permission_error"


def test_a_full_queue_is_a_rate_limit(client, front):
    front.engine.refusal = QueueFull("9 requests wait", code="queue_full", retry_after_s=3.0)
    try:
        with pytest.raises(anthropic.RateLimitError) as caught:
            ask(client)
    finally:
        front.engine.refusal = None
    assert caught.value.body["error"]["type"] == "rate_limit_error"
    assert caught.value.response.headers["retry-after"] == "3"


def test_a_model_that_is_not_there_yet_is_overloaded():
    with served(is_loaded=False) as front:
        wait_for(lambda: front.ask("GET", "/health")[0] == 503)
        with pytest.raises(anthropic.InternalServerError) as caught:
            ask(client_of(front))
    assert caught.value.status_code == 529
    assert caught.value.body["error"]["type"] == "overloaded_error"


def test_a_body_that_is_too_large_is_refused():
    with served(max_body_bytes=2000) as front, pytest.raises(anthropic.APIStatusError) as caught:
        ask(client_of(front), [{"role": "user", "content": "x" * 4000}])
    assert (caught.value.status_code, caught.value.body["error"]["type"]) == (413, "request_too_large")


def test_an_engine_that_fails_is_a_status_and_later_an_event(client, front):
    front.engine.failure = WorkerLost("worker w1 is lost")
    try:
        with pytest.raises(anthropic.APIStatusError, match="worker w1 is lost") as caught:
            ask(client, max_tokens=9)
        assert caught.value.status_code == 529
        pieces = []
        with (
            pytest.raises(anthropic.APIStatusError, match="worker w1 is lost"),
            client.messages.stream(model="demo", messages=HELLO, max_tokens=9) as stream,
        ):
            pieces += stream.text_stream
    finally:
        front.engine.failure = None
    assert pieces


def test_leaving_a_stream_cancels_the_request(client, front):
    before = len(front.engine.cancelled)
    with client.messages.stream(model="demo", messages=HELLO, max_tokens=500) as stream:
        next(iter(stream.text_stream))
    wait_for(lambda: len(front.engine.cancelled) > before and not front.engine.open)


def test_ignored_fields_are_named_in_a_header(client):
    raw = client.messages.with_raw_response.create(
        model="demo", messages=HELLO, max_tokens=1, metadata={"user_id": "me"}, service_tier="auto",
        thinking={"type": "enabled", "budget_tokens": 1024}, extra_headers={"anthropic-beta": "x-2026-01-01"},
        extra_body={"quite_unknown": 1},
    )  # fmt: skip
    assert set(raw.headers["x-dflash-ignored"].split(", ")) == {
        "metadata", "service_tier", "thinking.budget_tokens", "quite_unknown",
    }  # fmt: skip


def test_the_model_is_listed(client):
    assert [model.id for model in client.models.list()] == ["demo", "gpt-4o"]


def test_many_clients_stream_at_the_same_time(front):
    async def one(client: anthropic.AsyncAnthropic, number: int) -> str:
        messages = [{"role": "user", "content": f"def f{number}"}]
        async with client.messages.stream(model="demo", messages=messages, max_tokens=20) as stream:
            return "".join([text async for text in stream.text_stream])

    async def all_of_them() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=front.url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(20)))

    assert asyncio.run(all_of_them()) == [repeated(f"def f{number}", 20) for number in range(20)]
