"""Measures how long a step awaits its routed experts, and hands the host to the other half of the
step meanwhile, where there is one. Both happen where a layer calls its experts.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from time import perf_counter
from typing import Protocol


class Turns(Protocol):
    """The turns of a half of a step (`HalfTurns` of forward/halves/half_turns.py)."""

    def leave(self) -> None:
        """Ends the turn of this half because it awaits its experts."""
        ...

    def enter(self) -> None:
        """Returns in another turn of this half, whose experts have answered."""
        ...


class StepClock:
    """The seconds that what one thread computes of a step has `awaited_s` experts, and those that
    experts were under way, `remote_s`.
    """

    __slots__ = ("_turns", "awaited_s", "remote_s")

    def __init__(self, turns: Turns | None = None) -> None:
        """A half of a step has turns."""
        self._turns, self.awaited_s, self.remote_s = turns, 0.0, 0.0

    @property
    def has_turns(self) -> bool:
        """Whether somebody has to be told when experts are awaited."""
        return self._turns is not None

    def add(self, awaited_s: float, remote_s: float) -> None:
        """Books seconds that somebody else has measured."""
        self.awaited_s += awaited_s
        self.remote_s += remote_s

    def leave(self) -> float:
        """Says that experts are awaited from now on. Returns the time, for `enter`."""
        if self._turns is not None:
            self._turns.leave()
        return perf_counter()

    def enter(self, left_s: float, submitted_s: float | None = None) -> None:
        """Says that experts have answered which were submitted then, by default when `leave` was
        called. A half returns when its turn has come; errors are those of `HalfTurns.enter`.
        """
        now = perf_counter()
        self.awaited_s += now - left_s
        self.remote_s += now - (left_s if submitted_s is None else submitted_s)
        if self._turns is not None:
            self._turns.enter()
