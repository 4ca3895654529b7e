"""The latest that is known of the engine process's numbers. However many ask at a time, there is
one question, and whoever asks has an answer within its deadline.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

# Numbers so young are given again: however many look, the engine process counts once a second at
# most. Where 8 workers hold parts of 48 layers that takes it 3 ms of a core (decision 70).
FRESH_S = 0.9


class EngineNumbers:
    """`latest` is the latest snapshot (`server.snapshot`), empty before the first. `is_up` says
    whether the latest question was answered by an engine that lives.
    """

    def __init__(
        self, measure: Callable[[], Awaitable[Mapping[str, Any]]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`measure` asks, as `EngineLink.measure`."""
        self.latest: Mapping[str, Any] = {}
        self.is_up = False
        self._measure = measure
        self._clock = clock
        # When `latest` was counted, on a clock of this process.
        self.measured_s = -FRESH_S
        self._asking: asyncio.Task[None] | None = None

    @property
    def age_s(self) -> float:
        """How old `latest` is; 0 before there is one."""
        return self._clock() - self.measured_s if self.latest else 0.0

    async def refresh(self) -> None:
        """Asks where nobody has lately. It ends within the question's deadline."""
        if self._asking is None and self._clock() - self.measured_s >= FRESH_S:
            self._asking = asyncio.ensure_future(self._ask())
        if self._asking is not None:
            # A caller that hangs up does not take the question from the others.
            await asyncio.shield(self._asking)

    async def _ask(self) -> None:
        try:
            found = await self._measure()
            self.is_up = bool(found)
            if found:
                self.latest, self.measured_s = found, self._clock()
        finally:
            self._asking = None
