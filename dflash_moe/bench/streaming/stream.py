"""One streamed answer: a request over a connection of its own, and when which tokens came.

The client is a protocol of asyncio over httptools, the parser of llhttp that uvicorn uses too.
Whatever it takes of a core for a token is missing to a server on the same cores, and libraries for
any kind of request take more; each row says how much this one took.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_moe.bench.streaming.endpoint import Endpoint, error_text, reason
from dflash_moe.errors import shown

OK, TOO_MANY = 200, 429
CONNECT_S = 10.0
# Nothing that a server says of an error, and no event of a few tokens, is longer.
MAX_ERROR_BYTES, MAX_EVENT_BYTES = 1 << 16, 16 << 20
DATA, DONE = b"data:", b"[DONE]"


@dataclass(slots=True)
class Streamed:
    """What came of one request; times are in seconds of time.monotonic.

    `began` is when the first event with a choice came. `times` has an entry for each event that
    brought tokens, and `counts` how many those were, 0 where the event does not tell. `queue_s` is
    how long the server let it wait, as far as it tells.
    """

    due: float = 0.0
    submitted: float = 0.0
    ended: float = 0.0
    began: float = 0.0
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    completion_tokens: int | None = None
    queue_s: float | None = None
    status: int = 0
    retry_after_s: float | None = None
    # What was wrong, empty where all tokens came.
    error: str = ""

    @property
    def is_refused(self) -> bool:
        """Whether the server had too many requests."""
        return self.status == TOO_MANY

    @property
    def tokens(self) -> int:
        """The tokens that came, of a request that failed too."""
        return self.completion_tokens if self.completion_tokens is not None else sum(one or 1 for one in self.counts)

    @property
    def tells_counts(self) -> bool:
        """Whether it is known how many tokens each event brought."""
        return bool(self.counts) and self.tokens == sum(one or 1 for one in self.counts)

    @property
    def ttft_s(self) -> float:
        """From the submission to the first event with a choice, which a server sends with its
        first token, whether that has text or not.
        """
        return self.began - self.submitted

    @property
    def tpot_s(self) -> float | None:
        """The time of a token behind those that came first; None where there is none."""
        with_first = (self.counts[0] or 1) if self.tells_counts and self.times[0] == self.began else 1
        later = self.tokens - with_first
        return (self.times[-1] - self.began) / later if later > 0 and self.times[-1] > self.began else None

    def gaps_s(self) -> list[float]:
        """Returns the times between events that brought tokens, each as often as the later event
        had tokens where that is known: so long the reader of such a token waited. A gap is never
        divided by its tokens, which would be a rate that nobody saw.
        """
        weights = [one or 1 for one in self.counts] if self.tells_counts else [1] * len(self.counts)
        pairs = zip(self.times, self.times[1:], weights[1:], strict=False)
        return [later - earlier for earlier, later, weight in pairs for _ in range(weight)]


async def stream(endpoint: Endpoint, request: bytes, streamed: Streamed, timeout_s: float) -> None:
    """Sends a request and fills in `streamed` as its answer comes. Whatever goes wrong is said
    there. An answer that has not ended after `timeout_s` is given up.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    try:
        connecting = loop.create_connection(
            lambda: _Connection(request, streamed, ended), endpoint.host, endpoint.port, ssl=endpoint.tls
        )
        transport, _ = await asyncio.wait_for(connecting, CONNECT_S)
    except (OSError, asyncio.TimeoutError) as error:
        text = f"no connection within {CONNECT_S:g} s" if isinstance(error, asyncio.TimeoutError) else reason(error)
        streamed.error, streamed.ended = text, time.monotonic()
        return
    try:
        await asyncio.wait_for(ended, timeout_s)
    except asyncio.TimeoutError:
        streamed.error = f"the answer had not ended after {timeout_s:g} s"
    finally:
        streamed.ended = time.monotonic()
        transport.abort()


class _Connection(asyncio.Protocol):
    """Sends one request as soon as it is connected, and reads the answer."""

    def __init__(self, request: bytes, streamed: Streamed, ended: asyncio.Future[None]) -> None:
        import httptools

        self._request = request
        self._streamed = streamed
        self._ended = ended
        self._parser = httptools.HttpResponseParser(self)
        self._malformed = httptools.HttpParserError
        self._events = Events(streamed)
        self._error = b""
        self._now = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._streamed.submitted = time.monotonic()
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        try:
            self._parser.feed_data(data)
        except self._malformed as error:
            self._end(f"the answer is no HTTP ({error})")

    def connection_lost(self, exc: Exception | None) -> None:
        # An answer without a length ends with its connection.
        if self._events.is_done or self._is_error():
            self.on_message_complete()
        self._end("the connection was closed before the answer had ended" if exc is None else reason(exc))

    # -- what the parser calls ---------------------------------------------------------------------
    def on_header(self, name: bytes, value: bytes) -> None:
        """Reads how long to wait with the next request."""
        if name.lower() == b"retry-after":
            self._streamed.retry_after_s = _seconds(value)

    def on_headers_complete(self) -> None:
        """Reads the status."""
        self._streamed.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Reads events, or what the server says of an error."""
        if self._is_error():
            self._error += body[: MAX_ERROR_BYTES - len(self._error)]
        else:
            self._events.feed(body, self._now)
            if self._streamed.error:
                self._end(self._streamed.error)

    def on_message_complete(self) -> None:
        """Judges the whole answer."""
        if self._is_error():
            self._end(f"status {self._streamed.status}: {_said(self._error)}")
        else:
            self._end(self._events.end())

    def _is_error(self) -> bool:
        return self._streamed.status not in (0, OK)

    def _end(self, error: str) -> None:
        if not self._ended.done():
            self._streamed.error = error
            self._ended.set_result(None)


class Events:
    """Reads server-sent events of OpenAI's two APIs, and notes when each brought tokens."""

    def __init__(self, streamed: Streamed) -> None:
        self._streamed = streamed
        self._rest = b""
        # The tokens of all events so far, where each event has the sum.
        self._sum = 0
        # When the latest event with a choice came.
        self._latest = 0.0
        self.is_done = False

    def feed(self, body: bytes, now: float) -> None:
        """Reads what has come at the time `now`. What is wrong is noted as the request's error."""
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            # An event is one line in these APIs. Comments, names and empty lines say nothing.
            if line.startswith(DATA) and not self._streamed.error:
                self._event(line[len(DATA) :].strip(), now)
        if len(self._rest) > MAX_EVENT_BYTES:
            self._streamed.error = f"an event is longer than {MAX_EVENT_BYTES} bytes"

    def end(self) -> str:
        """Returns what is missing at the end of the answer, an empty text where nothing is."""
        streamed = self._streamed
        if streamed.error:
            return streamed.error
        if not self.is_done:
            return "the answer ended without [DONE]"
        if streamed.completion_tokens is None:
            if not streamed.counts or not all(streamed.counts):
                return "the answer has no usage, so that its tokens cannot be counted"
            streamed.completion_tokens = sum(streamed.counts)
        if streamed.completion_tokens == 0 or not streamed.began:
            return "the answer has no token"
        if not streamed.times:
            # None of its tokens has text, and the server sent nothing before it had ended.
            streamed.times, streamed.counts = [self._latest], [0]
        return ""

    def _event(self, raw: bytes, now: float) -> None:
        if raw == DONE:
            self.is_done = True
            return
        try:
            event = json.loads(raw)
            if event.get("error") or event.get("object") == "error":
                self._streamed.error = f"an event says: {error_text(event)}"
                return
            choices, usage = event.get("choices") or (), event.get("usage")
            if usage:
                self._usage(usage)
            for choice in choices:
                self._choice(choice, usage, now)
        except (ValueError, RecursionError, AttributeError, TypeError, KeyError, OverflowError):
            self._streamed.error = f"an event is not one of OpenAI's API: {shown(raw)}"

    def _usage(self, usage: Mapping[str, Any]) -> None:
        streamed = self._streamed
        streamed.prompt_tokens, streamed.completion_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        streamed.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        # The field of Groq's API, which this package's server has too.
        if usage.get("queue_time") is not None:
            streamed.queue_s = float(usage["queue_time"])

    def _choice(self, choice: Mapping[str, Any], usage: Mapping[str, Any] | None, now: float) -> None:
        self._latest = now
        self._streamed.began = self._streamed.began or now
        count, is_told = _told_count(choice), False
        if usage:
            count, is_told = int(usage["completion_tokens"]) - self._sum, True
            self._sum += count
        if count > 0 or (not is_told and _has_token(choice)):
            self._streamed.times.append(now)
            self._streamed.counts.append(count)


def _told_count(choice: Mapping[str, Any]) -> int:
    """Returns how many tokens an event has by its ids or log-probabilities, 0 where neither is
    there.
    """
    if token_ids := choice.get("token_ids"):
        return len(token_ids)
    logprobs = choice.get("logprobs")
    return len(logprobs.get("content") or logprobs.get("tokens") or ()) if logprobs else 0


def _has_token(choice: Mapping[str, Any]) -> bool:
    """Says whether an event that tells no count brought a token: it has text or, as servers send
    tokens that have none, an empty one. The event that only says whose turn it is, or why the
    answer ends, has none.
    """
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text")) or ("text" in choice and choice.get("finish_reason") is None)
    # Thoughts and calls of tools are tokens as well.
    if any(value for name, value in delta.items() if name != "role"):
        return True
    return "content" in delta and "role" not in delta and choice.get("finish_reason") is None


def _seconds(value: bytes) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def _said(body: bytes) -> str:
    try:
        return error_text(json.loads(body))
    except (ValueError, RecursionError):
        return error_text(body.decode("utf-8", "replace"))
