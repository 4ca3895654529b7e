"""Turns generated token ids into text as they come, and knows after which ones a model stops.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

# A character has at most four bytes, and each may be a token of its own. What is no character after
# so many tokens never becomes one.
_LONGEST_WAIT = 8


class TextStream:
    """Turns token ids into text as they come, and holds back bytes that do not form a character
    yet. Each token is decoded with the few before it alone, so that a long text costs no more.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        # Text of the tokens before `_given` was returned; those from `_context` on are decoded once
        # more, because a token's text may depend on what is before it.
        self._context = self._given = 0

    def push(self, token_id: int) -> str:
        """Returns the text that became final with this token, which may be empty."""
        self._token_ids.append(token_id)
        is_late = len(self._token_ids) - self._given > _LONGEST_WAIT
        return self._fresh(is_last=is_late)

    def finish(self) -> str:
        """Returns what is left, with replacement characters for incomplete ones."""
        return self._fresh(is_last=True)

    def _fresh(self, *, is_last: bool) -> str:
        before = self._decode(self._token_ids[self._context : self._given])
        text = self._decode(self._token_ids[self._context :])
        # The next token may complete an unfinished UTF-8 sequence.
        if not is_last and (len(text) <= len(before) or text.endswith("\N{REPLACEMENT CHARACTER}")):
            return ""
        self._context, self._given = self._given, len(self._token_ids)
        return text[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


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
