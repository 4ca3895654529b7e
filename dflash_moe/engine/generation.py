"""Generates one sequence over a host model: it prefills once, and then decodes one token a step.
The commands `generate` and `demo` use it.

It is deliberately the plain loop. Whatever schedules many requests must reproduce its tokens.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from dflash_moe.forward.host_model import HostModel


@dataclass(frozen=True, slots=True)
class TokenStep:
    """A sampled token and the seconds of the forward pass that produced it. The first pass is the
    prefill.
    """

    token_id: int
    forward_s: float


def generate_tokens(
    host: HostModel,
    token_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_token_ids: frozenset[int] = frozenset(),
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[TokenStep]:
    """Yields up to `max_new_tokens` tokens after `token_ids`. It stops after a token of
    `stop_token_ids`, which is yielded too.

    Temperature 0 takes the most likely token, and the lowest id among equals. Sampling uses a
    generator of its own, seeded with `seed`. Errors: ConfigError where prompt and new tokens
    together exceed the model's positions or the KV cache, and those of `ExpertRuntime.experts`.
    """
    generator = torch.Generator().manual_seed(seed)
    step_ids = list(token_ids)
    with closing(host.sequence(len(step_ids) + max_new_tokens)) as run:
        for _ in range(max_new_tokens):
            started = time.perf_counter()
            token_id = _sample(run.forward(step_ids), temperature, generator)
            yield TokenStep(token_id, time.perf_counter() - started)
            if token_id in stop_token_ids:
                return
            step_ids = [token_id]


def _sample(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0.0:
        return int(torch.argmax(logits))
    probabilities = torch.softmax(logits.float() / temperature, dim=-1).cpu()
    return int(torch.multinomial(probabilities, 1, generator=generator))
