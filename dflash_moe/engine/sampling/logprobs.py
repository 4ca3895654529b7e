"""Log-probabilities of a sampled token and of the best alternatives, for rows that ask for them.

They are those of the model: of its raw logits, before penalties, masks and temperature.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dflash_moe.engine.sampling.token_logprobs import TokenLogprobs


def pack(logits: torch.Tensor, token_id: torch.Tensor, num_best: int) -> torch.Tensor:
    """Computes on the logits' device what `unpack` reads, float64 [2 + 2 * num_best]: float64 holds
    ids and float32 exactly. `logits` are float32 [vocab_size], `token_id` is int64 [].
    """
    keys = _order_keys(logits)
    token_id = token_id.clamp_min(0)  # a row without a token is packed too, and nobody reads it
    best_ids = keys.topk(min(num_best, len(keys))).indices
    wanted = torch.cat((token_id.view(1), best_ids))
    precise = logits.double()
    logprobs = (precise[wanted] - precise.logsumexp(0)).float().double()
    rank = (keys > keys[token_id]).sum() + 1
    return torch.cat((rank.double().view(1), logprobs, best_ids.double()))


def packed_size(num_best: int, vocab_size: int) -> int:
    """Returns how many numbers `pack` packs."""
    return 2 + 2 * min(num_best, vocab_size)


def unpack(token_id: int, packed: Sequence[float]) -> TokenLogprobs:
    """Returns what `pack` packed, once it was read back."""
    num_best = (len(packed) - 2) // 2
    rank, logprob, *best = packed
    pairs = zip((int(best_id) for best_id in best[num_best:]), best[:num_best], strict=True)
    return TokenLogprobs(token_id, logprob, int(rank), tuple(pair for pair in pairs if pair[1] > -math.inf))


def _order_keys(logits: torch.Tensor) -> torch.Tensor:
    """Returns int64 [vocab_size], all different, that are ordered as the logits are, and among
    equals with the lowest id as the largest.

    As an integer, a float32 without its sign has the order of its value. Adding 0 makes -0 into +0.
    """
    bits = (logits + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) - torch.arange(len(logits), device=logits.device)
