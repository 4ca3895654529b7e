"""The turns of two halves of a step. One half at a time computes at the host; while it awaits its
experts, or keys that the other half stores, the other computes. So neither takes the core from the
other, however few cores the host has.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter

from dflash_moe.errors import EngineError


class HalfStopped(EngineError):
    """A half was stopped because the other one had failed, whose error says why."""


class HalfTurns:
    """The turns of one step, which both halves' threads use. A half that raised an error has no
    turn any more once `stop` was called. No wait is longer than `limit_s`, within which every
    expert call has ended.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        # The seconds in which a half awaited its experts, and those of them in which the other one
        # computed.
        self.awaited_s = self.hidden_s = 0.0
        self._changed = threading.Condition()
        # Turns are numbered: the half that drew number `_turn` computes, and `_drawn` is the next.
        self._turn = self._drawn = 0
        self._num_awaiting, self._since_s = 0, perf_counter()
        self._stored: set[int] = set()
        self._is_stopped = False

    def draw(self) -> int:
        """Returns the number of a turn. Turns come in the order in which they were drawn."""
        with self._changed:
            return self._draw()

    def begin(self, number: int) -> None:
        """Returns once the turn has come. Raises HalfStopped, and EngineError where it does not
        come within the limit.
        """
        with self._changed:
            self._begin(number)

    def end(self) -> None:
        """Ends the turn of this half."""
        with self._changed:
            self._end()

    def leave(self) -> None:
        """Ends the turn of this half because it awaits its experts."""
        with self._changed:
            self._note(1)
            self._end()

    def enter(self) -> None:
        """Returns in another turn of this half, whose experts have answered. Errors are those of
        `begin`.
        """
        with self._changed:
            self._note(-1)
            self._begin(self._draw())

    def stop(self) -> None:
        """Has each half raise HalfStopped at its next turn or wait."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def keys_stored(self, layer: int) -> None:
        """Says that the first half has stored its keys and values of a layer."""
        with self._changed:
            self._stored.add(layer)
            self._changed.notify_all()

    def await_keys(self, layer: int) -> None:
        """Returns once the first half has stored its keys and values of a layer; meanwhile this
        half, the second, has no turn. Errors are those of `begin`, naming the layer.
        """
        with self._changed:
            if layer in self._stored:
                return
            self._end()
            self._wait(lambda: layer in self._stored, f"layer {layer}: the first half of a step had not stored its keys")
            self._begin(self._draw())

    # -- with the condition held -------------------------------------------------------------------
    def _draw(self) -> int:
        self._drawn += 1
        return self._drawn - 1

    def _begin(self, number: int) -> None:
        self._wait(lambda: self._turn == number, "a half of a step had not had its turn")

    def _end(self) -> None:
        self._note(0)
        self._turn += 1
        self._changed.notify_all()

    def _wait(self, is_met: Callable[[], bool], what: str) -> None:
        in_time = self._changed.wait_for(lambda: self._is_stopped or is_met(), self._limit_s)
        if self._is_stopped:
            raise HalfStopped("a half of a step was stopped because the other one failed")
        if not in_time:
            raise EngineError(f"{what} within the limit of {self._limit_s:g} s (20 times ipc.call_timeout_s)")
        self._note(0)

    def _note(self, change: int) -> None:
        """Books the time since the last change, and how many halves await their experts now."""
        now = perf_counter()
        if self._num_awaiting > 0:
            self.awaited_s += now - self._since_s
            if self._turn < self._drawn:
                self.hidden_s += now - self._since_s
        self._since_s = now
        self._num_awaiting += change
