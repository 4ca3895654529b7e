"""Thoughts, text and calls as blocks of a message and as items of a response, whole and in events;
and what a stream says while nothing comes.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.engine.sampling.token_logprobs import TokenLogprobs
from dflash_moe.engine.text import Chunk
from dflash_moe.server.front import event_stream
from dflash_moe.server.front.answer import Usage
from dflash_moe.server.front.anthropic_reply import AnthropicReply
from dflash_moe.server.front.api_error import ApiError
from dflash_moe.server.front.event_stream import EventStream
from dflash_moe.server.front.message_pieces import CallPiece, Messages, Piece
from dflash_moe.server.front.replies import Heading
from dflash_moe.server.front.responses_reply import ResponsesReply

HEADING = Heading("x", "demo", "fp_0")
PIECES = [
    Piece(reasoning="I "), Piece(reasoning="look."), Piece(content="Let me"),
    Piece(content=" see", calls=(CallPiece(0, "c1", "f"),)),
    Piece(calls=(CallPiece(0, arguments='{"a": '),)),
    Piece(calls=(CallPiece(0, arguments='"ü"}'), CallPiece(1, "c2", "g", '{"b": [1, 2]}'))),
]  # fmt: skip
WHOLE = Piece("I look.", "Let me see", (CallPiece(0, "c1", "f", '{"a": "ü"}'), CallPiece(1, "c2", "g", '{"b": [1, 2]}')))


class Reader:
    """Gives pieces in turn, whatever it is given."""

    is_thinking = False

    def __init__(self, *pieces: Piece) -> None:
        self.left = list(pieces)
        self.calls = any(not call.is_broken for call in pieces[-1].calls)

    def push(self, _text: str, *, is_last: bool) -> Piece:
        assert is_last == (len(self.left) == 1)
        return self.left.pop(0)

    @property
    def has_called(self) -> bool:
        return not self.left and self.calls


def anthropic(*pieces: Piece) -> AnthropicReply:
    return AnthropicReply(HEADING, Messages(lambda: Reader(*pieces)))


def responses(*pieces: Piece) -> ResponsesReply:
    return ResponsesReply(HEADING, Messages(lambda: Reader(*pieces)), None, SamplingParams(max_tokens=9), {}, None)


def events(raw: bytes) -> list[dict]:
    return [json.loads(part.split("\ndata: ")[1]) for part in raw.decode().split("\n\n") if part]


def streamed(reply: object, reason: str = "stop") -> list[dict]:
    raw = reply.first(Usage(3))
    for number in range(len(PIECES)):
        raw += reply.chunk(0, Chunk("x", (5,), finish_reason=reason if number == len(PIECES) - 1 else None))
    return events(raw + reply.last(Usage(3, 1, 6)))


def whole(reply: object, reason: str = "stop") -> dict:
    reply.read(0, Chunk("xxx", (5, 6), finish_reason=reason))
    return reply.whole([], Usage(3, 1, 6))


def put_together(found: list[dict]) -> list[dict]:
    """The blocks of a message's events, each with its text."""
    blocks = []
    for event in found:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "said": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            blocks[-1]["said"] += next(value for name, value in event["delta"].items() if name != "type")
    return blocks


def test_a_message_has_a_block_for_each_thought_text_and_call():
    found = whole(anthropic(WHOLE))
    assert found["content"] == [
        {"type": "thinking", "thinking": "I look.", "signature": ""}, {"type": "text", "text": "Let me see"},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": "ü"}},
        {"type": "tool_use", "id": "c2", "name": "g", "input": {"b": [1, 2]}},
    ]  # fmt: skip
    assert (found["stop_reason"], found["usage"]["input_tokens"]) == ("tool_use", 2)


def test_the_blocks_of_a_stream_say_the_same():
    found = streamed(anthropic(*PIECES))
    assert [(block["type"], block["said"]) for block in put_together(found)] == [
        ("thinking", "I look."), ("text", "Let me see"), ("tool_use", '{"a": "ü"}'), ("tool_use", '{"b": [1, 2]}'),
    ]  # fmt: skip
    kinds = [event["type"] for event in found]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    calls = [event["content_block"] for event in found if event["type"] == "content_block_start"][2:]
    assert calls == [{"type": "tool_use", "id": "c1", "name": "f", "input": {}}, {"type": "tool_use", "id": "c2", "name": "g",
                                                                                "input": {}}]  # fmt: skip
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_call_that_max_tokens_has_cut_has_no_input():
    cut = Piece(calls=(CallPiece(0, "c1", "f", '{"a": '),))
    found = whole(anthropic(cut), "length")
    assert (found["content"][0]["input"], found["stop_reason"]) == ({}, "max_tokens")


def test_a_response_has_an_item_for_each_thought_text_and_call():
    found = whole(responses(WHOLE))
    assert [item["type"] for item in found["output"]] == ["reasoning", "message", "function_call", "function_call"]
    thought, message, *calls = found["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "I look."}]
    assert (thought["summary"], message["content"][0]["text"]) == ([], "Let me see")
    assert [(call["call_id"], call["name"], call["arguments"]) for call in calls] == [
        ("c1", "f", '{"a": "ü"}'), ("c2", "g", '{"b": [1, 2]}'),
    ]  # fmt: skip
    assert {item["status"] for item in found["output"]} == {found["status"]} == {"completed"}
    assert found["usage"]["input_tokens_details"]["cached_tokens"] == 1


def test_the_items_of_a_streamed_response_are_those_of_the_whole_one():
    found = streamed(responses(*PIECES))
    assert [event["sequence_number"] for event in found] == list(range(len(found)))

    def plain(items: list[dict]) -> list[dict]:
        return [{name: value for name, value in item.items() if name != "id"} for item in items]

    last = found[-1]["response"]
    assert plain(last["output"]) == plain(whole(responses(WHOLE))["output"])
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    added = [event["item"]["id"] for event in found if event["type"] == "response.output_item.added"]
    assert added == [item["id"] for item in done]
    for kind, text in (("reasoning_text", "I look."), ("output_text", "Let me see")):
        deltas = [event["delta"] for event in found if event["type"] == f"response.{kind}.delta"]
        assert ("".join(deltas), len(deltas)) == (text, 2)
        assert [event["text"] for event in found if event["type"] == f"response.{kind}.done"] == [text]
    arguments = [event for event in found if event["type"] == "response.function_call_arguments.done"]
    assert [(event["name"], event["arguments"]) for event in arguments] == [("f", '{"a": "ü"}'), ("g", '{"b": [1, 2]}')]


def test_the_last_item_of_a_response_that_max_tokens_has_cut_is_incomplete():
    for found in (whole(responses(WHOLE), "length"), streamed(responses(*PIECES), "length")[-1]["response"]):
        assert [item["status"] for item in found["output"]] == ["completed"] * 3 + ["incomplete"]
        assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


BROKEN = (
    Piece(content="so "), Piece(calls=(CallPiece(0, "c1", "f", '{"a'),)),
    Piece(content='<f>{"a', calls=(CallPiece(0, is_broken=True),)),
)  # fmt: skip


def test_a_call_that_was_none_is_text_and_no_block_of_the_whole_message():
    reply = anthropic(*BROKEN)
    for number in range(3):
        reply.read(0, Chunk("x", (5,), finish_reason="stop" if number == 2 else None))
    found = reply.whole([], Usage(3, 1, 6))
    assert [(block["type"], block["text"]) for block in found["content"]] == [("text", "so "), ("text", '<f>{"a')]
    assert found["stop_reason"] == "end_turn"


def test_a_call_that_was_none_is_an_incomplete_item_of_the_stream_and_none_of_the_response():
    reply = responses(*BROKEN)
    raw = b"".join(reply.chunk(0, Chunk("x", (5,), finish_reason="stop" if number == 2 else None)) for number in range(3))
    found = events(raw + reply.last(Usage(3, 1, 6)))
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert [(item["type"], item["status"]) for item in done] == [
        ("message", "completed"), ("function_call", "incomplete"), ("message", "completed"),
    ]  # fmt: skip
    assert found[-1]["response"]["output"] == [done[0], done[2]]


def test_logprobs_of_thoughts_are_none_of_the_text():
    tokenizer = SimpleNamespace(token_bytes=lambda token_id: bytes([token_id]))
    pieces = (Piece(), Piece(reasoning="b"), Piece(), Piece(content="d"), Piece(content="e"))
    messages = Messages(lambda: Reader(*pieces))
    reply = ResponsesReply(HEADING, messages, tokenizer, SamplingParams(max_tokens=9, logprobs=0), {}, None)
    for token_id in b"abcde":
        found = (TokenLogprobs(token_id, -1.0, 1, ()),)
        reply.read(0, Chunk("x", (token_id,), logprobs=found, finish_reason="stop" if token_id == ord("e") else None))
    _, message = reply.whole([], Usage(3, 1, 5))["output"]
    assert [one["token"] for one in message["content"][0]["logprobs"]] == ["d", "e"]


class Answer:
    """Nothing comes at first, then a chunk, then an error."""

    has_ended = False
    usage = Usage(3)

    def __init__(self, first: object = None) -> None:
        self.left: list[object] = [first, [(0, Chunk("x", (5,)))]]

    async def take(self, _timeout_s: float) -> object:
        if not self.left:
            raise ApiError(503, "worker w1 is lost", code="worker_lost")
        return self.left.pop(0)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("reply", "kinds"),
    [
        (anthropic, ["message_start", "ping", "content_block_start", "content_block_delta", "error"]),
        (responses, ["response.created", "response.in_progress", ": waiting", "response.output_item.added",
                     "response.content_part.added", "response.output_text.delta", "response.failed"]),
    ],
)  # fmt: skip
def test_silence_is_broken_and_a_failure_is_an_event(reply, kinds):
    assert heads_of(reply(Piece(content="x"), Piece()), Answer()) == kinds


def test_silence_is_broken_while_all_that_comes_is_held_back(monkeypatch):
    monkeypatch.setattr(event_stream, "SILENCE_S", 0.0)
    found = heads_of(anthropic(Piece(), Piece(content="x"), Piece()), Answer([(0, Chunk("", (4,)))]))
    assert found == ["message_start", "ping", "content_block_start", "content_block_delta", "error"]


def heads_of(made: object, answer: Answer) -> list[str]:
    """The kinds of the events of a stream."""
    sent = b""

    async def send(message: dict) -> None:
        nonlocal sent
        sent += message.get("body", b"")

    async def receive() -> dict:
        await asyncio.Event().wait()
        raise AssertionError

    asyncio.run(EventStream(answer, made, {}).respond(receive, send))
    return [part.split("\n")[0].removeprefix("event: ") for part in sent.decode().split("\n\n") if part]
