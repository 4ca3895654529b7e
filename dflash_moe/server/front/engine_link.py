"""The front's end of the link to the engine process: requests go out, deltas come in and reach the
answers that wait for them. Everything happens in the front's event loop.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflash_moe.engine.request import TokenDelta
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.engine.sampling.token_logprobs import TokenLogprobs
from dflash_moe.errors import DflashError, ProtocolError
from dflash_moe.server.front import api_error, frames
from dflash_moe.server.front.answer import Answer
from dflash_moe.server.front.api_error import ApiError
from dflash_moe.server.front.shared_question import SharedQuestion

log = logging.getLogger(__name__)

# A question is answered between two frames of the engine process.
ANSWER_S = 2.0
# An answer is one to everybody who asks within so long, so that a flood of probes asks ten times a
# second.
FRESH_S = 0.1
# Whoever scrapes gives up after seconds too, and old numbers are better than none.
MEASURE_S = 1.0
# With so much unsent the engine process takes nothing any more, and more is refused.
MAX_UNSENT_BYTES = 2 * frames.MAX_REQUEST_BYTES

GONE = "the engine process has ended"


class EngineLink(asyncio.Protocol):
    """Sends requests and questions. `begun` is done once there are `settings`, `ending` once
    connections are to end within so many seconds, and `ended` once there is no engine process any
    more; `end_reason` says why, and is empty where that one said so.
    """

    def __init__(self, on_model: Callable[[Mapping[str, Any]], None]) -> None:
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.ending: asyncio.Future[float] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.settings: Mapping[str, Any] = {}
        self.end_reason = ""
        self.state = frames.LOADING
        self._on_model = on_model
        self._frames = frames.FrameBuffer(frames.MAX_REPLY_BYTES)
        self._transport: asyncio.WriteTransport | None = None
        self._numbers = itertools.count(1)
        self._answers: dict[int, tuple[Answer, int]] = {}
        # Questions that are open, by their numbers.
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._standing = SharedQuestion(self._ask, FRESH_S)
        self._kinds: dict[str, Callable[..., None]] = {
            frames.BEGIN: self._begin, frames.MODEL: self._model, frames.STATE: self._set_state, frames.END: self._end,
            frames.REFUSED: self._refused, frames.DELTAS: self._deltas, frames.ANSWER: self._answered,
            frames.MEASURED: self._measured,
        }  # fmt: skip

    # -- what asyncio calls ------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for kind, *content in self._frames.feed(data):
                if kind not in self._kinds:
                    raise ProtocolError(f"frame between engine and front: kind {kind[:20]!r} is unknown")
                self._kinds[kind](*content)
        except (DflashError, TypeError, ValueError, KeyError, AttributeError) as error:
            log.error("the engine process sent what is no message: %s", error)
            self._lose("the engine process does not speak this version")

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(GONE)

    def _lose(self, reason: str) -> None:
        if not self.ended.done():
            self.end_reason = reason
            self.ended.set_result(None)
        if self._transport is not None:
            self._transport.abort()
        for answer, _ in list(self._answers.values()):
            if not answer.has_all:
                answer.fail(ApiError(503, f"{reason or GONE}; try again", code="engine_gone"))

    # -- what the application calls ----------------------------------------------------------------
    def submit(
        self, answer: Answer, place: int, token_ids: Sequence[int], params: SamplingParams, salt: bytes, grammar: str
    ) -> int:
        """As `Engine.submit`. Raises ApiError where nothing can be sent."""
        if self.ended.done():
            raise ApiError(503, f"{GONE}; try again", code="engine_gone", retry_after_s=api_error.RETRY_AFTER_S)
        number = next(self._numbers)
        self._answers[number] = (answer, place)
        self._send(frames.SUBMIT, number, frames.token_bytes(token_ids), frames.params_fields(params), salt, grammar)
        return number

    def cancel(self, request_id: int, choice: int | None = None) -> None:
        """As `Engine.cancel`."""
        if request_id in self._answers and not self.ended.done():
            # However much is unsent: what is cancelled makes it less.
            self._write(frames.CANCEL, request_id, choice)

    def forget(self, request_id: int) -> None:
        """As `Engine.forget`."""
        self._answers.pop(request_id, None)

    async def ask(self) -> tuple[bool, str]:
        """Returns whether the engine thread lives, and why it would not serve now, empty where it
        would. An engine process that does not answer within ANSWER_S does not live. Whoever asks
        meanwhile, or within FRESH_S of the answer, shares it.
        """
        if self.ended.done():
            return False, GONE
        return await self._standing.answer()

    async def _ask(self) -> tuple[bool, str]:
        late = False, f"the engine process has not answered within {ANSWER_S:g} s"
        return await self._answer_to(frames.ASK, ANSWER_S) or ((False, GONE) if self.ended.done() else late)

    async def measure(self) -> Mapping[str, Any]:
        """Returns what the engine process has counted (`server.snapshot`); nothing where it does
        not say so within MEASURE_S.
        """
        return {} if self.ended.done() else await self._answer_to(frames.MEASURE, MEASURE_S) or {}

    async def _answer_to(self, kind: str, limit_s: float) -> Any:
        """Returns what the engine process answers, None where it does not within `limit_s`."""
        number, question = next(self._numbers), asyncio.get_running_loop().create_future()
        self._questions[number] = question
        # However much is unsent: of each kind there is one question at a time (SharedQuestion).
        self._write(kind, number)
        await asyncio.wait((question, self.ended), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        del self._questions[number]
        return question.result() if question.done() else None

    def give_up(self, reason: str) -> None:
        """Ends the link, because this front cannot serve."""
        self._lose(reason)

    def say_up(self) -> None:
        """Tells the engine process that requests are taken."""
        self._send(frames.UP)

    def _send(self, *message: Any) -> None:
        assert self._transport is not None
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            raise ApiError(503, "the engine process takes no requests at the moment; try again", code="busy", retry_after_s=1.0)
        self._write(*message)

    def _write(self, *message: Any) -> None:
        assert self._transport is not None
        self._transport.write(frames.packed(*message))

    # -- what the engine process sends -------------------------------------------------------------
    def _begin(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.begun.set_result(None)

    def _model(self, facts: Mapping[str, Any]) -> None:
        self._on_model(facts)

    def _set_state(self, state: str) -> None:
        self.state = state

    def _end(self, within_s: float) -> None:
        # Told again, it is to end now.
        if within_s > 0 and not self.ending.done():
            self.ending.set_result(within_s)
        else:
            self._lose("")

    def _refused(self, number: int, error: Mapping[str, Any]) -> None:
        found = self._answers.get(number)
        if found is not None:
            found[0].fail(api_error.from_engine(error))

    def _deltas(self, deltas: Sequence[Sequence[Any]]) -> None:
        answers: dict[Answer, None] = {}
        for number, choice, token_ids, time_s, *rest in deltas:
            found = self._answers.get(number)
            if found is None:
                continue  # it was cancelled
            answer, place = found
            answers[answer] = None
            if not rest:
                answer.put(place, TokenDelta(choice, tuple(token_ids), time_s=time_s))
                continue
            logprobs, reason, error, cached, queue_s = rest
            kept = None
            if logprobs is not None:
                kept = tuple(TokenLogprobs(one, value, rank, tuple(map(tuple, best))) for one, value, rank, best in logprobs)
            delta = TokenDelta(choice, tuple(token_ids), kept, reason, time_s=time_s, num_cached_tokens=cached, queue_s=queue_s)
            answer.put(place, delta, None if error is None else api_error.from_engine(error))
        for answer in answers:
            answer.arrived()

    def _answered(self, number: int, is_alive: bool, reason: str) -> None:
        self._settle(number, (bool(is_alive), str(reason)))

    def _measured(self, number: int, found: Mapping[str, Any]) -> None:
        self._settle(number, dict(found))

    def _settle(self, number: int, found: Any) -> None:
        question = self._questions.get(number)
        if question is not None and not question.done():
            question.set_result(found)
