"""HTTP/1.1 by uvicorn over httptools, with what that leaves open: how many connections there may
be, how large and how slow a request's head may be, and how long a reader may take nothing.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dflash_moe.server.front.api_error import ApiError
from dflash_moe.server.front.exchange import UNPARSED, WRITE_NOW, Traffic

MAX_HEADER_BYTES = 64 << 10
# A head must be whole this long after the connection, or after its first byte on a kept one.
HEADER_S = 10.0
# A body must be whole this long after its head; an application that wants it sooner says so itself.
BODY_S = 75.0
# What still comes of a body that was refused is read and dropped, so that its sender reads why. One
# that goes on is cut off.
MAX_DROPPED_BYTES = 64 << 20
# Requests that one connection may send ahead of its answers. Each holds its head and its body.
MAX_PIPELINED = 8
# A reader that takes no byte for so long while some wait is gone.
STALL_S = 60.0
# How often a slow reader is looked at. It is given up at the first look after STALL_S, so at most a
# twelfth later.
_LOOK_S = STALL_S / 12
# Waiting bytes of one connection, from which on its request waits too. A token's event has some
# hundred bytes.
WRITE_BUFFER_BYTES = 32 << 10
_REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}


class UntilClosed:
    """Sends an answer to HTTP/1.0, which knows no chunks: one without a length ends with the
    connection. It stands in the place of the `send` of a uvicorn cycle.
    """

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._has_length = True

    async def __call__(self, message: Any) -> None:
        """Sends a message of ASGI."""
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            if not self._has_length:
                self._cycle.chunked_encoding = False
        elif not self._has_length:
            # The cycle compares what it sends with what was announced.
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


class BoundedProtocol(HttpToolsProtocol):
    """A connection. Class attributes are bounds, which a subclass sets."""

    max_connections = 1000
    traffic = Traffic()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes a connection, or answers that there are too many."""
        super().connection_made(transport)
        self.traffic.num_connections += 1
        # Of a head; of a body that is under way those that are none of it.
        self._header_bytes = 0
        self._is_in_head = True
        # Whether a part of a body was in the bytes that came last.
        self._has_body = False
        self._refusal: ApiError | None = None
        self._stalled_looks = 0
        self._stalled_bytes = 0
        self._stall_timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._dropped_bytes = 0
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if len(self.connections) > self.max_connections:
            text = f"{self.max_connections} connections are open, which is the most (--max-connections); try again"
            self._refuse(ApiError(503, text, code="too_many_connections", retry_after_s=1.0))
            return
        self._head_timer = self.loop.call_later(HEADER_S, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        self.traffic.num_connections -= 1
        self._stop_head_timer()
        self._stop_body_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    # -- the head of a request ---------------------------------------------------------------------
    def data_received(self, data: bytes) -> None:
        """Takes bytes. Of a head that is not whole all count; of one that is, on_headers_complete
        counts what it has. What comes of a chunked body without a byte of it, such as trailers or a
        size that does not end, may be no more than a head.
        """
        if self.transport.is_closing():
            return
        was_in_body, self._has_body = self._body_timer is not None, False
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._is_in_head:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse(_head_too_large())
        elif was_in_body and not self._has_body:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self.transport.abort()
        self._keep_timed()

    def _keep_timed(self) -> None:
        """Arms the timer of an idle connection again where bytes that began no request have stopped
        it: a line end between requests, or the end of a body that was refused before it came.
        Without a timer the connection would be held for ever.
        """
        is_idle = not self._is_in_head and self._body_timer is None and self.cycle is not None and self.cycle.response_complete
        if is_idle and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def on_message_begin(self) -> None:
        """A request begins, perhaps on a connection that was kept."""
        super().on_message_begin()
        self._is_in_head, self._header_bytes = True, 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEADER_S, self._head_is_late)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header is whole. Trailers come by here too, and are dropped: the request's headers have
        been judged by then.
        """
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A head is whole; what is raised here becomes the answer."""
        self._is_in_head, self._header_bytes = False, 0
        self._stop_head_timer()
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = ApiError(400, f"more than {MAX_PIPELINED} requests wait on one connection")
            raise self._refusal
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEADER_BYTES:
            self._refusal = _head_too_large()
            raise self._refusal
        self._dropped_bytes = 0
        self._stop_body_timer()
        self._body_timer = self.loop.call_later(BODY_S, self.transport.abort)
        super().on_headers_complete()
        cycle = self.cycle
        if self.scope["http_version"] == "1.0":
            cycle.send = UntilClosed(cycle)  # type: ignore[method-assign]
        self.scope[WRITE_NOW] = lambda body: self._write_now(cycle, body)  # type: ignore[literal-required]

    def _write_now(self, cycle: Any, body: bytes) -> bool:
        """Writes a part of the body of an answer that has begun, as `cycle.send` does, but without
        a task that would have to be woken. Returns False where that one must: the reader is behind,
        or the answer is not sent in chunks.
        """
        if cycle.disconnected:
            return True  # nobody reads it
        if self.flow.write_paused or not cycle.chunked_encoding or not cycle.response_started or cycle.response_complete:
            return False
        if body:
            self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def on_body(self, body: bytes) -> None:
        """A part of a body, which may have been refused already."""
        self._has_body = True
        if self.cycle.response_complete:
            self._dropped_bytes += len(body)
            if self._dropped_bytes > MAX_DROPPED_BYTES:
                self.transport.abort()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is whole."""
        self._stop_body_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no request, in the API's shape."""
        self._refuse(self._refusal or ApiError(400, msg))

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._header_bytes:
            self._refuse(ApiError(408, f"the head of the request was not whole within {HEADER_S:g} s"))
        else:
            self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _refuse(self, error: ApiError) -> None:
        self._stop_head_timer()
        if self._is_answering_another():
            self.transport.abort()
            return
        self.traffic.requests[UNPARSED, error.status] += 1
        body = json.dumps(error.body()).encode()
        lines = [f"HTTP/1.1 {error.status} {_REASONS[error.status]}", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in error.headers.items()]
        lines += [f"content-length: {len(body)}", "connection: close", "", ""]
        self.transport.write("\r\n".join(lines).encode("latin-1") + body)
        self.transport.close()

    def _is_answering_another(self) -> bool:
        """Says whether an answer is owed or under way that an error would be read as, or as a part
        of. The body of a request that waits alone may be refused: that is its answer.
        """
        if self.cycle is None or self.cycle.response_complete:
            return False
        return self._body_timer is None or bool(self.pipeline) or self.cycle.response_started

    # -- slow readers ------------------------------------------------------------------------------
    def pause_writing(self) -> None:
        """The reader is behind."""
        super().pause_writing()
        self._stalled_looks, self._stalled_bytes = 0, self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(_LOOK_S, self._look_at_reader)

    def resume_writing(self) -> None:
        """The reader has caught up."""
        self._stop_stall_timer()
        super().resume_writing()

    def _look_at_reader(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._stalled_looks = self._stalled_looks + 1 if waiting == self._stalled_bytes else 0
        self._stalled_bytes = waiting
        if self._stalled_looks * _LOOK_S >= STALL_S:
            self.transport.abort()
            return
        self._stall_timer = self.loop.call_later(_LOOK_S, self._look_at_reader)

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


def _head_too_large() -> ApiError:
    return ApiError(431, f"the head of the request has more than {MAX_HEADER_BYTES >> 10} KiB")


def protocol_class(max_connections: int, traffic: Traffic) -> type[Any]:
    """Returns the class of connections with this bound, which are counted in `traffic`."""
    return type("Protocol", (BoundedProtocol,), {"max_connections": max_connections, "traffic": traffic})
