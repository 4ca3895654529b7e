"""Measures how long a step awaits its routed experts, and hands the host to the other half of the
step meanwhile, where there is one. Both happen where a layer calls its experts.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import threading
from time import perf_counter

from dflash_moe.forward.half_turns import HalfTurns


class _OfThread(threading.local):
    """What one thread computes: the turns of its half, and the seconds that it awaited experts
    itself and that they took from their submission on.
    """

    turns: HalfTurns | None = None
    awaited_s = 0.0
    remote_s = 0.0


class StepClock:
    """Every route to the experts of a model has the same (`ExpertRoute.clock`). Each thread sees
    its own times.
    """

    def __init__(self) -> None:
        self._own = _OfThread()

    def begin(self, turns: HalfTurns | None = None) -> None:
        """Begins this thread's part of a step, a half if it has turns."""
        own = self._own
        own.turns, own.awaited_s, own.remote_s = turns, 0.0, 0.0

    @property
    def times(self) -> tuple[float, float]:
        """The seconds since `begin` that this thread awaited experts, and those that experts were
        under way.
        """
        return self._own.awaited_s, self._own.remote_s

    def leave(self) -> float:
        """Says that this thread awaits experts from now on. Returns the time, for `enter`."""
        own = self._own
        if own.turns is not None:
            own.turns.leave()
        return perf_counter()

    def enter(self, left_s: float, submitted_s: float | None = None) -> None:
        """Says that experts have answered which were submitted then, by default when `leave` was
        called. A half returns when its turn has come; errors are those of `HalfTurns.enter`.
        """
        own, now = self._own, perf_counter()
        own.awaited_s += now - left_s
        own.remote_s += now - (left_s if submitted_s is None else submitted_s)
        if own.turns is not None:
            own.turns.enter()
