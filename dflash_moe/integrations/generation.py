"""Generates one sequence over a host model: it prefills once, and then decodes one token a step.
The commands `generate` and `demo` and the benches use it.

It is deliberately the plain loop. Whatever schedules many requests must reproduce its tokens.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TokenStep:
    """A sampled token and the seconds of the forward pass that produced it. The first pass is the
    prefill.
    """

    token_id: int
    forward_s: float


def generate_tokens(
    model: Any,
    input_ids: torch.Tensor,
    *,
    max_new_tokens: int,
    stop_token_ids: frozenset[int] = frozenset(),
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[TokenStep]:
    """Yields up to `max_new_tokens` tokens after `input_ids`, which is [1, num_tokens] in int64. It
    stops after a token of `stop_token_ids`, which is yielded too.

    Temperature 0 takes the most likely token, and the lowest id among equals. Sampling uses a
    generator of its own, seeded with `seed`. Errors are those of the model and of
    `ExpertRuntime.experts`.
    """
    import torch
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(seed)
    cache = DynamicCache(config=model.config)
    device = getattr(model, "device", "cpu")
    step_ids = input_ids.to(device)
    with torch.inference_mode():
        for _ in range(max_new_tokens):
            started = time.perf_counter()
            logits = model(input_ids=step_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
            token_id = _sample(logits, temperature, generator)
            yield TokenStep(token_id, time.perf_counter() - started)
            if token_id in stop_token_ids:
                return
            step_ids = torch.tensor([[token_id]], dtype=torch.int64, device=device)


def _sample(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    import torch

    if temperature == 0.0:
        return int(torch.argmax(logits))
    probabilities = torch.softmax(logits.float() / temperature, dim=-1).cpu()
    return int(torch.multinomial(probabilities, 1, generator=generator))


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
