"""Three thousand odd bodies, drawn by a seed: each is answered soon, in the API's shape, and none
is a fault of the server. NUM_BODIES in the environment asks for another number (`make campaign`).

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import http.client
import json
import os
import random
import time
from typing import Any

from dflash_moe.server.front import request_fields
from tests.server.served import WAIT_S, Served

NUM_BODIES = int(os.environ.get("NUM_BODIES", "3000"))
ROUTES = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
    "/v1/responses": "responses",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
ODD = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**40, 0.5, -0.5, 1e308, float("nan"), float("inf"), "", "x", "\ud800", "\0",
    "1", "auto", "x" * 5000, [], [[]], [None], ["x"], [1, 2], [-1], [1.5], [["a"]], ["x"] * 100,
    {}, {"x": 1}, {"1": 1}, {"a": {"b": []}},
    [{"role": "user", "content": "hi"}], [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    [{"role": "system"}],
    [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "assistant", "content": None, "tool_calls": [{}]}],
    {"include_usage": True}, {"type": "json_object"}, "def main", [5, 6, 7],
    {"type": "enabled", "budget_tokens": "x"}, {"type": "tool", "name": 5}, {"effort": [], "format": {"type": {}}},
    [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": []}]}],
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": {}, "content": [{"type": "image"}]}]}],
    [{"type": "function_call", "call_id": None, "name": "f", "arguments": {}}], [{"type": ["reasoning"], "summary": 5}],
    [{"type": "reasoning", "content": [{"type": "reasoning_text"}]}], [{"type": "function_call_output", "output": [5]}],
    [{"name": "f", "input_schema": []}], [{"type": "function", "name": {}, "parameters": "x"}], {"verbosity": {}, "format": 5},
)  # fmt: skip
# How a stream of each API ends.
ENDS = {
    "/v1/messages": (b'{"type":"message_stop"}',),
    "/v1/responses": (b"event: response.completed\n", b"event: response.incomplete\n"),
}
GOOD = {
    "chat": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}, "completions": {"prompt": "def",
    "max_tokens": 2},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "responses": {"input": "hi", "max_output_tokens": 2},
    "tokenize": {"prompt": "def"}, "detokenize": {"tokens": [5, 6]},
}  # fmt: skip


def odd_body(draw: random.Random, route: str) -> Any:
    if draw.random() < 0.05:
        return draw.choice(ODD)
    body: dict[str, Any] = dict(GOOD[route]) if draw.random() < 0.8 else {}
    names = sorted({*request_fields.HONOURED[route], *request_fields.REFUSED, *request_fields.IGNORED})
    for _ in range(draw.randrange(4)):
        body[draw.choice([*sorted(request_fields.HONOURED[route]), draw.choice(names), "zzz", "x\r\ny"])] = draw.choice(ODD)
    return body


def test_odd_bodies_are_answered_soon_and_in_shape(front: Served):
    draw = random.Random(30)
    connection = http.client.HTTPConnection("127.0.0.1", front.bound.port, timeout=WAIT_S)
    statuses: dict[int, int] = {}
    for number in range(NUM_BODIES):
        path = draw.choice(list(ROUTES))
        raw = json.dumps(odd_body(draw, ROUTES[path])).encode()
        if draw.random() < 0.1:
            raw = raw[: draw.randrange(len(raw) + 1)] + bytes(draw.randrange(256) for _ in range(draw.randrange(3)))
        connection.request("POST", path, raw)
        answer = connection.getresponse()
        text = answer.read()
        what = (number, path, raw[:200], answer.status, text[:300])
        statuses[answer.status] = statuses.get(answer.status, 0) + 1
        assert answer.status in (200, 400, 404), what
        if answer.status != 200:
            is_anthropic = path.startswith("/v1/messages")
            named = {"message", "type"} if is_anthropic else {"message", "type", "param", "code"}
            assert json.loads(text)["error"].keys() >= named, what
            assert not is_anthropic or json.loads(text)["type"] == "error", what
        elif answer.headers["content-type"].startswith("text/event-stream"):
            assert any(end in text[-10_000:] for end in ENDS.get(path, (b"data: [DONE]\n\n",))), what
        else:
            json.loads(text)
    connection.close()
    assert statuses[200] > NUM_BODIES / 20
    assert statuses[400] > NUM_BODIES / 5
    deadline = time.monotonic() + WAIT_S
    while front.engine.open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not front.engine.open
