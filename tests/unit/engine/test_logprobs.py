"""Log-probabilities: against a float64 twin, ranks and alternatives among equals.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dflash_moe.engine.sampling.logprobs import pack, packed_size, unpack
from dflash_moe.engine.sampling.token_logprobs import TokenLogprobs


def logprobs_of(logits: torch.Tensor, token_id: int, num_best: int) -> TokenLogprobs:
    packed = pack(logits, torch.tensor(token_id), num_best)
    assert len(packed) == packed_size(num_best, len(logits))
    return unpack(token_id, packed.tolist())


@pytest.mark.parametrize("width", [3, 101, 32003])
@pytest.mark.parametrize("is_coarse", [False, True])
def test_they_are_the_log_softmax_of_the_logits_with_the_lowest_id_first_among_equals(width, is_coarse):
    logits = torch.randn(width, generator=torch.Generator().manual_seed(width)) * 4
    if is_coarse:
        logits = logits.round()
    wide = logits.double().numpy()
    expected = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
    order = sorted(range(width), key=lambda token_id: (-wide[token_id], token_id))
    for token_id in (order[0], order[1], order[-1], 0, width - 1):
        found = logprobs_of(logits, token_id, 20)
        assert (found.token_id, found.rank) == (token_id, order.index(token_id) + 1)
        assert [best_id for best_id, _ in found.best] == order[:20]
        # The twin's logarithm of the sum may differ in its last bits, float32 rounds once after.
        wanted = np.array([expected[token_id], *expected[order[:20]]])
        assert (
            np.abs(np.array([found.logprob, *(logprob for _, logprob in found.best)]) - wanted).max()
            <= 1e-6 * abs(wanted).max()
        )
        assert found.logprob == np.float32(found.logprob)


def test_equal_and_negative_zeros_are_ranked_by_id():
    logits = torch.tensor([-1.0, 0.0, -0.0, 0.0, -0.0])
    assert [logprobs_of(logits, token_id, 0).rank for token_id in range(5)] == [5, 1, 2, 3, 4]
    assert [best_id for best_id, _ in logprobs_of(logits, 0, 3).best] == [1, 2, 3]


def test_tokens_of_probability_0_are_no_alternatives():
    found = logprobs_of(torch.tensor([-math.inf, 2.0, -math.inf, 3e38]), 3, 4)
    assert found.best == ((3, 0.0), (1, -np.float32(3e38)))
    assert (found.logprob, found.rank) == (0.0, 1)
    assert logprobs_of(torch.tensor([1.0, 1.0]), 1, 0) == TokenLogprobs(1, float(np.float32(math.log(0.5))), 2, ())
