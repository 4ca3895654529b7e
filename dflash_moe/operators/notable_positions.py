"""The positions at which a model's code may begin to compute something else: at and around every
integer of its configuration, and around powers of two, which is where constants in code lie.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# A model that names no last position is looked at up to here.
_FAR = 1 << 20
# No number from here on is a position; infinity is none either.
_NO_POSITION = 1 << 40
# Powers of two below this one lie among the first positions, which are looked at one by one.
_FIRST_POWER = 6


def notable_positions(config: Any, last: int = 0) -> list[int]:
    """Returns the positions in ascending order: of each integer of the configuration of a model's
    text, of its rope parameters too, the one before, at, behind, and four times as far; of powers
    of two the one before and at; and the last. `last` is that of the model, 0 where it names none.
    """
    last = last or _FAR
    found = {0, 1, last}
    for value in _integers(vars(config.get_text_config())):
        found |= {value - 1, value, value + 1, 4 * value}
    for power in range(_FIRST_POWER, last.bit_length()):
        found |= {(1 << power) - 1, 1 << power}
    return sorted(position for position in found if 0 <= position <= last)


def _integers(value: Any) -> Iterator[int]:
    """Yields every integer in nested dictionaries and lists."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _integers(item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _NO_POSITION and value == int(value):
        yield int(value)
