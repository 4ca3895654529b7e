"""Answers that the model gave, remembered so that the next turn of a conversation begins with the
very ids that were computed, which the prefix cache then has.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from typing import Any

from dflash_moe.engine.seen_text import SeenText

# Of texts and ids of one key, and of all keys: some hundred long conversations. Whoever has one key
# pushes out no answer of another one before all of it is taken.
MAX_KEY_BYTES = 4 << 20
MAX_BYTES = 12 << 20


class RememberedAnswers:
    """Conversations up to an answer, by the key of whoever held them. One thread uses it. The
    latest that were used stay.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, max_key_bytes: int = MAX_KEY_BYTES) -> None:
        self._max_bytes = max_bytes
        self._max_key_bytes = max_key_bytes
        # By key, oldest used first; so are the texts of a key.
        self._kept: OrderedDict[bytes, OrderedDict[str, array[int]]] = OrderedDict()
        self._bytes: dict[bytes, int] = {}

    def add(self, salt: bytes, seen: SeenText) -> None:
        """Remembers a conversation of the key with this salt."""
        entry = array("i", seen.token_ids)
        size = _size(seen.text, entry)
        if size > self._max_key_bytes:
            return
        of_key = self._kept.setdefault(salt, OrderedDict())
        if seen.text in of_key:
            self._drop(salt, seen.text)
            of_key = self._kept.setdefault(salt, OrderedDict())
        of_key[seen.text] = entry
        self._bytes[salt] = self._bytes.get(salt, 0) + size
        self._kept.move_to_end(salt)
        while self._bytes[salt] > self._max_key_bytes:
            self._drop(salt, next(iter(of_key)))
        while sum(self._bytes.values()) > self._max_bytes:
            oldest = next(iter(self._kept))
            self._drop(oldest, next(iter(self._kept[oldest])))

    def find(self, salt: bytes, text: str) -> SeenText | None:
        """Returns the longest conversation of a key with which a rendered text begins."""
        of_key = self._kept.get(salt, OrderedDict())
        found = max((seen for seen in of_key if text.startswith(seen)), key=len, default=None)
        if found is None:
            return None
        self._kept[salt].move_to_end(found)
        self._kept.move_to_end(salt)
        return SeenText(of_key[found], found)

    @property
    def num_bytes(self) -> int:
        """What is remembered takes so much."""
        return sum(self._bytes.values())

    def _drop(self, salt: bytes, text: str) -> None:
        of_key = self._kept[salt]
        self._bytes[salt] -= _size(text, of_key.pop(text))
        if not of_key:
            del self._kept[salt], self._bytes[salt]


def _size(text: str, token_ids: Any) -> int:
    return sys.getsizeof(text) + sys.getsizeof(token_ids)
