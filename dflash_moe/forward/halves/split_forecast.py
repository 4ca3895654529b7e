"""Whether a step is faster in two halves: learned from what steps of about as many rows took, and
predicted where that is not known yet. It knows numbers only, no step and no thread.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

# A forecast never cuts a step of fewer rows into halves. With top_k experts a row, so few rows
# reach only part of a layer's experts, and each half would reach most of that part: their weights
# would be read twice, which costs more than the overlap with the host's own work saves.
LEAST_ROWS = 64
# Halves are chosen where they are predicted to save this share, and kept where they were measured
# to save this one.
LEAST_GAIN = 0.05
KEPT_GAIN = 0.02
# The median of the last _KEPT steps of a size (`size_key`) says what that size takes. The first
# steps are slow, because caches and workers' buffers are cold: so halves are judged from their
# third step on, and nothing is predicted before three steps of LEAST_ROWS rows were measured.
_KEPT = 9
_JUDGED = 3
# Times change, with the load of a worker or the length of contexts. So the choice that was not
# taken is tried once after TRY_AGAIN steps of a size; halves only where they took at most
# _WORTH_TRYING times as long as the whole step when they were measured last.
TRY_AGAIN = 64
_WORTH_TRYING = 1.25
# Why something is chosen.
PREDICTED, MEASURED, TRIED = "predicted", "measured", "measured once more"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The seconds that a step of `num_rows` rows took, that its host awaited routed experts, and
    that these were under way.
    """

    num_rows: int
    total_s: float
    awaited_s: float
    remote_s: float

    @property
    def host_s(self) -> float:
        """The seconds that the host computed."""
        return self.total_s - self.awaited_s


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """What was chosen for a step, and what is known or predicted of both: seconds, None where
    nothing is.
    """

    is_split: bool
    reason: str
    whole_s: float | None = None
    split_s: float | None = None


@dataclass(slots=True)
class Size:
    """The last steps of about the same number of rows and length of context."""

    whole: deque[StepTimes] = field(default_factory=lambda: deque(maxlen=_KEPT))
    split: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    # The last steps that were alike, whole or split: how many.
    streak: int = 0
    was_split: bool = False

    @property
    def whole_s(self) -> float | None:
        """The median of steps in one batch."""
        return statistics.median(one.total_s for one in self.whole) if self.whole else None

    @property
    def split_s(self) -> float | None:
        """The median of steps in two halves, None before there are enough."""
        return statistics.median(self.split) if len(self.split) >= _JUDGED else None


# Steps are alike whose rows and whose context are of the same quarter and whole octave.
SizeKey = tuple[int, int]


def size_key(num_rows: int, context: float) -> SizeKey:
    """Returns what steps of about `num_rows` rows have in common whose rows have about `context`
    tokens before them on average.
    """
    return round(4 * math.log2(num_rows)), max(9, round(math.log2(context + 1)))


class SplitForecast:
    """What is known of the steps of one model."""

    def __init__(self, num_layers: int) -> None:
        """`num_layers` is the number of layers with routed experts."""
        self._num_layers = max(1, num_layers)
        self._num_long = 0
        self.sizes: dict[SizeKey, Size] = {}

    def choose(self, num_rows: int, context: float, first_rows: int) -> SplitChoice:
        """Chooses for a step of LEAST_ROWS rows or more whose first half would have
        `first_rows`.
        """
        if self._num_long < _JUDGED:
            return SplitChoice(False, "too few long steps are measured yet")
        size = self.sizes.setdefault(size_key(num_rows, context), Size())
        whole_s, split_s = size.whole_s, size.split_s
        if whole_s is None or split_s is None:
            choice = self._predicted(num_rows, first_rows, whole_s)
        else:
            choice = SplitChoice(split_s <= (1 - KEPT_GAIN) * whole_s, MEASURED, whole_s, split_s)
        return self._other(choice, size) or choice

    def _other(self, choice: SplitChoice, size: Size) -> SplitChoice | None:
        """Returns the other choice where it is time to measure that."""
        if choice.is_split:
            is_due = size.streak >= (TRY_AGAIN if size.whole else _JUDGED) and size.was_split
        else:
            is_due = size.streak >= TRY_AGAIN and not size.was_split
            is_due = is_due and (choice.split_s or 0.0) <= _WORTH_TRYING * (choice.whole_s or 0.0)
        return SplitChoice(not choice.is_split, TRIED, choice.whole_s, choice.split_s) if is_due else None

    def learn_whole(self, times: StepTimes, context: float) -> None:
        """Books a step that was computed in one batch."""
        size = self.sizes.setdefault(size_key(times.num_rows, context), Size())
        size.whole.append(times)
        self._num_long += times.num_rows >= LEAST_ROWS
        _book(size, is_split=False)

    def learn_split(self, num_rows: int, context: float, total_s: float) -> None:
        """Books a step that was computed in two halves."""
        size = self.sizes.setdefault(size_key(num_rows, context), Size())
        size.split.append(total_s)
        _book(size, is_split=True)

    def _predicted(self, num_rows: int, first_rows: int, whole_s: float | None) -> SplitChoice:
        first, second = self._of_rows(first_rows), self._of_rows(num_rows - first_rows)
        split_s = pipelined_s(first, second, self._num_layers)
        whole_s = self._of_rows(num_rows).total_s if whole_s is None else whole_s
        return SplitChoice(split_s <= (1 - LEAST_GAIN) * whole_s, PREDICTED, whole_s, split_s)

    def _of_rows(self, num_rows: int) -> StepTimes:
        """Returns what a step in one batch takes, on the line between the nearest sizes that were
        measured, and in proportion to its rows where all were larger or smaller.
        """
        points = sorted((_median_of(size.whole) for size in self.sizes.values() if size.whole), key=lambda one: one.num_rows)
        below = [one for one in points if one.num_rows <= num_rows]
        above = [one for one in points if one.num_rows > num_rows]
        if not below or not above:
            nearest = below[-1] if below else above[0]
            return _scaled(nearest, num_rows / nearest.num_rows, num_rows)
        low, high = below[-1], above[0]
        share = (num_rows - low.num_rows) / (high.num_rows - low.num_rows)
        return StepTimes(
            num_rows,
            *((1 - share) * getattr(low, name) + share * getattr(high, name) for name in ("total_s", "awaited_s", "remote_s")),
        )


def pipelined_s(first: StepTimes, second: StepTimes, num_layers: int) -> float:
    """Returns what two halves take, each of which is given as it would take alone. Layer by layer,
    the host computes one half while the experts of the other are under way, and a worker takes one
    half after the other. The longest of these chains is the time, and once a layer's shorter part
    is hidden by nothing.
    """
    longest = max(
        first.host_s + second.host_s, first.remote_s + second.remote_s, first.host_s + first.awaited_s,
        second.host_s + second.awaited_s,
    )  # fmt: skip
    return longest + min(first.host_s, second.awaited_s) / num_layers


def _book(size: Size, *, is_split: bool) -> None:
    size.streak = size.streak + 1 if size.was_split == is_split else 1
    size.was_split = is_split


def _median_of(steps: Iterable[StepTimes]) -> StepTimes:
    kept = tuple(steps)

    def median(value: Callable[[StepTimes], float]) -> float:
        return statistics.median(value(one) for one in kept)

    return StepTimes(
        round(median(lambda one: one.num_rows)), median(lambda one: one.total_s), median(lambda one: one.awaited_s),
        median(lambda one: one.remote_s),
    )  # fmt: skip


def _scaled(times: StepTimes, factor: float, num_rows: int) -> StepTimes:
    return StepTimes(num_rows, factor * times.total_s, factor * times.awaited_s, factor * times.remote_s)
