"""The text that the demo model never saw, and how many bits a model needs for it. Used while
training and afterwards.

The first 64 windows of 256 tokens of the held-out documents, each document after an end-of-text
token. That token costs bits but adds no bytes; the very first token of the text is not predicted.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch

SEQUENCE_TOKENS = 256
NUM_WINDOWS = 64
END_OF_TEXT_ID = 0


@dataclass(frozen=True, slots=True)
class HeldOutText:
    """Token ids [num_tokens] in int64, and the UTF-8 text for which they stand, without end-of-text
    tokens.
    """

    token_ids: torch.Tensor
    num_bytes: int
    sha256: str


def token_stream(tokenizer: Any, texts: tuple[str, ...]) -> torch.Tensor:
    """Returns all documents in one row [num_tokens] in int64, with an end-of-text token before
    each.
    """
    ids: list[int] = []
    for encoded in tokenizer(list(texts), add_special_tokens=False)["input_ids"]:
        ids += [END_OF_TEXT_ID, *encoded]
    return torch.tensor(ids, dtype=torch.int64)


def held_out_text(tokenizer: Any, documents: tuple[str, ...], num_windows: int = NUM_WINDOWS) -> HeldOutText:
    """Returns the first windows of `documents`, the held-out part of the corpus."""
    token_ids = token_stream(tokenizer, documents)[: num_windows * SEQUENCE_TOKENS]
    encoded = tokenizer.decode(token_ids.tolist(), skip_special_tokens=True).encode("utf-8")
    return HeldOutText(token_ids, len(encoded), hashlib.sha256(encoded).hexdigest())


@torch.inference_mode()
def window_bits(model: Any, text: HeldOutText) -> list[float]:
    """Returns the bits of the tokens in each window, given those before them there. Logits are
    widened to float32 first.
    """
    found = []
    for start in range(0, len(text.token_ids) - 1, SEQUENCE_TOKENS):
        window = text.token_ids[start : start + SEQUENCE_TOKENS + 1][None]
        logits = model(input_ids=window[:, :-1]).logits[0]
        nats = torch.nn.functional.cross_entropy(logits.float(), window[0, 1:], reduction="sum")
        found.append(float(nats) / math.log(2))
    return found
