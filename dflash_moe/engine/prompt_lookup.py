"""`PromptLookup` drafts the next tokens of a sequence from the sequence itself: where its last
tokens stood before, what followed them then may follow again. It knows token ids and no model.

The idea is that of prompt lookup decoding (Apoorv Saxena, 2023); the copying is that of LZ77.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from dflash_moe.errors import ConfigError

# An n-gram is stored as one number of n digits in this base. Token ids are smaller, so that
# different n-grams are different numbers. The base is the largest prime below 2^32 and no power of
# two, because a dict looks at the low bits first, and these must depend on all digits.
_BASE = (1 << 32) - 5
# One call of `draft` indexes at most so many tokens, about 0.3 ms of work. A prompt of 100,000
# tokens that a prefix hit brings at once is so spread over 196 steps.
CATCH_UP = 512
# The tokens that all indexes hold together by default. With n-grams of two sizes a token takes at
# most 300 bytes, where none of its n-grams stood before: 75 MiB for all.
MAX_INDEXED = 1 << 18


class _Index:
    """Where the n-grams of one sequence last ended: a dict for each size, the smallest first."""

    __slots__ = ("ends", "last_end")

    def __init__(self, num_sizes: int) -> None:
        self.ends: list[dict[int, int]] = [{} for _ in range(num_sizes)]
        # All n-grams that end at this position or before are indexed. A position counts the tokens
        # before it.
        self.last_end = 0


class PromptLookup:
    """A `Drafter` (engine/speculate.py) that takes the longest suffix of `shortest` to `longest`
    tokens that occurred before, at its most recent occurrence, and continues as it went on there.

    Each sequence has an index that grows by its new tokens only. All indexes together hold
    `max_indexed` tokens; where these are spent, a sequence is known up to there, and gets more
    once others are dropped. Owned by the engine thread.
    """

    def __init__(self, longest: int = 3, shortest: int = 2, *, max_indexed: int = MAX_INDEXED) -> None:
        if not 1 <= shortest <= longest:
            raise ConfigError(f"shortest={shortest}, longest={longest} is not allowed; allowed: 1 <= shortest <= longest")
        if max_indexed < 0:
            raise ConfigError(f"max_indexed={max_indexed} is not allowed; allowed: at least 0")
        self._sizes = range(shortest, longest + 1)
        self._room = max_indexed
        self._indexes: dict[Hashable, _Index] = {}

    def draft(self, key: Hashable, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """Returns `most` tokens that may follow `token_ids`, none where no suffix occurred before.

        `token_ids` is the whole sequence `key`, ids of 32 bits, prompt and outputs. Between calls
        it only grows; a shorter one is indexed anew.
        """
        index = self._indexes.get(key)
        if index is not None and len(token_ids) <= index.last_end:
            self.drop(key)
            index = None
        if index is None:
            index = self._indexes[key] = _Index(len(self._sizes))
        self._extend(index, token_ids)
        if most < 1:
            return ()
        suffixes = self._suffixes(token_ids)
        for ends, suffix in zip(reversed(index.ends), reversed(suffixes), strict=True):
            end = ends.get(suffix)
            if end is not None:
                return _continue(token_ids, end, most)
        return ()

    def drop(self, key: Hashable) -> None:
        """Forgets a sequence; one that is not known is no error."""
        index = self._indexes.pop(key, None)
        if index is not None:
            self._room += index.last_end

    @property
    def num_indexed(self) -> dict[Hashable, int]:
        """How many tokens of each known sequence are indexed."""
        return {key: index.last_end for key, index in self._indexes.items()}

    def _suffixes(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the last n tokens as a number for every size n; -1, which is never indexed, where
        the sequence is shorter.
        """
        number, found = 0, []
        num_tokens, digit = len(token_ids), 1
        for size in range(1, self._sizes[-1] + 1):
            if size <= num_tokens:
                number += token_ids[num_tokens - size] * digit
                digit *= _BASE
            if size >= self._sizes[0]:
                found.append(number if size <= num_tokens else -1)
        return found

    def _extend(self, index: _Index, token_ids: Sequence[int]) -> None:
        # The n-grams that end where the sequence ends have nothing behind them yet. They stay out,
        # so that a suffix never finds itself.
        stop = min(len(token_ids) - 1, index.last_end + CATCH_UP, index.last_end + self._room)
        if stop <= index.last_end:
            return
        for size, ends in zip(self._sizes, index.ends, strict=True):
            first = max(index.last_end + 1, size)
            tokens = token_ids[first - size : stop]
            numbers = tokens
            for place in range(1, size):
                numbers = [number * _BASE + token for number, token in zip(numbers, tokens[place:], strict=False)]
            ends.update(zip(numbers, range(first, stop + 1), strict=False))
        self._room -= stop - index.last_end
        index.last_end = stop


def _continue(token_ids: Sequence[int], end: int, most: int) -> list[int]:
    """Returns the `most` tokens from `end` on. A copy that reaches the end of the sequence goes on
    with what it copied, so that a text with a short period is continued for any length.
    """
    found = list(token_ids[end : end + most])
    period = len(token_ids) - end
    while len(found) < most:
        found.append(found[len(found) - period])
    return found
