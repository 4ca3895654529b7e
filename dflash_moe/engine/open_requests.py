"""The requests of an engine that have not ended, and what of them the next exchange with callers
hands over.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import itertools
import logging
import time
from typing import Any

from dflash_moe.engine.delivery import Bell, Command, EngineDoor, Outbox, TokenStream
from dflash_moe.engine.engine_stats import EngineStats
from dflash_moe.engine.request import CANCELLED, Request, TokenDelta
from dflash_moe.engine.step_planner import StepPlanner
from dflash_moe.errors import DflashError

log = logging.getLogger(__name__)


class OpenRequests:
    """Knows the open choices of each request, and says to callers what becomes of them. The engine
    thread alone calls it; `num` is read by any thread.
    """

    def __init__(self, door: EngineDoor, planner: StepPlanner, stats: EngineStats) -> None:
        self._door = door
        self._planner = planner
        self._stats = stats
        self._orders = itertools.count()
        # Choices that have not ended, by request id.
        self.choices: dict[int, list[Request]] = {}
        self.num = 0
        # What the next exchange hands over: to streams, and the outboxes that got something.
        self._deltas: list[tuple[TokenStream, TokenDelta]] = []
        self._outboxes: dict[Outbox, None] = {}
        # Rung once no request is open.
        self.drained: list[Bell] = []
        self._ended_at = time.monotonic()
        self._seconds_per_request = 0.0

    def add(self, requests: tuple[Request, ...]) -> None:
        """Takes the choices of a submission, unless its outbox has failed meanwhile."""
        leader = requests[0]
        if isinstance(leader.sink, Outbox) and leader.sink.has_failed:
            return
        if not self.choices:
            # How long nobody asked for anything says nothing about how fast requests end.
            self._ended_at = time.monotonic()
        self.choices[leader.request_id] = list(requests)
        self.num += len(requests)
        for request in requests:
            request.order = next(self._orders)
        self._planner.add(requests)

    def say(self, request: Request, delta: TokenDelta) -> None:
        """Has a delta handed over with the next exchange."""
        if isinstance(request.sink, Outbox):
            request.sink.put(request.request_id, delta)
            self._outboxes[request.sink] = None
        else:
            self._deltas.append((request.sink, delta))

    def end(
        self, request: Request, reason: str, error: DflashError | None = None, *, token_ids: tuple[int, ...] = (),
        logprobs: Any = None,
    ) -> None:  # fmt: skip
        """Ends a choice with its last tokens, or an error."""
        now = time.monotonic()
        delta = request.end(token_ids, logprobs, reason, error, now)
        choices = self.choices[request.request_id]
        self._planner.end(request, reason, [one for one in choices if one is not request])
        choices.remove(request)
        if not choices:
            del self.choices[request.request_id]
        self.num -= 1
        self._stats.ended(request, reason, now)
        self._seconds_per_request += (now - self._ended_at - self._seconds_per_request) / 16
        self._ended_at = now
        self.say(request, delta)

    def cancel(self, request_id: int, choice: int | None) -> None:
        """Ends a request, or one choice of it."""
        for request in [one for one in self.choices.get(request_id, ()) if choice in (None, one.choice)]:
            self.end(request, CANCELLED)

    def end_all(self, reason: str, error: DflashError) -> None:
        """Ends all of them, whatever the books say: every caller hears of it."""
        for request in [one for choices in self.choices.values() for one in choices]:
            named = error.reworded(f"{request.name}: {error}")
            try:
                self.end(request, reason, named)
            except Exception:
                log.exception("%s: its blocks could not be given back", request.name)
                self.say(request, TokenDelta(request.choice, finish_reason=reason, error=named))

    def exchange(self, *, wait: bool, is_stopping: bool) -> list[Command]:
        """Hands over what there is, and returns what was asked for meanwhile; where `wait` is set
        and there is nothing, it waits until something is. The requests of an outbox that fails end,
        unless all do.
        """
        began = time.perf_counter()
        outboxes, self._outboxes = self._outboxes, {}
        for outbox in outboxes:
            if not outbox.send() and not is_stopping:
                for request in [one for choices in self.choices.values() for one in choices if one.sink is outbox]:
                    self.end(request, CANCELLED)
        deltas, self._deltas = self._deltas, []
        self._planner.drop_masks()
        num_waiting = self.num - len(self._planner.scheduler.running)
        is_idle = not (deltas or outboxes)
        commands = self._door.exchange(
            deltas, num_waiting=num_waiting, seconds_per_request=self._seconds_per_request, wait=wait and is_idle
        )
        if not is_idle:
            self._stats.deliver_s += time.perf_counter() - began
        return commands

    def ring_drained(self, *, always: bool) -> None:
        """Wakes who waits for all requests to end, where they have and callers have heard it."""
        if always or not (self.num or self._deltas or self._outboxes):
            for bell in self.drained:
                bell.ring()
            self.drained = []
