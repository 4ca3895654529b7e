"""Log-probabilities as OpenAI's two APIs write them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dflash_moe.server.front.tokens import FrontTokenizer

if TYPE_CHECKING:
    from dflash_moe.engine.sampling.token_logprobs import TokenLogprobs

# JSON has no infinity; this is what OpenAI's and vLLM's servers write for a probability of 0.
_LEAST = -9999.0


def for_chat(tokenizer: FrontTokenizer, found: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Returns those of a chat's tokens."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        content = tokenizer.token_bytes(token_id)
        return {"token": content.decode("utf-8", "replace"), "logprob": max(logprob, _LEAST), "bytes": list(content)}

    return {
        "content": [{**entry(one.token_id, one.logprob), "top_logprobs": [entry(*best) for best in one.best]} for one in found],
        "refusal": None,
    }


def for_completion(tokenizer: FrontTokenizer, found: Sequence[TokenLogprobs], offsets: Sequence[int]) -> dict[str, Any]:
    """Returns those of a completion's tokens, which begin so many characters behind the beginning
    of its text.
    """
    texts = [tokenizer.token_bytes(one.token_id).decode("utf-8", "replace") for one in found]
    best = [
        {tokenizer.token_bytes(token_id).decode("utf-8", "replace"): max(value, _LEAST) for token_id, value in one.best}
        for one in found
    ]
    logprobs = [max(one.logprob, _LEAST) for one in found]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": best, "text_offset": list(offsets)}
