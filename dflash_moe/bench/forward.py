"""Measures one prefill, and the greedy decode after it, through a model whose experts are remote:
times, counts and a digest of the bits.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_moe.errors import ConfigError
from dflash_moe.experts.expert_runtime import ExpertRuntime

if TYPE_CHECKING:
    from dflash_moe.forward.host_model import HostModel

COUNTED = ("calls", "request_bytes", "reply_bytes", "floor_bytes")
# After a switch of mode a prefill of so many tokens is not measured, because it touches a new data
# path and wakes sleeping threads.
SETTLE_TOKENS = 64


@dataclass(slots=True)
class Sample:
    """What was measured of one prefill and the decode after it."""

    prompt_tokens: int
    prefill_s: float
    # Every decoded token has its time.
    token_s: list[float]
    prefill: dict[str, int]
    decode: dict[str, int]
    # The digest covers the KV cache and the last logits after the prefill. Equal digests mean equal
    # bits in every layer.
    digest: str
    token_ids: list[int]


def measure_once(host: HostModel, runtime: ExpertRuntime, input_ids: Any, new_tokens: int) -> Sample:
    """Prefills `input_ids` [1, num_tokens] in one forward pass, and then decodes `new_tokens`
    greedily. Raises ConfigError when the experts of the model did not go through the runtime.
    """
    import torch

    from dflash_moe.forward.sequence_run import run_digest

    prompt = input_ids[0].tolist()
    before = counted(runtime)
    with closing(host.sequence(len(prompt) + new_tokens)) as run:
        started = time.perf_counter()
        logits = run.forward(prompt)
        prefill_s = time.perf_counter() - started
        after_prefill = counted(runtime)
        digest = run_digest(run, logits)
        token_ids, token_s = [int(torch.argmax(logits))], []
        for _ in range(new_tokens):
            started = time.perf_counter()
            token_ids.append(int(torch.argmax(run.forward(token_ids[-1:]))))
            token_s.append(time.perf_counter() - started)
    after_decode = counted(runtime)
    if after_prefill["calls"] == before["calls"]:
        raise ConfigError("the model made no remote expert call: its experts did not go through dflash_moe")
    return Sample(
        int(input_ids.shape[1]),
        prefill_s,
        token_s,
        {key: after_prefill[key] - before[key] for key in COUNTED},
        {key: after_decode[key] - after_prefill[key] for key in COUNTED},
        digest,
        token_ids,
    )


def settle(host: HostModel, runtime: ExpertRuntime, input_ids: Any) -> None:
    """Makes a prefill of the first tokens, and decodes one, without measuring, after a switch of
    mode or dtype.
    """
    measure_once(host, runtime, input_ids[:, :SETTLE_TOKENS], 1)


def counted(runtime: ExpertRuntime) -> dict[str, int]:
    """Returns the totals of the runtime so far: calls, request_bytes, reply_bytes, floor_bytes."""
    totals = runtime.stats()["totals"]
    return {key: int(totals[key]) for key in COUNTED}


def random_prompt(host: HostModel, num_tokens: int, seed: int) -> Any:
    """Draws token ids [1, num_tokens] in int64. A shorter prompt of the same seed is a prefix of a
    longer one.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, host.model.config.get_text_config().vocab_size, (1, num_tokens), generator=generator)
