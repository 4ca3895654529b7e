"""A conversation as token ids: what was said, rendered by the model's template and tokenised, such
that what the model has computed already stays the beginning of the next prompt.

An answer's ids are kept as they were generated. Tokenised again, its text may give others, and the
prefix cache would miss from there on.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

from dflash_moe.integrations.tokenizer import decode, encode_with_ends

# Of so many tokens before an answer its text is decoded with, because a token's text may depend on
# what is before it.
_CONTEXT = 4


# gpt-oss writes several messages for one answer, of which its template takes the last
# (https://cookbook.openai.com/articles/openai-harmony, "Channels").
CHANNEL = "<|channel|>"
_FINAL = f"{CHANNEL}final<|message|>"
_MARK = re.compile(r"<\|(?:return|end|start|call|channel)\|>")


class Renderer(Protocol):
    """What `ChatHistory` asks of a `TemplateRenderer`."""

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """Returns the text of a conversation and of what begins the next answer."""
        ...


class ChatHistory:
    """The messages of a conversation and the ids that the model has seen. One thread uses it."""

    def __init__(self, renderer: Renderer, tokenizer: Any, system: str | None = None) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._system = system
        self.messages: list[dict[str, Any]] = []
        # Why the latest prompt does not begin with all that was computed before; empty where it
        # does.
        self.not_kept = ""
        # What was computed last, its text, and the text and ids of the prompt that is out now.
        self._seen_ids: list[int] = []
        self._seen_text = ""
        self._prompt_ids: list[int] = []
        self._prompt_text = ""
        self.reset()

    @property
    def num_turns(self) -> int:
        """The number of the user's messages."""
        return sum(message["role"] == "user" for message in self.messages)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the latest prompt and its answer."""
        return len(self._seen_ids)

    def reset(self) -> None:
        """Forgets everything but the system prompt."""
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._seen_ids, self._seen_text, self.not_kept = [], "", ""

    def ask(self, text: str) -> list[int]:
        """Adds what the user says and returns the ids of the prompt. Errors are those of the
        renderer and of the tokenizer, and leave the conversation as it was.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            self._prompt_text = self._renderer.render(self.messages)
            self._prompt_ids = self._tokenised(self._prompt_text)
        except BaseException:
            self.messages.pop()
            raise
        return self._prompt_ids

    def answer(self, token_ids: Sequence[int], text: str) -> None:
        """Adds the answer to the latest question: its ids as generated, and its text as shown."""
        context = self._prompt_ids[-_CONTEXT:]
        before = self._decoded(context)
        written = self._decoded([*context, *token_ids])[len(before) :]
        self.messages.append({"role": "assistant", "content": _content(written, text)})
        self._seen_ids = [*self._prompt_ids, *token_ids]
        self._seen_text = self._prompt_text + written

    def take_back(self) -> None:
        """Removes the latest question, which got no answer."""
        self.messages.pop()

    def _tokenised(self, text: str) -> list[int]:
        token_ids, ends = encode_with_ends(self._tokenizer, text)
        seen = len(self._seen_ids)
        self.not_kept = ""
        if token_ids[:seen] == self._seen_ids:
            return token_ids
        if not text.startswith(self._seen_text):
            self.not_kept = "the template renders the latest answer otherwise than the model wrote it"
            return token_ids
        # Only where a token ends with the seen text do the later ones say what is behind it.
        place = next((place for place, end in enumerate(ends) if end >= len(self._seen_text)), None)
        if place is None or ends[place] != len(self._seen_text):
            self.not_kept = "no token ends where the latest answer does"
            return token_ids
        while place + 1 < len(ends) and ends[place + 1] == len(self._seen_text):
            place += 1
        return [*self._seen_ids, *token_ids[place + 1 :]]

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return decode(self._tokenizer, token_ids, skip_special_tokens=False)


def _content(written: str, shown: str) -> str:
    """Returns what a template is told of an answer: all that was shown, or of an answer in channels
    the final message, which is empty where the model did not come to it.
    """
    if CHANNEL not in written:
        return shown
    return _MARK.split(written.rpartition(_FINAL)[2], maxsplit=1)[0] if _FINAL in written else ""
