"""A request and its answer as they are counted and logged, whatever route has answered: who asks
for how much, and under which name a caller's own records have it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from dflash_moe.server.front.answer import Answer
from dflash_moe.server.front.request_log import RequestLog
from dflash_moe.telemetry.spaced_log import SpacedLog

log = logging.getLogger(__name__)
# Strangers could fill a disk with lines.
_strangers = SpacedLog(log)

# The entry of a request's scope in which handlers find its exchange.
EXCHANGE = "dflash_moe.exchange"
# The one by which the connection writes a part of a body at once, where it can.
WRITE_NOW = "dflash_moe.write_now"
# The labels of what is no route of the application, and of what was no request at all: a path that
# somebody made up must not become a series of its own.
OTHER, UNPARSED = "other", "unparsed"
# Who looks at the server does so every second, and says nothing by that.
QUIET = {"/health", "/ready", "/metrics", "/stats", "/", "/page/{name}"}
HUNG_UP = 499
# A caller's own name of a request: what fits into a line of a log as it is.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
# W3C Trace Context, level 1, section 3.2; later versions may have more fields behind these.
_TRACEPARENT = re.compile(rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


class Traffic:
    """What a front has counted of its callers. Everything happens in its event loop."""

    def __init__(self) -> None:
        # By route and status, those that have ended.
        self.requests: Counter[tuple[str, int]] = Counter()
        self.num_connections = 0
        self.num_open = 0
        self.num_streams = 0
        # Of bodies.
        self.received_bytes = 0
        self.sent_bytes = 0


class Exchange:
    """One request: `receive` and `send` are ASGI's, and `end` is called once. A handler sets
    `is_known` of a caller who may ask, and `answer` where the engine computes.
    """

    def __init__(self, traffic: Traffic, scope: dict[str, Any], receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        self._traffic = traffic
        self._receive = receive
        self._send = send
        self._write_now: Callable[[bytes], bool] = scope.get(WRITE_NOW, lambda body: False)
        self._method = scope["method"]
        self._began_s = time.monotonic()
        self.request_id, self.trace_id = _names(scope["headers"])
        self.is_known = False
        self.answer: Answer | None = None
        # What the answer's head gets beside the handler's own headers.
        self.headers: list[tuple[bytes, bytes]] = [(b"x-request-id", self.request_id.encode())]
        self._status = HUNG_UP
        self._is_stream = False
        self._is_whole = False
        traffic.num_open += 1

    async def receive(self) -> Any:
        """Returns what comes from the caller."""
        message = await self._receive()
        self._traffic.received_bytes += len(message.get("body", b""))
        return message

    async def send(self, message: Any) -> None:
        """Sends to the caller."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._is_stream = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
            self._traffic.num_streams += self._is_stream
            message = {**message, "headers": [*message["headers"], *self.headers]}
        else:
            self._traffic.sent_bytes += len(message["body"])
            self._is_whole = not message.get("more_body", False)
        await self._send(message)

    def write_now(self, body: bytes) -> bool:
        """Writes a part of the body of an answer that has begun; False where `send` must."""
        is_written = self._write_now(body)
        if is_written:
            self._traffic.sent_bytes += len(body)
        return is_written

    def end(self, route: str, request_log: RequestLog) -> None:
        """Counts the request, and has its line written."""
        traffic = self._traffic
        traffic.num_open -= 1
        traffic.num_streams -= self._is_stream
        traffic.requests[route, self._status] += 1
        if route in QUIET:
            return
        if self.is_known:
            request_log.write(self._fields(route))
        else:
            _strangers.warning(
                "a stranger was answered %d: %s %s request_id=%s", self._status, self._method, route, self.request_id
            )

    def _fields(self, route: str) -> dict[str, Any]:
        found: dict[str, Any] = {
            "method": self._method, "route": route, "status": self._status,
            # A caller that hangs up, or reads too little, has the beginning alone.
            "end": "whole" if self._is_whole else "cut", "seconds": _rounded(time.monotonic() - self._began_s),
        }  # fmt: skip
        if self.answer is not None:
            usage, first_s = self.answer.usage, self.answer.first_token_s
            found |= {
                "prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens,
                "completion_tokens": usage.completion_tokens, "queue_seconds": _rounded(usage.queue_s),
            }  # fmt: skip
            if first_s is not None:
                found["first_token_seconds"] = _rounded(first_s - self._began_s)
        found["request_id"] = self.request_id
        if self.trace_id:
            found["trace_id"] = self.trace_id
        return found


def _names(headers: Sequence[tuple[bytes, bytes]]) -> tuple[str, str]:
    """Returns a request's id, the caller's or a new one, and the id of its trace, empty without."""
    given = dict(headers)
    request_id, trace = given.get(b"x-request-id", b""), _TRACEPARENT.fullmatch(given.get(b"traceparent", b""))
    # Version 00 ends behind its flags.
    is_trace = trace is not None and not (trace[1] == b"00" and trace[3])
    return (
        request_id.decode() if _REQUEST_ID.fullmatch(request_id) else secrets.token_hex(16),
        trace[2].decode() if trace is not None and is_trace else "",
    )


def _rounded(seconds: float) -> float:
    return round(seconds, 6)
