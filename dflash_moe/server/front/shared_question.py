"""A question that costs whoever answers it. However many ask at a time there is one, so that a
flood of probes or scrapes is no work for the engine process.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Found = TypeVar("Found")


class SharedQuestion(Generic[Found]):
    """Whoever asks while the question is open, or within `fresh_s` of its answer, shares that. All
    of it happens in one event loop.
    """

    def __init__(
        self, ask: Callable[[], Awaitable[Found]], fresh_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`ask` asks, and has a deadline of its own."""
        self._ask = ask
        self._fresh_s = fresh_s
        self._clock = clock
        self._latest: asyncio.Task[Found] | None = None
        self._answered_s = 0.0

    async def answer(self) -> Found:
        """Returns the answer. Errors are those of `ask`, and then of everybody who shares it."""
        latest = self._latest
        if latest is None or (latest.done() and self._clock() - self._answered_s >= self._fresh_s):
            latest = self._latest = asyncio.ensure_future(self._asked())
        # A caller that hangs up does not take the question from the others.
        return await asyncio.shield(latest)

    async def _asked(self) -> Found:
        try:
            return await self._ask()
        finally:
            self._answered_s = self._clock()
