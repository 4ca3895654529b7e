"""The ASGI application: who asks is checked first, then bodies are bounded and parsed, and routes
answer. Every error has the shape of the API of its path.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from dflash_moe.server.front import api_error, event_stream, frames, guard, request_fields
from dflash_moe.server.front.api_error import ApiError
from dflash_moe.server.front.engine_link import EngineLink
from dflash_moe.server.front.engine_numbers import EngineNumbers
from dflash_moe.server.front.event_stream import EventStream
from dflash_moe.server.front.exchange import EXCHANGE, OTHER, Exchange, Traffic
from dflash_moe.server.front.guard import Guard
from dflash_moe.server.front.large_bodies import LARGE_BYTES, LargeBodies
from dflash_moe.server.front.metrics import Metrics
from dflash_moe.server.front.page_files import INDEX, PageFiles
from dflash_moe.server.front.request_fields import Body
from dflash_moe.server.front.request_log import RequestLog
from dflash_moe.server.front.routes import Asked, Routes
from dflash_moe.telemetry.spaced_log import SpacedLog

log = logging.getLogger(__name__)
_spaced = SpacedLog(log)

# A body must be whole after so long, which a line of 1 Mbit/s takes for the largest one.
BODY_S = 70.0
# Ids that are written as JSON within a millisecond.
TOKENS_OF_A_PIECE = 10_000
# A larger body is parsed in a thread.
INLINE_BODY_BYTES = 64 << 10
# Bodies that are under way may have so much together, or the largest one where that is more; beyond
# that only those go on that are small.
MAX_READ_BYTES = 64 << 20
_WHY = {
    frames.LOADING: "the model is being loaded; /ready says when it is there",
    frames.DRAINING: "the server is about to end and takes no new requests",
}


class Application:
    """The application of one front. `routes` are there once the model is. The connections count
    themselves in `traffic`.
    """

    def __init__(self, link: EngineLink, admission: Guard, request_log: RequestLog, *, max_body_bytes: int) -> None:
        self.routes: Routes | None = None
        self.traffic = Traffic()
        self._link = link
        self._request_log = request_log
        self._page_files = PageFiles()
        self._numbers = EngineNumbers(link.measure)
        self._metrics = Metrics(self.traffic, self._numbers, request_log, lambda: self._state)
        self._guard = admission
        self._max_body_bytes = max_body_bytes
        self._large_bodies = LargeBodies(max_body_bytes)
        self._read_bytes = 0
        self._starlette = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/metrics", self._scrape),
                Route("/stats", self._stats),
                Route("/", self._page),
                Route("/page/{name}", self._page),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completion, methods=["POST"]),
                Route("/v1/responses", self._responses, methods=["POST"]),
                Route("/v1/messages", self._messages, methods=["POST"]),
                Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/detokenize", self._detokenize, methods=["POST"]),
            ],
            exception_handlers={
                ApiError: _api_error,
                HTTPException: _http_error,
                ClientDisconnect: _disconnected,
                Exception: _unexpected,
            },
        )

    async def __call__(self, scope: dict[str, Any], receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        """Answers a request."""
        if scope["type"] != "http":
            return
        exchange = scope[EXCHANGE] = Exchange(self.traffic, scope, receive, send)
        try:
            await self._admitted(scope, exchange)
        finally:
            exchange.end(self._route_of(scope["path"]), self._request_log)

    def _route_of(self, path: str) -> str:
        found = (route.path for route in self._starlette.routes if isinstance(route, Route) and route.path_regex.match(path))
        return next(found, OTHER)

    async def _admitted(self, scope: dict[str, Any], exchange: Exchange) -> None:
        headers, receive, send = scope["headers"], exchange.receive, exchange.send
        origin = self._guard.allowed_origin(headers)
        try:
            salt, is_known = self._guard.admit(scope["path"], headers)
        except ApiError as error:
            # A browser asks without a key whether its page may ask with one.
            if not (error.status == 401 and origin is not None and scope["method"] == "OPTIONS"):
                # A page that may ask is to read why it was refused.
                headers_of_error = {**error.headers, **guard.cors_headers(origin)}
                status, body = api_error.shaped(error, scope["path"])
                await _response(body, status, headers_of_error)(scope, receive, send)
                return
        if origin is not None and scope["method"] == "OPTIONS":
            await Response(status_code=204, headers=dict(guard.preflight_headers(origin)))(scope, receive, send)
            return
        scope[guard.SALT], scope[guard.IS_KNOWN] = salt, is_known
        exchange.is_known = is_known
        exchange.headers += [(name.encode(), value.encode("latin-1")) for name, value in guard.cors_headers(origin).items()]
        await self._starlette(scope, receive, send)

    # -- whether it works --------------------------------------------------------------------------
    async def _health(self, _request: Request) -> Response:
        if self._state == frames.LOADING:
            raise _unready(frames.LOADING, _WHY[frames.LOADING])
        is_alive, reason = await self._link.ask()
        if not is_alive:
            raise ApiError(503, reason or "the engine thread has ended", code="engine_gone")
        return _response({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        self._need_open()
        is_alive, reason = await self._link.ask()
        if not is_alive or reason:
            # A reason names workers, which are nothing to a stranger.
            said = reason if request.scope[guard.IS_KNOWN] else "a part of the model cannot be computed now"
            raise _unready(frames.UNREADY, said or "the engine thread has ended")
        return _response({"status": "ready"})

    async def _scrape(self, request: Request) -> Response:
        await self._numbers.refresh()
        body, kind = self._metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": kind, "cache-control": "no-store"})

    async def _stats(self, _request: Request) -> Response:
        """What the page draws: the latest snapshot, and how the server is."""
        await self._numbers.refresh()
        found = {
            **self._numbers.latest, "model": self._link.settings["names"][0], "state": self._state,
            "is_up": self._numbers.is_up, "measured_s": self._numbers.measured_s,
        }  # fmt: skip
        return _response(found, headers={"cache-control": "no-store"})

    async def _page(self, request: Request) -> Response:
        return self._page_files.response(request.path_params.get("name", INDEX))

    @property
    def _state(self) -> str:
        """What the server does with requests (`frames`). Once the engine process has loaded the
        model, a large tokenizer takes this one a second, during which it is loading still.
        """
        state = self._link.state
        return frames.LOADING if state == frames.READY and self.routes is None else state

    def _need_open(self) -> Routes:
        state = self._state
        if state != frames.READY:
            raise _unready(state, _WHY.get(state, state))
        assert self.routes is not None
        return self.routes

    # -- the model ---------------------------------------------------------------------------------
    async def _models(self, _request: Request) -> Response:
        return _response(self._need_open().models())

    async def _model(self, request: Request) -> Response:
        return _response(self._need_open().model(request.path_params["name"]))

    async def _tokenize(self, request: Request) -> Response:
        routes = self._need_open()
        return await self._answered(request, "tokenize", routes.tokenize)

    async def _detokenize(self, request: Request) -> Response:
        routes = self._need_open()
        return await self._answered(request, "detokenize", routes.detokenize)

    async def _chat(self, request: Request) -> Any:
        routes = self._need_open()
        return await self._computed(request, "chat", routes.chat)

    async def _completion(self, request: Request) -> Any:
        routes = self._need_open()
        return await self._computed(request, "completions", routes.completion)

    async def _responses(self, request: Request) -> Any:
        routes = self._need_open()
        return await self._computed(request, "responses", routes.responses)

    async def _messages(self, request: Request) -> Any:
        routes = self._need_open()
        return await self._computed(request, "messages", routes.messages)

    async def _count_tokens(self, request: Request) -> Response:
        routes = self._need_open()
        return await self._answered(request, "count_tokens", routes.count_tokens)

    # -- what the routes have in common ------------------------------------------------------------
    async def _answered(
        self, request: Request, route: str, answer: Callable[[Body, bytes], Awaitable[dict[str, Any]]]
    ) -> Response:
        body = await self._body(request)
        headers = _ignored(body, route)
        found = await answer(body, request.scope[guard.SALT])
        if len(found.get("tokens", ())) > TOKENS_OF_A_PIECE:
            return StreamingResponse(_pieces(found), headers=headers, media_type="application/json")
        return _response(found, headers=headers)

    async def _computed(self, request: Request, route: str, begin: Callable[[Body, bytes], Awaitable[Asked]]) -> Any:
        body = await self._body(request)
        headers = _ignored(body, route)
        asked = await begin(body, request.scope[guard.SALT])
        request.scope[EXCHANGE].answer = asked.answer
        if asked.is_streamed:
            return _Streamed(asked, headers)
        choices = await event_stream.whole(asked.answer, request.receive, asked.reply.read)
        if choices is None:
            return Response(status_code=499)  # nobody reads it
        asked.has_ended()
        return _response(asked.reply.whole(choices, asked.answer.usage), headers=headers)

    async def _body(self, request: Request) -> Body:
        """Returns the parsed body. Raises ApiError for what is too large, too slow or no object."""
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.strip().lower() != "identity":
            raise ApiError(415, f"content-encoding {encoding[:40]!r} is not taken; send the body as it is")
        try:
            raw = await asyncio.wait_for(self._read(request), BODY_S)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body was not whole within {BODY_S:g} s", headers={"connection": "close"}) from None
        if len(raw) <= INLINE_BODY_BYTES:
            return request_fields.parsed(raw)
        prompts = self._need_open().prompts
        if len(raw) <= LARGE_BYTES:
            return await prompts.in_thread(len(raw), lambda: request_fields.parsed(raw))
        bodies, sizes = self._large_bodies, (prompts.max_model_len, prompts.vocab_size)
        return await prompts.in_thread(len(raw), lambda: bodies.parsed(raw, *sizes))

    async def _read(self, request: Request) -> bytes:
        announced = request.headers.get("content-length", "0")
        if not announced.isdigit() or len(announced) > 18 or int(announced) > self._max_body_bytes:
            raise self._too_large()
        found = bytearray()
        try:
            async for part in request.stream():
                found += part
                self._read_bytes += len(part)
                if len(found) > self._max_body_bytes:
                    raise self._too_large()
                if len(found) > INLINE_BODY_BYTES and self._read_bytes > max(MAX_READ_BYTES, self._max_body_bytes):
                    raise ApiError(429, "too many large bodies are under way; try again", code="busy", retry_after_s=1.0)
            return bytes(found)
        finally:
            self._read_bytes -= len(found)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._max_body_bytes} bytes (--max-body)", code="body_too_large")


class _Streamed:
    """A response that starlette sends: the events of an answer."""

    def __init__(self, asked: Asked, headers: Mapping[str, str]) -> None:
        self._asked = asked
        self._headers = headers

    async def __call__(self, scope: Any, receive: Callable[[], Any], _send: Callable[[Any], Any]) -> None:
        asked = self._asked
        exchange = scope[EXCHANGE]
        stream = EventStream(asked.answer, asked.reply, self._headers, exchange.write_now)
        # Starlette wraps what it is given four times, which each token would pass.
        await stream.respond(receive, exchange.send)
        if asked.answer.has_ended:
            asked.has_ended()


def _ignored(body: Mapping[str, Any], route: str) -> dict[str, str]:
    """Checks the fields of a body and returns the header that names those which are ignored."""
    ignored = request_fields.check(body, route)
    if not ignored:
        return {}
    names = request_fields.named(ignored)
    _spaced.warning("a request to %s has fields that are ignored: %s", route, names)
    return {request_fields.IGNORED_HEADER: names}


def _unready(state: str, reason: str) -> ApiError:
    return ApiError(503, reason, code=state, retry_after_s=api_error.RETRY_AFTER_S)


async def _pieces(content: Mapping[str, Any]) -> AsyncIterator[bytes]:
    """Writes an object whose `tokens` are many. Others are served between its pieces."""
    tokens = content["tokens"]
    head = json.dumps({**content, "tokens": []}, separators=(",", ":")).partition("[]")
    yield head[0].encode() + b"["
    for at in range(0, len(tokens), TOKENS_OF_A_PIECE):
        yield (b"," if at else b"") + ",".join(map(str, tokens[at : at + TOKENS_OF_A_PIECE])).encode()
        await asyncio.sleep(0)
    yield b"]" + head[2].encode()


def _response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    # ASCII, so that a lone surrogate that somebody sent travels back as it came.
    body = json.dumps(content, separators=(",", ":")).encode()
    return Response(body, status_code=status, headers=dict(headers or {}), media_type="application/json")


def _refused(request: Request, error: ApiError) -> Response:
    status, body = api_error.shaped(error, request.scope["path"])
    return _response(body, status, error.headers)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _refused(request, error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    asked = f"{request.method[:20]} {request.url.path[:80]}"
    text = f"{asked}: {error.detail}"
    if error.status_code == 404:
        routes = ", ".join(route.path_format for route in request.app.routes if route.path.startswith("/v1/"))
        text = f"{asked}: there is no such route; there are {routes}"
    elif error.status_code == 405:
        text = f"{asked}: the route does not take this method; it takes {(error.headers or {}).get('Allow', 'another')}"
    return _refused(request, ApiError(error.status_code, text, headers=error.headers))


async def _disconnected(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _unexpected(request: Request, error: Exception) -> Response:
    # The server logs the traceback, since starlette raises it again.
    return _refused(request, ApiError(500, f"the server has failed: {type(error).__name__}", code="internal"))
