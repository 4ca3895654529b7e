"""Turns generated token ids into text as they come, and knows after which ones a model stops.

Neither torch nor transformers is imported here or in what this imports: a process that only makes
text of tokens has neither.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

from dflash_moe.integrations.tokenizer import decode, special_ids

# What is no character after so many tokens never becomes one: a character has at most four bytes,
# and each may be a token of its own.
_LONGEST_WAIT = 8
# The beginning of an unfinished character is within so many tokens, with one to spare.
_TAIL = 4
_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns token ids into text as they come, and holds back bytes that do not form a character
    yet. Each token is decoded with the few before it alone, so that a long text costs no more.
    """

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is one of transformers, or a bare `tokenizers.Tokenizer`."""
        self._tokenizer = tokenizer
        self._special = special_ids(tokenizer)
        self._token_ids: list[int] = []
        # Tokens from `_context` on are decoded with every new one, because a token's text may
        # depend on what is before it. Of their text `_num_given` characters were returned, and
        # where it was returned whole it ended before the token `_fresh`.
        self._context = self._fresh = self._num_given = 0

    def push(self, token_id: int) -> str:
        """Returns the text that became final with this token, which may be empty."""
        if token_id in self._special and not self._decode([token_id]):
            return ""
        self._token_ids.append(token_id)
        text = self._decode(self._token_ids[self._context :])
        final = text.rstrip(_NO_CHARACTER)
        is_late = len(self._token_ids) - self._fresh > _LONGEST_WAIT
        if is_late and text != final:
            # The last of them may still be the beginning of a character.
            final = text[:-1]
        fresh, self._num_given = final[self._num_given :], max(self._num_given, len(final))
        if fresh and final == text:
            self._begin_at(self._fresh, num_held=0)
        elif is_late and final == text:
            # Tokens without a text are forgotten, and what is before them stays in sight.
            del self._token_ids[self._fresh :]
        elif is_late:
            self._begin_at(len(self._token_ids) - _TAIL, num_held=1)
        return fresh

    def finish(self) -> str:
        """Returns what is left, with replacement characters for incomplete ones."""
        text = self._decode(self._token_ids[self._context :])
        fresh, self._num_given = text[self._num_given :], len(text)
        return fresh

    def _begin_at(self, context: int, *, num_held: int) -> None:
        """Decodes from token `context` on, all but `num_held` characters of which were returned."""
        self._context = context
        self._fresh = len(self._token_ids)
        self._num_given = max(0, len(self._decode(self._token_ids[context:])) - num_held)

    def _decode(self, token_ids: list[int]) -> str:
        return decode(self._tokenizer, token_ids)


def stop_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Returns the end-of-text ids of the model's generation settings, its configuration and its
    tokenizer.
    """
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, (list, tuple)):
            found.update(int(item) for item in value)
    return frozenset(found)
