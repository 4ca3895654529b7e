"""A connection by itself, before an application of a few lines: what it may hold, and for how long.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn")

from uvicorn.server import ServerState  # noqa: E402

from dflash_moe.server.front.exchange import Traffic  # noqa: E402
from dflash_moe.server.front.http_protocol import MAX_PIPELINED, protocol_class  # noqa: E402

WAIT_S = 30.0
GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


async def said(send: Any, *parts: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})


async def refusing(_scope: Any, _receive: Any, send: Any) -> None:
    """Answers without reading a body."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


async def half(_scope: Any, _receive: Any, send: Any) -> None:
    """Begins an answer that does not end."""
    await said(send, b"half")
    await asyncio.Event().wait()


async def naming(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body, and answers with the names of the headers."""
    while (message := await receive())["type"] == "http.request" and message["more_body"]:
        pass
    await said(send, b" ".join(name for name, _ in scope["headers"]))
    await send({"type": "http.response.body"})


def talk(application: Any, talks: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bytes]]) -> bytes:
    """What a caller gets of one connection, which must end."""

    async def whole() -> bytes:
        config = uvicorn.Config(application, lifespan="off", log_config=None, ws="none", timeout_keep_alive=1)
        state, protocol = ServerState(), protocol_class(10, Traffic())
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: protocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            return await asyncio.wait_for(talks(reader, writer), WAIT_S)
        finally:
            writer.close()
            server.close()
            for task in state.tasks:
                task.cancel()

    return asyncio.run(whole())


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What still comes until the other side closes or aborts."""
    found = b""
    try:
        while part := await reader.read(1 << 16):
            found += part
    except ConnectionError:
        pass
    return found


@pytest.mark.parametrize(
    ("sent", "later"), [(GET, b"\r\n"), (b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n\r\n", b"x")]
)
def test_bytes_that_begin_no_request_do_not_hold_a_connection(sent, later):
    async def talks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(sent)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(later)
        return await rest(reader)

    assert talk(refusing, talks) == b""


def test_trailers_are_no_headers():
    async def talks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(
            b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nx-late: 1\r\n\r\n"
        )
        return await rest(reader)

    found = talk(naming, talks)
    assert b"transfer-encoding" in found
    assert b"x-late" not in found


@pytest.mark.parametrize("more", [b"x-trailer: " + b"y" * 1000 + b"\r\n", b"y" * 1000])
@pytest.mark.parametrize("before", [b"0\r\n", b"1;"])
def test_what_is_no_body_of_a_chunked_one_is_bounded(before, more):
    async def sending(writer: asyncio.StreamWriter) -> None:
        for _ in range(200):
            writer.write(more * 64)
            await writer.drain()
            await asyncio.sleep(0.001)

    async def talks(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n" + before)
        with pytest.raises(ConnectionError):
            await sending(writer)
        return b""

    talk(naming, talks)


def test_some_requests_may_be_sent_ahead_and_no_more():
    def sending(count: int) -> Any:
        async def talks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
            writer.write(GET * count)
            return await rest(reader)

        return talks

    assert talk(naming, sending(1 + MAX_PIPELINED)).count(b"HTTP/1.1 200") == 1 + MAX_PIPELINED
    assert talk(naming, sending(2 + MAX_PIPELINED)) == b""


@pytest.mark.parametrize("junk", [b"this is no request\r\n\r\n", b"GET /" + b"a" * 70_000])
def test_an_error_is_not_written_into_another_answer(junk):
    async def talks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(GET)
        found = await reader.readuntil(b"half")
        writer.write(junk)
        return found + await rest(reader)

    found = talk(half, talks)
    assert found.startswith(b"HTTP/1.1 200")
    assert found.count(b"HTTP/1.1") == 1


def test_a_body_that_is_none_is_answered():
    async def talks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nno size\r\n")
        return await rest(reader)

    assert talk(naming, talks).startswith(b"HTTP/1.1 400")


def test_a_caller_of_http_1_0_gets_a_plain_body_that_ends_with_the_connection():
    async def stream(_scope: Any, _receive: Any, send: Any) -> None:
        await said(send, b"one ", b"", b"two")
        await send({"type": "http.response.body", "body": b" three"})

    async def reads(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET / HTTP/1.0\r\nhost: localhost\r\nconnection: keep-alive\r\n\r\n")
        return await reader.read()

    head, _, body = talk(stream, reads).partition(b"\r\n\r\n")
    assert body == b"one two three"
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head


def test_an_answer_with_a_length_keeps_it_for_http_1_0():
    async def whole(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": b"whole"})

    async def reads(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        return await reader.read()

    head, _, body = talk(whole, reads).partition(b"\r\n\r\n")
    assert (body, b"content-length: 5" in head) == (b"whole", True)
