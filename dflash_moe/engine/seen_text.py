"""What a model has computed of a conversation, as ids and as text, and how a longer rendering of it
becomes ids that begin with the same ones: an answer's ids stay as they were generated, because
tokenised again its text may give others, and the prefix cache would miss from there on.

There is no torch here: a server that only talks to an engine has none.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_moe.integrations.tokenizer import decode, encode_with_ends

# Of so many tokens before an answer its text is decoded with, because a token's text may depend on
# what is before it.
_CONTEXT = 4


@dataclass(frozen=True, slots=True)
class SeenText:
    """What the model has computed up to the end of some answer, and its text."""

    token_ids: Sequence[int] = ()
    text: str = ""

    def continued(self, tokenizer: Any, text: str) -> tuple[list[int], str]:
        """Returns the ids of a rendered conversation, with those that were computed as they were;
        and why they are not its beginning, empty where they are. Errors are those of
        `encode_with_ends`.
        """
        token_ids, ends = encode_with_ends(tokenizer, text)
        seen = list(self.token_ids)
        if token_ids[: len(seen)] == seen:
            return token_ids, ""
        if not text.startswith(self.text):
            return token_ids, "the template renders the latest answer otherwise than the model wrote it"
        # Only where a token ends with the seen text do the later ones say what is behind it.
        place = next((place for place, end in enumerate(ends) if end >= len(self.text)), None)
        if place is None or ends[place] != len(self.text):
            return token_ids, "no token ends where the latest answer does"
        while place + 1 < len(ends) and ends[place + 1] == len(self.text):
            place += 1
        return [*seen, *token_ids[place + 1 :]], ""


def seen_with(tokenizer: Any, prompt_ids: Sequence[int], prompt_text: str, answer_ids: Sequence[int]) -> SeenText:
    """Returns what was seen after an answer to a prompt. Errors are those of `decode`."""
    context = prompt_ids[-_CONTEXT:]
    before = decode(tokenizer, context, skip_special_tokens=False)
    written = decode(tokenizer, [*context, *answer_ids], skip_special_tokens=False)[len(before) :]
    return SeenText((*prompt_ids, *answer_ids), prompt_text + written)
