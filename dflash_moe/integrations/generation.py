"""Turns generated token ids into text as they come, and knows after which ones a model stops.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any


class TextStream:
    """Turns token ids into text as they come, and holds back bytes that do not form a character
    yet.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._printed = 0

    def push(self, token_id: int) -> str:
        """Returns the text that became final with this token, which may be empty."""
        self._token_ids.append(token_id)
        text = self._tokenizer.decode(self._token_ids, skip_special_tokens=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            # The next token may complete this unfinished UTF-8 sequence.
            return ""
        return self._take(text)

    def finish(self) -> str:
        """Returns what is left, with replacement characters for incomplete ones."""
        return self._take(self._tokenizer.decode(self._token_ids, skip_special_tokens=True))

    def _take(self, text: str) -> str:
        fresh, self._printed = text[self._printed :], max(self._printed, len(text))
        return fresh


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
