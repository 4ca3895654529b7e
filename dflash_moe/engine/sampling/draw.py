"""Chooses one token from one row of logits, where the row is, on a card without reading anything
back. On the processor the core does it (csrc/compute/operators/draw.h), for whole steps in the call
that computes them.

A row is one vector of its own, so that its bits do not depend on its company. Probabilities become
integers before they are added: sums of integers are exact, whatever the order in which a device
adds them.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dflash_moe import _core
from dflash_moe.engine.sampling.sampling_params import SamplingParams

# These stand in the place of a token id where a row has none.
NOT_FINITE = -1
NOTHING_ALLOWED = -2
# The most likely token weighs 2^40, and the others in proportion. Below 2^-41 of the most likely
# one a probability is 0. Vocabularies of up to 2^22 tokens keep the sum below 2^62.
_FULL_WEIGHT = float(1 << 40)
MAX_VOCAB_SIZE = 1 << 22
# Its exponential weighs 0 too. Libraries take several times as long for -inf and for numbers that
# underflow, of which a masked row has many.
_LEAST_EXPONENT = -100.0
_NAMES = {torch.float32: "f32", torch.float64: "f64"}

# What chooses a token of a row in the processor's memory: the row, its parameters, and the random
# number in [0, 1).
RowDraw = tuple[int, SamplingParams, float]


def draw_tokens(logits: torch.Tensor, draws: Sequence[RowDraw]) -> list[int]:
    """Returns the token id of each draw from `logits` [num_rows, vocab_size], float32 or float64 on
    the processor, which is that of `draw`; NOT_FINITE where the row's largest logit is no finite
    number.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    return _core.draw_tokens(
        logits.data_ptr(), logits.stride(0) * logits.element_size(), _NAMES[logits.dtype], logits.shape[1],
        [(row, one.temperature, one.top_k, one.top_p, one.min_p, uniform) for row, one, uniform in draws],
    )  # fmt: skip


def greedy_ids(logits: torch.Tensor) -> torch.Tensor:
    """Returns the id of the largest of each row of `logits` [num_rows, vocab_size], the lowest
    among equals, as int64 [num_rows]; NOT_FINITE where the largest is no finite number.
    """
    if logits.is_cpu:
        # numpy's argmax takes 24 us for 16 rows of 32,000 in float32, and torch's 296 us, on one
        # core of an AMD EPYC (Zen 5). Both take the first among equals, and the first NaN if any.
        # Behind a forward pass the processor's caches have no code of either: gather, isfinite and
        # where of torch took 220 us there, and asking for `device` 20 us.
        values = logits.numpy()
        chosen = values.argmax(-1)
        for place, token_id in enumerate(chosen.tolist()):
            if not math.isfinite(values[place, token_id]):
                chosen[place] = NOT_FINITE
        return torch.from_numpy(chosen)
    ids = logits.argmax(-1)
    best = logits.gather(1, ids[:, None])[:, 0]
    return torch.where(best.isfinite(), ids, NOT_FINITE)


def draw(logits: torch.Tensor, params: SamplingParams, uniform: float) -> torch.Tensor:
    """Returns the id that `uniform` in [0, 1) points at, int64 []; NOTHING_ALLOWED where no logit
    is finite. `logits` are float64 [vocab_size] and may be overwritten.

    It inverts the distribution function in ascending order of ids. A token of probability 0 is
    never returned. Filters keep all tokens that are as likely as the last one they keep.
    """
    if not logits.is_cpu:
        return draw_by_torch(logits, params, uniform)
    (token_id,) = draw_tokens(logits[None], [(0, params, uniform)])
    return torch.tensor(NOTHING_ALLOWED if token_id == NOT_FINITE else token_id)


def draw_by_torch(logits: torch.Tensor, params: SamplingParams, uniform: float) -> torch.Tensor:
    """Does what `draw` does on any device, where the logits are."""
    best = logits.max()
    if 0 < params.top_k < len(logits):
        logits.masked_fill_(logits < logits.topk(params.top_k).values[-1], -torch.inf)
    logits.sub_(best)  # before the division, so that a tiny temperature overflows nothing
    likelihoods = logits.div_(params.temperature).clamp_min_(_LEAST_EXPONENT).exp_()
    if params.min_p > 0.0:
        likelihoods.mul_(likelihoods >= params.min_p)
    weights = likelihoods.mul_(_FULL_WEIGHT).round_().long()
    if params.top_p < 1.0:
        weights.mul_(weights >= _top_p_threshold(weights, params.top_p))
    ends = weights.cumsum(0)
    # `uniform` is 1 - 2^-53 at most, so that the product stays below the sum after its rounding.
    target = (ends[-1].double() * uniform).long()
    # A row without a finite logit comes here as rubbish, which only has to stay in range.
    token_id = torch.searchsorted(ends, target, right=True).clamp_max_(len(weights) - 1)
    return torch.where(best.isfinite(), token_id, NOTHING_ALLOWED)


def _top_p_threshold(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """Returns the smallest weight of the fewest tokens whose share is at least `top_p`."""
    total = weights.sum()
    return threshold_of_all(weights, torch.minimum((total.double() * top_p).ceil().long(), total))


def threshold_of_all(weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns the last of the largest `weights` that are needed to reach `target`. It sorts them
    all, because how many are needed is known only on the device.
    """
    descending = weights.sort(descending=True).values
    place = torch.searchsorted(descending.cumsum(0), target)
    return descending[place.clamp_max_(len(weights) - 1)]
