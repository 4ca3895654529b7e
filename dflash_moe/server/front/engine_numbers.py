"""The latest that is known of the engine process's numbers. Whoever asks has an answer within the
deadline of a question.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from dflash_moe.server.front.shared_question import SharedQuestion

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
        self._question = SharedQuestion(self._ask, FRESH_S, clock)

    @property
    def age_s(self) -> float:
        """How old `latest` is; 0 before there is one."""
        return self._clock() - self.measured_s if self.latest else 0.0

    async def refresh(self) -> None:
        """Asks where nobody has lately. It ends within the question's deadline."""
        await self._question.answer()

    async def _ask(self) -> None:
        found = await self._measure()
        self.is_up = bool(found)
        if found:
            self.latest, self.measured_s = found, self._clock()
