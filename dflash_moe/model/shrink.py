"""Toy sizes that keep a model's proportions: every width divided by one common unit, so equal, double and half stay so.

Used where the structure of the experts is examined (which element goes where, what a class computes), not their values.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

MIN_WIDTH = 4  # below, a matrix is too small to tell rows from columns and halves from every other


@dataclass(frozen=True, slots=True)
class Shrink:
    """Divides widths by `unit`; what is not a multiple of it stays."""

    unit: int

    @classmethod
    def for_widths(cls, widths: Iterable[int]) -> Shrink:
        """The largest unit that divides all widths and leaves each at MIN_WIDTH or more; 1 if there is none."""
        widths = [width for width in widths if width > 0]
        common = math.gcd(*widths) if widths else 1
        largest = max(1, min(widths, default=1) // MIN_WIDTH)
        return cls(next(unit for unit in range(min(common, largest), 0, -1) if common % unit == 0))

    def width(self, size: int) -> int:
        """The toy size of a width."""
        return size // self.unit if size % self.unit == 0 else size

    def shape(self, shape: Iterable[int]) -> tuple[int, ...]:
        """Toy shape of a tensor of one expert."""
        return tuple(map(self.width, shape))
