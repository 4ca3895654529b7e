"""One streamed answer: tokens and not events are counted, gaps stay as they were, and whatever a
server does ends within the time limit, with a reason.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest

pytest.importorskip("httptools")

from dflash_moe.bench.streaming.endpoint import endpoint_of
from dflash_moe.bench.streaming.stream import Events, Streamed, stream
from dflash_moe.errors import ConfigError
from tests.unit.bench.streaming.scripted_server import STREAM, answer, chunk, event, refusal, scripted, tokens, usage


def streamed(url: str, timeout_s: float = 60.0) -> Streamed:
    found, endpoint = Streamed(), endpoint_of(url)
    asyncio.run(stream(endpoint, endpoint.request("completions", b"{}"), found, timeout_s))
    return found


def read(*events: bytes) -> Streamed:
    """The events at seconds 1, 2, ...; what is missing at their end is the error."""
    found = Streamed()
    reader = Events(found)
    for second, one in enumerate(events, start=1):
        reader.feed(one, float(second))
    found.error = reader.end()
    return found


DONE = b"data: [DONE]\n\n"


def test_tokens_are_those_of_usage_and_not_events():
    found = read(event("a"), event("bcd"), event("e"), event(usage=usage(5)), DONE)
    assert (found.error, found.tokens, found.prompt_tokens, len(found.times)) == ("", 5, 10, 3)
    # How the tokens lie in the events is unknown: each gap counts once, and none is divided.
    assert not found.tells_counts
    assert found.gaps_s() == [1.0, 1.0]
    assert found.tpot_s == (3.0 - 1.0) / 4


@pytest.mark.parametrize(
    "events",
    [
        [event("ab", usage=usage(2)), event("cde", usage=usage(5)), event("", usage=usage(5), finish_reason="stop")],
        [event("ab", token_ids=[1, 2]), event("cde", token_ids=[3, 4, 5]), event("", finish_reason="stop")],
        [event("ab", logprobs={"tokens": ["a", "b"]}), event("cde", logprobs={"content": [{}, {}, {}]})],
    ],
)
def test_a_gap_counts_for_every_token_that_its_event_tells(events):
    found = read(*events, event(usage=usage(5)), DONE)
    assert (found.error, found.counts, found.tells_counts) == ("", [2, 3], True)
    assert found.gaps_s() == [1.0, 1.0, 1.0]
    # The first two tokens came at once, and three behind them.
    assert found.tpot_s == 1.0 / 3


def test_ids_count_where_there_is_no_usage():
    assert read(event("ab", token_ids=[1, 2]), DONE).tokens == 2
    assert "no usage" in read(event("ab"), DONE).error


def chat_event(reason: str | None = None, **delta: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}).encode() + b"\n\n"


def test_roles_and_ends_are_no_tokens_and_thoughts_and_tokens_without_text_are():
    last = event(usage=usage(3))
    first = chat_event(role="assistant", content="")
    found = read(first, chat_event(reasoning_content="hm"), chat_event(content=""), chat_event(content="x"), last, DONE)
    assert (found.error, found.times) == ("", [2.0, 3.0, 4.0])
    assert read(first, chat_event(content="x"), chat_event("stop", content=""), chat_event("stop"), last, DONE).times == [2.0]
    assert read(event(""), event("x"), event("", finish_reason="stop"), last, DONE).times == [1.0, 2.0]


def test_the_first_event_with_a_choice_is_the_first_token_whatever_it_says():
    role, empty, last = chat_event(role="assistant", content=""), event(""), event(usage=usage(3))
    for first in (role, chat_event(role="assistant"), empty):
        found = read(b": waiting\n\n", first, event("x"), event("y"), last, DONE)
        assert (found.error, found.began, found.times[-1]) == ("", 2.0, 4.0)
        assert found.ttft_s == 2.0 - found.submitted
        assert found.tpot_s == 2.0 / 2


def test_an_answer_without_any_text_came_when_it_ended():
    found = read(event("", finish_reason="length"), event(usage=usage(2)), DONE)
    assert (found.error, found.tokens, found.times, found.tpot_s) == ("", 2, [1.0], None)


def test_queue_time_and_cached_tokens_are_the_servers():
    found = read(event("a"), event(usage=usage(1, queue_time=0.5, prompt_tokens_details={"cached_tokens": 3})), DONE)
    assert (found.queue_s, found.cached_tokens) == (0.5, 3)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'data: {"error": {"message": "worker w1 is lost"}}\n\n', "an event says: worker w1 is lost"),
        (b"data: {\n\n", "not one of OpenAI's API"),
        (b"data: [1]\n\n", "not one of OpenAI's API"),
        (b'data: {"choices": [5]}\n\n', "not one of OpenAI's API"),
        (b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": Infinity}}\n\n', "not one of OpenAI's API"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "not one of OpenAI's API"),
        (b"", "ended without [DONE]"),
    ],
)
def test_what_is_no_answer_is_said(raw, said):
    assert said in read(event("a"), raw).error


def test_events_are_read_wherever_they_are_cut():
    whole = (event("a") + b": waiting\n\n" + event("b") + event(usage=usage(2)) + DONE).replace(b"\n\n", b"\r\n\r\n")
    for size in (1, 2, 7):
        found = read(*(whole[at : at + size] for at in range(0, len(whole), size)))
        assert (found.error, found.tokens, len(found.times)) == ("", 2, 2)


def test_an_answer_of_a_server_is_timed():
    def script(_body, send):
        send(STREAM + chunk(event("a")))
        time.sleep(0.05)
        send(chunk(event("b") + event(usage=usage(2))) + chunk(DONE) + b"0\r\n\r\n")

    with scripted(script) as server:
        found = streamed(server.url)
    assert (found.error, found.status, found.tokens) == ("", 200, 2)
    assert found.submitted < found.times[0]
    assert found.times[1] - found.times[0] >= 0.05
    assert found.times[1] <= found.ended


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (refusal(503, "the model is being loaded"), "status 503: the model is being loaded"),
        (b"HTTP/1.1 500 No\r\n\r\nboom", "status 500: boom"),
        (STREAM + chunk(event("a")), "closed before the answer had ended"),
        (b"", "closed before the answer had ended"),
        (b"hello\r\n\r\n", "no HTTP"),
        (answer(event("a"), done=b""), "ended without [DONE]"),
        (answer(event(usage=usage(0))), "has no token"),
        (answer(event("a"), event(usage=usage(0))), "has no token"),
    ],
)
def test_a_broken_answer_has_its_reason(raw, said):
    with scripted(raw) as server:
        assert said in streamed(server.url).error


def test_a_refusal_says_how_long_to_wait():
    with scripted(refusal(429, "9 requests wait", "Retry-After: 7")) as server:
        found = streamed(server.url)
    assert (found.is_refused, found.retry_after_s, found.error) == (True, 7.0, "status 429: 9 requests wait")


def test_a_server_that_hangs_is_given_up():
    def script(_body, send):
        send(STREAM + chunk(event("a")))
        server.is_over.wait(60)

    with scripted(script) as server:
        found = streamed(server.url, timeout_s=0.2)
        assert (found.error, found.tokens) == ("the answer had not ended after 0.2 s", 1)


def test_nobody_listening_is_said():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert streamed(f"http://127.0.0.1:{port}").error == "Connection refused"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "expected http"), ("localhost:8000", "expected http"), ("ftp://x", "expected http"), ("http://", "expected http"),
        ("http://x:99999", "no URL"), ("http://[::1", "no URL"), ("http://ü", "no URL"), ("http://x/a b", "expected http"),
        ("http://" + "x" * 64, "no URL"), ("http://x..y", "no URL"), ("http://x/\r\nhost: y", "expected http"),
        ("http://x/?key=5", "expected http"), ("http://me:key@x", "--api-key-file"),
    ],
)  # fmt: skip
def test_what_is_no_url_is_refused(url, said):
    with pytest.raises(ConfigError, match=said):
        endpoint_of(url)


@pytest.mark.parametrize("url", ["http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/"])
def test_a_url_may_end_in_its_version(url):
    head = endpoint_of(url, "a-key").request("chat/completions", b"{}").decode().split("\r\n")
    assert head[0] == "POST /v1/chat/completions HTTP/1.1"
    assert {"host: h:8000", "authorization: Bearer a-key", "content-length: 2"} <= set(head)
    assert endpoint_of("https://h/base/v1").request("x", b"").startswith(b"POST /base/v1/x HTTP/1.1\r\nhost: h\r\n")


def test_the_first_model_is_asked_for():
    with scripted(tokens(1)) as server:
        assert endpoint_of(server.url).first_model() == "scripted"
