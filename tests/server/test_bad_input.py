"""What bad input gets: an error of HTTP in the API's shape, soon, and the next request is answered.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from tests.server.served import Served, served, wait_for

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def _goes_on(front: Served) -> Iterator[None]:
    yield
    assert front.post(TEXT, {"prompt": "def", "max_tokens": 1})[0] == 200


def refused(front: Served, path: str, body: object, status: int = 400) -> dict:
    found, answer = front.post(path, body)
    assert found == status, answer
    assert answer["error"].keys() >= {"message", "type", "param", "code"}
    return answer["error"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b"\xff\xfe", b"[" * 200_000, b'{"messages": ' * 1000,
        b'{"prompt": "\\ud800", "messages": 5}',
        {"messages": 5}, {"messages": []}, {"messages": ["hi"]}, {"messages": [{}]},
        {"messages": [{"role": 5, "content": "x"}]},
        {"messages": [{"role": "user", "content": 5}]}, {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": HELLO, "stream": "yes"}, {"messages": HELLO, "stream_options": {}}, {"messages": HELLO, "max_tokens": -5},
        {"messages": HELLO, "max_tokens": 1e400}, {"messages": HELLO, "max_tokens": 10**30},
        {"messages": HELLO, "temperature": [1]},
        {"messages": HELLO, "stop": ["x"] * 10_000}, {"messages": HELLO, "logit_bias": {"99999999": 1}},
        {"messages": HELLO, "chat_template_kwargs": {"messages": []}},
        {"messages": HELLO, "chat_template_kwargs": {"tools": []}},
        {"messages": HELLO, "chat_template_kwargs": 5}, {"messages": HELLO, "chat_template_kwargs": {"self": 1}},
        {"messages": HELLO, "model": 5},
    ],
)  # fmt: skip
def test_chats_that_are_none_are_refused(front, body):
    refused(front, CHAT, body)


@pytest.mark.parametrize(
    "prompt",
    [None, 5, "", [], [[]], [5.5], ["a", 5], [True], [-1], [10**12], {"a": 1}, ["a"] * 1000, "\ud800", [[1], "a", 5], [[True]]],
)
def test_prompts_that_are_none_are_refused(front, prompt):
    refused(front, TEXT, {"prompt": prompt, "max_tokens": 1})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}), ("/tokenize", {"prompt": 5}), ("/tokenize", {"prompt": "a", "content": "b"}),
        ("/tokenize", {"prompt": "\ud800"}),
        ("/detokenize", {}), ("/detokenize", {"tokens": "a"}), ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": [None]}),
    ],
)  # fmt: skip
def test_texts_and_tokens_that_are_none_are_refused(front, path, body):
    refused(front, path, body)


@pytest.mark.parametrize("depth", [940, 960, 970, 980, 2000])
def test_tools_that_are_nested_too_deeply_are_refused(front, depth):
    # A body of this size is parsed in a thread, where more of the stack is left than later.
    schema = '{"a":' * depth + "1" + "}" * depth
    tools = f'[{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}]'
    body = f'{{"user": "{"x" * 70_000}", "messages": [{{"role": "user", "content": "hi"}}], "tools": {tools}}}'
    refused(front, "/v1/chat/completions", body.encode())


def test_bodies_beyond_the_bound_are_refused_announced_or_not(front):
    large = b'{"prompt": "' + b"x" * (9 << 20) + b'"}'
    assert refused(front, TEXT, large, 413)["code"] == "body_too_large"
    with socket.create_connection(("127.0.0.1", front.bound.port)) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        part = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
        for _ in range(20):
            sock.sendall(part)
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 413")
        # Whoever goes on sending is cut off.
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            sock.sendall(part * 200)


def test_encoded_bodies_are_refused(front):
    assert front.ask("POST", TEXT, b"x", {"content-encoding": "gzip"})[0] == 415


def raw_answer(front: Served, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", front.bound.port), timeout=30) as sock:
        sock.sendall(sent)
        found = b""
        try:
            while part := sock.recv(1 << 16):
                found += part
        except ConnectionResetError:
            pass
        return found


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x-flood: " + b"y" * 100_000, b"431"),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"".join(b"x-%d: %s\r\n" % (n,
        b"y" * 60) for n in range(2000)) + b"\r\n", b"431"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", b"431"),
        (b"this is no request\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
    ],
)  # fmt: skip
def test_heads_that_are_too_large_or_none_are_answered_and_closed(front, sent, status):
    found = raw_answer(front, sent)
    assert found.split(b" ", 2)[1] == status
    body = found.partition(b"\r\n\r\n")[2]
    assert json.loads(body)["error"]["message"]


def test_more_choices_than_may_wait_are_refused_before_the_engine_is_asked():
    with served(told={"max_queue": 4}) as front:
        assert front.post(TEXT, {"prompt": ["a", "b"], "n": 2, "max_tokens": 1})[0] == 200
        asked = len(front.engine.submitted)
        for path, body in ((TEXT, {"prompt": ["a", "b", "c"], "n": 2}), (CHAT, {"messages": HELLO, "n": 5})):
            assert refused(front, path, {**body, "max_tokens": 1})["param"] == "n"
        assert len(front.engine.submitted) == asked


def test_a_template_that_loops_is_ended_after_its_second_and_others_go_on():
    looping = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
    with served(told={"template": looping}) as front:
        began = time.monotonic()
        status, answer = front.post(CHAT, {"messages": HELLO})
        assert status == 500
        # A busy machine does not give it its second of processor time soon enough.
        assert any(words in answer["error"]["message"] for words in ("processor time", "no answer came"))
        assert time.monotonic() - began < 30
        assert front.post(TEXT, {"prompt": "def", "max_tokens": 1})[0] == 200


def test_a_template_that_refuses_says_so_and_a_model_without_one_too():
    with served(told={"template": "{{ raise_exception('no system') }}"}) as front:
        status, answer = front.post(CHAT, {"messages": HELLO})
        assert (status, "no system" in answer["error"]["message"]) == (400, True)
    with served(told={"no_template": "/srv/secret/model: there is none"}) as front:
        error = refused(front, CHAT, {"messages": HELLO})
        assert (error["param"], error["code"]) == ("messages", "no_chat_template")
        assert "/v1/completions" in error["message"]
        assert "secret" not in error["message"]


def test_a_path_or_method_that_is_none_gets_those_that_are(front):
    error = refused(front, "/chat/completions", {"messages": HELLO}, 404)
    assert "POST /chat/completions" in error["message"]
    assert "/v1/chat/completions, /v1/completions" in error["message"]
    assert "/v1/models/{name}" in error["message"]
    assert "/page" not in error["message"]
    status, answer, _ = front.ask("GET", CHAT)
    assert status == 405
    assert "it takes POST" in answer["error"]["message"]


def test_heads_that_do_not_come_are_given_up(front):
    with (
        socket.create_connection(("127.0.0.1", front.bound.port), timeout=60) as silent,
        socket.create_connection(("127.0.0.1", front.bound.port), timeout=60) as half,
    ):
        half.sendall(b"GET /health HTTP/1.1\r\nhost: loc")
        assert half.recv(1 << 16).startswith(b"HTTP/1.1 408")
        assert silent.recv(1) == b""
    wait_for(lambda: front.ask("GET", "/health")[0] == 200)
