"""Finds toy sizes that keep what matters of a model's widths: equal stays equal, half stays half,
and all are even.

They are used where the structure of experts is examined (which element goes where, what a class
computes) and not their values.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dflash_moe.errors import UnsupportedError

# These are doubled primes. No product of one with a power of two equals that of another, so that
# widths that differ stay different.
_BASES = (6, 10, 14, 22, 26, 34, 38, 46, 58, 62)


@dataclass(frozen=True, slots=True)
class Shrink:
    """The toy sizes by true size. A size that was not among the widths stays as it is."""

    toy_sizes: Mapping[int, int]

    @classmethod
    def for_widths(cls, widths: Iterable[int]) -> Shrink:
        """Gives every width a toy size: twice that of its half where the half is a width too, and
        else one of its own. Raises UnsupportedError where there are more widths than any known
        experts have.
        """
        toy_sizes: dict[int, int] = {}
        bases = iter(_BASES)
        for width in sorted(set(widths)):
            if width % 2 == 0 and width // 2 in toy_sizes:
                toy_sizes[width] = 2 * toy_sizes[width // 2]
            else:
                toy_size = next(bases, None)
                if toy_size is None:
                    raise UnsupportedError(f"experts' tensors of more than {len(_BASES)} different widths are not understood")
                toy_sizes[width] = toy_size
        return cls(toy_sizes)

    def width(self, size: int) -> int:
        """Returns the toy size of a width."""
        return self.toy_sizes.get(size, size)

    def shape(self, shape: Iterable[int]) -> tuple[int, ...]:
        """Returns the toy shape of a tensor of one expert."""
        return tuple(map(self.width, shape))
