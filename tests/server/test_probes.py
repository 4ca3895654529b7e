"""Probes in a front without an engine process: what they say while it loads, and that many callers
share one question.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")

from dflash_moe.server.front import engine_link, frames
from dflash_moe.server.front.application import Application
from dflash_moe.server.front.engine_link import EngineLink
from dflash_moe.server.front.guard import Guard
from dflash_moe.server.front.request_log import LogForm, RequestLog
from dflash_moe.server.front.shared_question import SharedQuestion


class Transport(asyncio.WriteTransport):
    """What is sent to the engine process."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[list[Any]] = []
        self._frames = frames.FrameBuffer(1 << 20)

    def write(self, data: Any) -> None:
        self.sent += self._frames.feed(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None: ...


def linked() -> tuple[EngineLink, Transport]:
    link, transport = EngineLink(lambda facts: None), Transport()
    link.connection_made(transport)
    return link, transport


async def got(application: Application, path: str) -> tuple[int, Any]:
    """Status and body of a GET."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "root_path": "", "headers": []}
    await application(scope, receive, send)
    return sent[0]["status"], json.loads(b"".join(one.get("body", b"") for one in sent))


def test_until_the_front_has_the_models_routes_it_says_that_it_loads(monkeypatch):
    monkeypatch.setattr(engine_link, "ANSWER_S", 0.01)
    monkeypatch.setattr(engine_link, "MEASURE_S", 0.01)

    async def ask() -> None:
        link, _ = linked()
        link.data_received(frames.packed(frames.BEGIN, {"names": ["demo"]}))
        application = Application(link, Guard((), hosts=(), origins=()), RequestLog(LogForm.OFF), max_body_bytes=1)
        # In the second one the engine process has loaded the model, and the front has not yet read
        # its tokenizer.
        for state in (frames.LOADING, frames.READY):
            link.data_received(frames.packed(frames.STATE, state))
            for path in ("/health", "/ready", "/v1/models", "/v1/models/demo"):
                status, answer = await got(application, path)
                assert (status, answer["error"]["code"]) == (503, "loading"), (state, path)
            assert (await got(application, "/stats"))[1]["state"] == frames.LOADING
        application.routes = SimpleNamespace(models=lambda: {"data": []})
        assert (await got(application, "/v1/models"))[0] == 200
        # From now on it says whether the engine thread lives: nobody answers here.
        status, answer = await got(application, "/health")
        assert (status, answer["error"]["code"]) == (503, "engine_gone")

    asyncio.run(ask())


async def asking(link: EngineLink, count: int) -> list[asyncio.Future[tuple[bool, str]]]:
    found = [asyncio.ensure_future(link.ask()) for _ in range(count)]
    for _ in range(5):
        await asyncio.sleep(0)
    return found


def test_callers_that_ask_together_or_soon_after_share_one_answer(monkeypatch):
    monkeypatch.setattr(engine_link, "FRESH_S", 3600.0)

    async def ask() -> None:
        link, transport = linked()
        callers = await asking(link, 50)
        ((kind, number),) = transport.sent
        # One that leaves takes nothing from the others.
        callers.pop(0).cancel()
        link.data_received(frames.packed(frames.ANSWER, number, True, "worker w1 is lost"))
        assert kind == frames.ASK
        assert await asyncio.gather(*callers) == [(True, "worker w1 is lost")] * 49
        assert await link.ask() == (True, "worker w1 is lost")
        assert len(transport.sent) == 1

    asyncio.run(ask())


def test_an_answer_that_is_old_is_asked_for_again(monkeypatch):
    monkeypatch.setattr(engine_link, "FRESH_S", 0.0)

    async def ask() -> None:
        link, transport = linked()
        for reason in ("", "worker w1 is lost"):
            (caller,) = await asking(link, 1)
            link.data_received(frames.packed(frames.ANSWER, transport.sent[-1][1], True, reason))
            assert await caller == (True, reason)
        assert len(transport.sent) == 2

    asyncio.run(ask())


def test_callers_wait_for_an_answer_no_longer_than_its_deadline(monkeypatch):
    monkeypatch.setattr(engine_link, "ANSWER_S", 0.01)

    async def ask() -> None:
        link, transport = linked()
        found = await asyncio.gather(*await asking(link, 5))
        assert found == [(False, "the engine process has not answered within 0.01 s")] * 5
        # A late answer is none to who asks next.
        link.data_received(frames.packed(frames.ANSWER, transport.sent[0][1], True, ""))
        assert len(transport.sent) == 1

    asyncio.run(ask())


def test_the_end_of_the_engine_process_answers_at_once():
    async def ask() -> None:
        link, _ = linked()
        callers = await asking(link, 3)
        link.connection_lost(None)
        assert await asyncio.gather(*callers) == [(False, engine_link.GONE)] * 3

    asyncio.run(ask())


def test_the_end_of_the_engine_process_ends_a_wait_for_its_numbers_at_once(monkeypatch):
    monkeypatch.setattr(engine_link, "MEASURE_S", 3600.0)

    async def ask() -> None:
        link, transport = linked()
        asked = asyncio.ensure_future(link.measure())
        await asyncio.sleep(0)
        ((kind, _),) = transport.sent
        link.connection_lost(None)
        assert (kind, await asyncio.wait_for(asked, 60)) == (frames.MEASURE, {})
        assert await link.measure() == {}
        assert len(transport.sent) == 1

    asyncio.run(ask())


def test_a_question_that_fails_does_so_to_all_who_share_it_and_is_asked_again():
    async def ask() -> None:
        now, answers = [0.0], [OSError("no"), 7]

        async def question() -> int:
            await asyncio.sleep(0)
            found = answers.pop(0)
            if isinstance(found, OSError):
                raise found
            return found

        shared = SharedQuestion(question, 1.0, lambda: now[0])
        first = await asyncio.gather(*(shared.answer() for _ in range(3)), return_exceptions=True)
        assert [str(one) for one in first] == ["no"] * 3
        with pytest.raises(OSError, match="no"):
            await shared.answer()
        now[0] = 1.0
        assert await shared.answer() == 7

    asyncio.run(ask())
