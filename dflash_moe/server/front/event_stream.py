"""Writes an answer as server-sent events: what has come of a step is one write, silence is broken
too, and whatever ends the answer after its first byte is an event too.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflash_moe.engine.text import Chunk
from dflash_moe.server.front.answer import Answer
from dflash_moe.server.front.api_error import ApiError
from dflash_moe.server.front.replies import Reply

# Proxies and clients give up on a connection on which nothing moves.
SILENCE_S = 10.0
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store",
    # nginx gathers an answer otherwise.
    "x-accel-buffering": "no",
}  # fmt: skip

Receive = Callable[[], Any]
Send = Callable[[Mapping[str, Any]], Any]
Chunks = Sequence[tuple[int, Chunk]]


class Disconnected(Exception):  # noqa: N818 - it is no fault
    """The caller has hung up."""


async def until_gone(receive: Receive) -> None:
    """Returns once the caller has hung up. The body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """An answer that is written as it comes: an ASGI application for one request."""

    def __init__(
        self, answer: Answer, reply: Reply, headers: Mapping[str, str], write_now: Callable[[bytes], bool] = lambda text: False
    ) -> None:
        """`write_now` writes a part of the body that has begun without a task, unless it returns
        False.
        """
        self._answer = answer
        self._reply = reply
        self._headers = {**HEADERS, **headers}
        self._write_now = write_now
        self._has_begun = False
        self._first: bytes | None = None
        # When something was written last, in the event loop's time.
        self._written_s = 0.0

    async def respond(self, receive: Receive, send: Send) -> None:
        """Writes all of it. Raises ApiError where it fails before the first byte."""
        self._written_s = asyncio.get_running_loop().time()
        gone = asyncio.ensure_future(until_gone(receive))
        writing = asyncio.ensure_future(self._respond(send))
        try:
            await asyncio.wait((gone, writing), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            # First, so that the request ends whatever the tasks still raise.
            self._answer.close()
            for task in (gone, writing):
                task.cancel()
            await asyncio.gather(gone, writing, return_exceptions=True)

    async def _respond(self, send: Send) -> None:
        self._answer.sink = self._sink
        try:
            while not self._answer.has_ended:
                found = await self._answer.take(SILENCE_S)
                if self._first is None:
                    self._first = self._reply.first(self._answer.usage)
                if found is None:
                    await self._put(send, self._reply.silence)
                elif text := self._text(found):
                    await self._put(send, text)
            await self._put(send, self._reply.last(self._answer.usage))
        except ApiError as error:
            if not self._has_begun:
                raise
            await self._put(send, self._reply.failure(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _text(self, chunks: Chunks) -> bytes:
        text = b"".join(self._reply.chunk(place, chunk) for place, chunk in chunks)
        now = asyncio.get_running_loop().time()
        if not text and now - self._written_s >= SILENCE_S:
            # Tokens come, and all their text is held back: an argument may be a whole file.
            text = self._reply.silence
        if text:
            self._written_s = now
        return text

    def _sink(self, chunks: Chunks) -> bool:
        # A task that is woken for each token would cost more than all else about it.
        if not self._has_begun or not self._write_now(b""):
            return False
        text = self._text(chunks)
        return not text or self._write_now(text)

    async def _put(self, send: Send, text: bytes) -> None:
        if not self._has_begun:
            self._has_begun = True
            headers = [(name.encode(), value.encode("latin-1")) for name, value in self._headers.items()]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            text = (self._first or b"") + text
        await send({"type": "http.response.body", "body": text, "more_body": True})


async def whole(answer: Answer, receive: Receive, read: Callable[[int, Chunk], None]) -> Sequence[Any] | None:
    """Reads all of an answer and returns its finished choices; None where the caller has hung up.
    `read` is given each chunk. Raises ApiError for what has ended it.
    """

    def read_all(chunks: Chunks) -> bool:
        for place, chunk in chunks:
            read(place, chunk)
        return True

    answer.sink = read_all
    gone = asyncio.ensure_future(until_gone(receive))
    try:
        while not answer.has_ended:
            taking = asyncio.ensure_future(answer.take())
            await asyncio.wait((gone, taking), return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                taking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await taking
                return None
            read_all(taking.result() or ())
        return [text.completion(place, 0) for place, text in enumerate(answer.texts)]
    finally:
        answer.close()
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
