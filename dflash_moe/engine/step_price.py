"""`StepPrice` says how many seconds a step of n rows takes, learnt from the steps themselves. What
a further row costs decides whether drafts pay.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from itertools import accumulate

from dflash_moe.errors import ConfigError

# Steps are collected at these numbers of rows, each at the nearest. Up to 8 rows every number has
# its own. Above they are a quarter apart: a row more changes a large step by less than two equal
# steps differ, so that only points at a distance tell a price.
POINTS = tuple(accumulate(range(40), lambda rows, _: max(rows + 1, rows * 5 // 4), initial=1))
# A point is believed from its third step on, since the median of three ignores one pause of the
# machine. It is the median of its last 31 steps, and stands at that step's own number of rows.
# What lies further back than 512 steps of all kinds is forgotten as soon as three others are
# there, because contexts grow and machines become busy.
_ENOUGH = 3
_WINDOW = 31
_LASTS = 512
# Before anything is measured a row costs at least this share of a step of one row. From 4 to 16
# sequences a step of the reference model grew by 0.145 for each row, with nearly all experts read.
_ROW_SHARE = 0.15
# A measured row is never taken for cheaper than this share of a step of one row: less is below
# what the medians can tell apart, and rows for nothing would always pay.
_LEAST_ROW_SHARE = 0.01


class StepPrice:
    """Seconds of a step as a function of its rows: linear between measured points, and beyond them
    of the shape that is assumed before anything is measured.

    That shape is careful. Row n of a step is taken to read the experts that no row before it read,
    a share of (1 - expert_share)^(n - 1), as if a step were nothing but reading experts: 1, 1.75,
    2.31, 2.73, 3.05 for 8 experts of 32. Whole steps measured 1, 1.15, 1.31, 1.42, 1.50.

    Owned by the engine thread.
    """

    def __init__(self, expert_share: float = 1 / 16) -> None:
        """`expert_share` is top_k / num_experts of the model, 1 for a dense one."""
        if not 0 < expert_share <= 1:
            raise ConfigError(f"expert_share={expert_share} is not allowed; allowed: above 0 and at most 1")
        self._unread_share = 1 - expert_share
        self._num_falling = 1
        if expert_share < 1:
            self._num_falling += math.floor(math.log(_ROW_SHARE) / math.log(self._unread_share))
        self._num_steps = 0
        # (seconds, rows, number of the step) of the last steps at each point, and the measured
        # (seconds, rows) of each.
        self._windows: dict[int, deque[tuple[float, int, int]]] = {}
        self._medians: dict[int, tuple[float, int]] = {}
        # The same in the order of rows, with seconds that rise.
        self._rows: list[int] = []
        self._seconds: list[float] = []

    def assumed(self, num_rows: int) -> float:
        """Returns the price of a step relative to one of one row, before anything is measured."""
        falling = min(num_rows, self._num_falling)
        return (1 - self._unread_share**falling) / (1 - self._unread_share) + _ROW_SHARE * (num_rows - falling)

    def observe(self, num_rows: int, seconds: float) -> None:
        """Takes note of a step: `num_rows` rows of all kinds in `seconds`, drafting included. A
        step of no rows or no time says nothing.
        """
        if num_rows < 1 or not 0 < seconds < math.inf:
            return
        self._num_steps += 1
        point = _nearest(num_rows)
        window = self._windows.setdefault(point, deque(maxlen=_WINDOW))
        window.append((seconds, num_rows, self._num_steps))
        while len(window) > _ENOUGH and window[0][2] < self._num_steps - _LASTS:
            window.popleft()
        if len(window) >= _ENOUGH:
            self._medians[point] = sorted(window)[len(window) // 2][:2]
            self._fit()

    def seconds(self, num_rows: int) -> float:
        """Returns the seconds that a step of `num_rows` rows is expected to take; before anything
        is measured, relative to a step of one row.
        """
        if not self._rows:
            return self.assumed(num_rows)
        above = bisect_left(self._rows, num_rows)
        if 0 < above < len(self._rows):
            first, last = self._rows[above - 1], self._rows[above]
            low, high = self._seconds[above - 1], self._seconds[above]
            return low + (high - low) * (num_rows - first) / (last - first)
        end = min(above, len(self._rows) - 1)
        return self._seconds[end] * self.assumed(num_rows) / self.assumed(self._rows[end])

    def _fit(self) -> None:
        """Makes seconds of the medians that rise with the rows: midway between the highest at or
        below each point and the lowest at or above it.
        """
        points = [self._medians[point] for point in sorted(self._medians)]
        rows = [rows for _, rows in points]
        highest = accumulate((seconds for seconds, _ in points), max)
        lowest = list(accumulate((seconds for seconds, _ in reversed(points)), min))[::-1]
        fitted = [(high + low) / 2 for high, low in zip(highest, lowest, strict=True)]
        least = _LEAST_ROW_SHARE * fitted[0] / self.assumed(rows[0])
        for place in range(1, len(rows)):
            fitted[place] = max(fitted[place], fitted[place - 1] + least * (rows[place] - rows[place - 1]))
        self._rows, self._seconds = rows, fitted


def _nearest(num_rows: int) -> int:
    above = bisect_left(POINTS, num_rows)
    if above == len(POINTS):
        return POINTS[-1]
    if above and num_rows - POINTS[above - 1] < POINTS[above] - num_rows:
        return POINTS[above - 1]
    return POINTS[above]
