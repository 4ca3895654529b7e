"""Texts that wait for a thread: no more than may, and small ones not for large ones.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from dflash_moe.server.front import routes as routes_module
from dflash_moe.server.front.api_error import ApiError
from dflash_moe.server.front.chat_request import chat_request
from dflash_moe.server.front.request_fields import Body
from dflash_moe.server.front.routes import Routes
from dflash_moe.server.front.text_threads import SMALL_SIZE, TextThreads
from tests.server.served import facts

WAIT_S = 30.0
LARGE = SMALL_SIZE + 1


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    found = threading.Event()
    yield found
    found.set()


async def begun(threads: TextThreads, size: int, gate: threading.Event) -> asyncio.Future[bool]:
    """A job that a thread has begun, and that ends with the gate."""
    running = asyncio.Event()
    loop = asyncio.get_running_loop()

    def work() -> bool:
        loop.call_soon_threadsafe(running.set)
        return gate.wait(WAIT_S)

    found = asyncio.ensure_future(threads.run(size, work))
    await asyncio.wait_for(running.wait(), WAIT_S)
    return found


def test_a_small_text_waits_for_no_large_one(gate):
    async def ask() -> None:
        threads = TextThreads()
        large = await begun(threads, LARGE, gate)
        others = [asyncio.ensure_future(threads.run(LARGE, lambda: gate.wait(WAIT_S))) for _ in range(20)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(threads.run(10, lambda: "small"), WAIT_S) == "small"
        gate.set()
        assert all(await asyncio.gather(large, *others))

    asyncio.run(ask())


def test_the_smallest_of_small_texts_is_first_and_a_large_one_waits_for_the_other_thread(gate):
    order: list[str] = []

    async def ask() -> None:
        threads, only_small = TextThreads(), threading.Event()
        small = await begun(threads, 10, only_small)
        large = await begun(threads, LARGE, gate)
        sizes = {"oldest": LARGE, "middle": SMALL_SIZE, "small": 1}
        waiting = {
            name: asyncio.ensure_future(threads.run(size, lambda name=name: order.append(name))) for name, size in sizes.items()
        }
        await asyncio.sleep(0)
        only_small.set()
        await asyncio.gather(small, waiting["small"], waiting["middle"])
        assert order == ["small", "middle"]
        gate.set()
        await asyncio.gather(large, waiting["oldest"])

    asyncio.run(ask())


@pytest.mark.parametrize(("most", "size"), [({"max_waiting": 1}, 1), ({"max_waiting_size": 2 * LARGE}, LARGE + 1)])
def test_what_waits_has_a_bound_and_who_left_does_not_count(gate, most, size):
    async def ask() -> None:
        threads = TextThreads(**most)
        held = [await begun(threads, 10, gate), await begun(threads, LARGE, gate)]
        waiting = asyncio.ensure_future(threads.run(size, lambda: True))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            await threads.run(size, lambda: True)
        assert (caught.value.status, caught.value.code, caught.value.retry_after_s >= 1) == (429, "busy", True)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        again = asyncio.ensure_future(threads.run(size, lambda: True))
        await asyncio.sleep(0)
        gate.set()
        assert await again
        await asyncio.gather(*held)

    asyncio.run(ask())


def test_what_fails_in_a_thread_is_raised_and_the_thread_goes_on():
    def fails() -> None:
        raise KeyError("what")

    async def ask() -> None:
        threads = TextThreads()
        for _ in range(5):
            with pytest.raises(KeyError):
                await threads.run(LARGE, fails)
        assert await threads.run(LARGE, lambda: 7) == 7

    asyncio.run(ask())


@pytest.mark.parametrize("path", ["chat", "messages", "responses"])
def test_a_large_conversation_is_checked_in_a_thread_whichever_api_it_has(path, monkeypatch):
    names = []

    def checked(*given):
        names.append(threading.current_thread().name)
        return chat_request(*given)

    monkeypatch.setattr(routes_module, "chat_request", checked)
    said = {"input": "hi"} if path == "responses" else {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}

    async def ask() -> None:
        routes = Routes(SimpleNamespace(submit=lambda *_: 1, cancel=lambda *_: None, forget=lambda _: None), facts(), ["demo"])
        routes.prompts._renderer = SimpleNamespace(render=lambda *_, **_more: "hi", max_text_bytes=SMALL_SIZE)
        for size in (SMALL_SIZE, SMALL_SIZE + 1):
            (await getattr(routes, path)(Body(said, size), b"")).answer.close()

    asyncio.run(ask())
    assert names[0] == threading.current_thread().name
    assert names[1].startswith("text_")
