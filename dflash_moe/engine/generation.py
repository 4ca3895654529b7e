"""Generates one sequence over a host model: it prefills once, and then decodes one token a step.
`demo` and benches use it.

It is deliberately the plain loop. Whatever schedules many requests must reproduce its tokens.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from dflash_moe.forward.host_model import HostModel


@dataclass(frozen=True, slots=True)
class TokenStep:
    """A token and the seconds of the forward pass that produced it. The first pass is the
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
) -> Iterator[TokenStep]:
    """Yields up to `max_new_tokens` most likely tokens after `token_ids`, the lowest id among
    equals. It stops after a token of `stop_token_ids`, which is yielded too.

    Errors: ConfigError where prompt and new tokens together exceed the model's positions or the KV
    cache, and those of `ExpertRuntime.experts`.
    """
    step_ids = list(token_ids)
    with closing(host.sequence(len(step_ids) + max_new_tokens)) as run:
        for _ in range(max_new_tokens):
            started = time.perf_counter()
            token_id = run.most_likely(step_ids)
            yield TokenStep(token_id, time.perf_counter() - started)
            if token_id in stop_token_ids:
                return
            step_ids = [token_id]
