"""What one request is answered, out of the tokens of its choices, without a connection.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dflash_moe.engine.request import CANCELLED, ERROR, LENGTH, TokenDelta
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.engine.sampling.token_logprobs import TokenLogprobs
from dflash_moe.server.front.answer import Answer
from dflash_moe.server.front.api_error import ApiError
from dflash_moe.server.front.event_stream import EventStream, whole
from dflash_moe.server.front.message_pieces import Messages
from dflash_moe.server.front.replies import ChatReply, CompletionReply, Heading
from dflash_moe.server.front.tokens import FrontTokenizer
from tests.server.served import facts, ids_of

FAILED = ApiError(500, "the choice has failed")


class Engine:
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.submitted: list[SamplingParams] = []
        self.cancelled: list[tuple[int, int | None]] = []

    def submit(
        self, _answer: Answer, _place: int, _token_ids: Sequence[int], params: SamplingParams, _salt: bytes, _grammar: str
    ) -> int:
        self.submitted.append(params)
        return len(self.submitted)

    def cancel(self, request_id: int, choice: int | None = None) -> None:
        self.cancelled.append((request_id, choice))

    def forget(self, request_id: int) -> None: ...


@pytest.fixture(scope="module")
def front_tokenizer() -> FrontTokenizer:
    return FrontTokenizer(facts()["tokenizer"])


async def never() -> Any:
    await asyncio.Event().wait()


def answered(tok: FrontTokenizer, put: Callable[[Answer], None], **params: Any) -> Any:
    """The choices of an answer that is not streamed; `put` gives it its tokens."""

    async def ask() -> Any:
        answer = Answer(Engine(), tok, [[1]], SamplingParams(**params))
        put(answer)
        answer.arrived()
        return await whole(answer, never, lambda _place, _chunk: None)

    return asyncio.run(ask())


def test_an_error_of_a_choice_that_was_stopped_fails_nothing(front_tokenizer):
    def put(answer: Answer) -> None:
        answer.put(0, TokenDelta(0, tuple(ids_of("one STOP two"))))
        answer.put(0, TokenDelta(0, (), finish_reason=ERROR), FAILED)
        answer.put(0, TokenDelta(1, tuple(ids_of("other")), finish_reason=LENGTH))

    found = answered(front_tokenizer, put, n=2, stop=("STOP",), max_tokens=50)
    assert [(one.text, one.finish_reason) for one in found] == [("one ", "stop"), ("other", "length")]


@pytest.mark.parametrize("reason", [ERROR, CANCELLED])
def test_an_error_of_any_other_choice_fails_the_answer_and_ends_all_of_it(front_tokenizer, reason):
    async def ask() -> Engine:
        engine = Engine()
        answer = Answer(engine, front_tokenizer, [[1], [2]], SamplingParams(max_tokens=50))
        answer.put(0, TokenDelta(0, tuple(ids_of("one")), finish_reason=LENGTH))
        answer.put(1, TokenDelta(0, (), finish_reason=reason), FAILED if reason == ERROR else None)
        answer.arrived()
        with pytest.raises(ApiError) as caught:
            await whole(answer, never, lambda _place, _chunk: None)
        assert caught.value.status == (500 if reason == ERROR else 503)
        return engine

    asyncio.run(ask())


def test_the_end_of_the_engine_takes_nothing_from_an_answer_that_is_all_there(front_tokenizer):
    async def ask() -> bytes:
        answer = Answer(Engine(), front_tokenizer, [[1]], SamplingParams(max_tokens=50))
        sent, wrote = streamed(
            answer, CompletionReply(HEADING, front_tokenizer, has_logprobs=False, has_usage=False, echo=no_text)
        )
        await asyncio.sleep(0)
        answer.put(0, TokenDelta(0, tuple(ids_of("one"))))
        answer.arrived()
        await settled()
        answer.put(0, TokenDelta(0, tuple(ids_of(" two")), finish_reason=LENGTH))
        answer.arrived()
        assert answer.has_all
        await wrote
        return b"".join(sent)

    assert asyncio.run(ask()).endswith(b"data: [DONE]\n\n")


HEADING = Heading("cmpl", "demo", "fp")


def no_text(_place: int) -> str:
    return ""


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def streamed(answer: Answer, reply: Any) -> tuple[list[bytes], asyncio.Future[None]]:
    """What is written of an answer, each time, and the task that writes it."""
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    def write_now(text: bytes) -> bool:
        if text:
            sent.append(text)
        return True

    stream = EventStream(answer, reply, {}, write_now)
    return sent, asyncio.ensure_future(stream.respond(never, send))


def test_tokens_of_a_step_are_written_as_they_arrive_without_a_task(front_tokenizer):
    async def ask() -> None:
        answer = Answer(Engine(), front_tokenizer, [[1]], SamplingParams(max_tokens=50, n=2))
        reply = CompletionReply(HEADING, front_tokenizer, has_logprobs=False, has_usage=False, echo=no_text)
        sent, wrote = streamed(answer, reply)
        await settled()
        answer.put(0, TokenDelta(0, tuple(ids_of("a"))))
        answer.arrived()
        await settled()
        before = len(sent)
        for choice in range(2):
            answer.put(0, TokenDelta(choice, tuple(ids_of("b"))))
        answer.arrived()
        # Both are one write, and nobody has been waited for.
        assert len(sent) == before + 1
        assert sent[-1].count(b"data: ") == 2
        answer.close()
        wrote.cancel()
        await asyncio.gather(wrote, return_exceptions=True)

    asyncio.run(ask())


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_choice_begins_with_its_first_token_even_if_that_has_no_text(front_tokenizer, is_chat):
    """A half letter has none. The next such token sends nothing."""
    first, second, *rest = ids_of("\N{GRINNING FACE}")
    assert len(rest) >= 1, "the letter is to have three tokens at least"

    async def ask() -> list[bytes]:
        answer = Answer(Engine(), front_tokenizer, [[1]], SamplingParams(max_tokens=50))
        reply: Any = ChatReply(HEADING, front_tokenizer, Messages(), has_logprobs=False, has_usage=False)
        if not is_chat:
            reply = CompletionReply(HEADING, front_tokenizer, has_logprobs=False, has_usage=False, echo=no_text)
        sent, wrote = streamed(answer, reply)
        written = []
        for tokens, reason in (((first,), None), ((second,), None), (tuple(rest), LENGTH)):
            answer.put(0, TokenDelta(0, tokens, finish_reason=reason))
            answer.arrived()
            await settled()
            written.append(b"".join(sent))
            sent.clear()
        await wrote
        return written

    begin, nothing, text = asyncio.run(ask())
    (choice,) = json.loads(begin.removeprefix(b"data: "))["choices"]
    assert choice["delta" if is_chat else "text"] == ({"role": "assistant", "content": ""} if is_chat else "")
    assert nothing == b""
    assert json.dumps("\N{GRINNING FACE}").encode() in text


def test_offsets_of_tokens_are_those_of_the_text_given_out(front_tokenizer):
    text = "a\N{GRINNING FACE}b"
    ids = ids_of(text)
    found = tuple(TokenLogprobs(token, -0.5, 1, ()) for token in ids)

    def put(answer: Answer) -> None:
        for place, (token, logprobs) in enumerate(zip(ids, found, strict=True), start=1):
            answer.put(0, TokenDelta(0, (token,), (logprobs,), LENGTH if place == len(ids) else None))

    choices = answered(front_tokenizer, put, logprobs=0, max_tokens=50)
    assert choices[0].text == text
    reply = CompletionReply(HEADING, front_tokenizer, has_logprobs=True, has_usage=False, echo=no_text)
    offsets = reply.whole(choices, USAGE)["choices"][0]["logprobs"]["text_offset"]
    assert len(ids) >= 4
    # All tokens of the letter are where it is.
    assert offsets == [0, *[1] * (len(ids) - 2), 2]


class _Usage:
    def fields(self) -> dict[str, Any]:
        return {}


USAGE: Any = _Usage()


def test_each_prompt_has_a_room_of_its_own(front):
    status, answer = front.post("/v1/completions", {"prompt": ["def", "def main " * 100]})
    assert status == 200, answer
    lengths = [(len(prompt), params.max_tokens) for prompt, params, _ in front.engine.submitted[-2:]]
    assert lengths[0][0] != lengths[1][0]
    assert [prompt + most for prompt, most in lengths] == [512, 512]
