"""One token from one row: the drawn distribution against a plain float64 twin, ties, thresholds and
extreme values.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dflash_moe import _core
from dflash_moe.engine.sampling.draw import (
    NOT_FINITE,
    NOTHING_ALLOWED,
    draw,
    draw_by_torch,
    draw_tokens,
    greedy_ids,
    threshold_of_all,
)
from dflash_moe.engine.sampling.sampling_params import SamplingParams

LARGEST_UNIFORM = 1.0 - 2.0**-53
# Weights are rounded to 2^-41 of the largest one, which for 64 tokens is below this in the sum.
ROUNDING = 1e-9


def probabilities_of(logits: list[float], params: SamplingParams) -> np.ndarray:
    """The twin: float64 [vocab_size], token by token. Skips examples whose filters hang on a
    rounding.
    """
    exponents = [(logit - max(logits)) / params.temperature for logit in logits]
    likely = np.array([math.exp(exponent) for exponent in exponents])
    assume(params.min_p == 0 or min(abs(likely - params.min_p)) > ROUNDING)
    likely[likely < params.min_p] = 0.0
    if 0 < params.top_k < len(logits):
        likely[np.array(logits) < sorted(logits, reverse=True)[params.top_k - 1]] = 0.0
    likely /= likely.sum()
    descending = sorted(likely, reverse=True)
    shares = np.cumsum(descending)
    if params.top_p < 1:
        assume(min(abs(shares - params.top_p)) > ROUNDING)
        kept = sum(share < params.top_p for share in shares) + 1
        likely[likely < descending[kept - 1]] = 0.0
    return likely / likely.sum()


def chosen(logits: torch.Tensor) -> list[int]:
    """The most likely token of each row by the core."""
    fields = [(row, 0.0, 3, 0.5, 0.5, 0.9) for row in range(len(logits))]
    return _core.draw_tokens(logits.data_ptr(), 4 * logits.shape[1], "f32", logits.shape[1], fields)


def drawn(logits: list[float], params: SamplingParams, uniform: float) -> int:
    """The token by the core, which is that of torch's operators on cards."""
    values = torch.tensor(logits, dtype=torch.float64)
    (token_id,) = draw_tokens(values[None], [(0, params, uniform)])
    token_id = NOTHING_ALLOWED if token_id == NOT_FINITE else token_id
    assert int(draw(values.clone(), params, uniform)) == token_id
    assert int(draw_by_torch(values, params, uniform)) == token_id
    return token_id


# Different logits differ by 0.01 at least, so that rounding makes no ties that the twin lacks.
logits_lists = st.lists(st.integers(-2000, 2000).map(lambda hundredths: hundredths / 100), min_size=1, max_size=64)
# Equal values are frequent here.
tied_lists = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=64)
filters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_p=st.sampled_from([1.0, 0.95, 0.51, 0.1]),
    top_k=st.sampled_from([0, 1, 2, 7, 64]),
    min_p=st.sampled_from([0.0, 0.011, 0.31]),
)


@settings(max_examples=300, deadline=None)
@given(logits=logits_lists | tied_lists, params=filters, uniform=st.floats(0, LARGEST_UNIFORM))
def test_the_drawn_token_is_that_of_the_twins_distribution_function(logits, params, uniform):
    probabilities = probabilities_of(logits, params)
    ends = np.concatenate(([0.0], np.cumsum(probabilities)))
    token_id = drawn(logits, params, uniform)
    assert probabilities[token_id] > 0
    assert ends[token_id] - ROUNDING <= uniform <= ends[token_id + 1] + ROUNDING


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), [1, 3, 4]),  # three tokens are as likely as the second
        (SamplingParams(top_k=1), [1]),
        (SamplingParams(top_p=0.5), [1]),
        (SamplingParams(top_p=0.6), [1, 3, 4]),
        (SamplingParams(min_p=0.3214), [1, 3, 4]),  # 0.18 / 0.56 is 0.32143
        (SamplingParams(min_p=0.3215), [1]),
        (SamplingParams(min_p=0.05), [0, 1, 3, 4]),
        (SamplingParams(top_k=4, top_p=1e-9), [1]),
        (SamplingParams(), [0, 1, 2, 3, 4]),
    ],
)
def test_filters_keep_all_tokens_that_equal_the_last_one_they_keep(params, kept):
    logits = [math.log(weight) for weight in (0.06, 0.56, 0.02, 0.18, 0.18)]
    assert sorted({drawn(logits, params, place / 200) for place in range(200)}) == kept


def test_filters_see_the_smallest_differences():
    # Less the largest, the last two logits are equal.
    hot = SamplingParams(top_k=2, temperature=1e4)
    assert {drawn([20.0, 0.0, 1e-30], hot, place / 10) for place in range(10)} == {0, 2}
    # The first token's share is 2/3, which misses top_p by half a unit of the weights.
    params = SamplingParams(top_p=(2.0**40 + 0.5) / (1.5 * 2.0**40))
    assert {drawn([0.0, math.log(0.5)], params, place / 10) for place in range(10)} == {0, 1}


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 0.01])
def test_a_tiny_temperature_takes_the_largest_and_shares_between_equals(temperature):
    params = SamplingParams(temperature=temperature)
    assert {drawn([0.0, 5.0, -3e38, 5.0, 4.0], params, place / 10) for place in range(10)} == {1, 3}


def test_a_huge_temperature_makes_all_that_is_possible_equally_likely():
    params = SamplingParams(temperature=1e4)
    logits = [1.0, -math.inf, 3.0, -math.inf]
    assert [drawn(logits, params, uniform) for uniform in (0.0, 0.49, 0.51, LARGEST_UNIFORM)] == [0, 0, 2, 2]


def test_the_last_number_below_one_never_draws_a_token_of_probability_0():
    for tail in (-math.inf, -60.0, -1e30):
        assert drawn([-math.inf, 1.0, 0.0] + [tail] * 9, SamplingParams(), LARGEST_UNIFORM) == 2
        assert drawn([tail] * 9 + [1.0], SamplingParams(), 0.0) == 9
    # Their sum is odd and above 2^53, so that float64 rounds it.
    assert drawn([0.0] * 20000 + [-40 * math.log(2), -math.inf], SamplingParams(), LARGEST_UNIFORM) in (19999, 20000)
    assert drawn([3.0], SamplingParams(top_p=0.5, top_k=1, min_p=0.5), LARGEST_UNIFORM) == 0


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=2, min_p=0.1)])
def test_a_row_without_a_finite_logit_gives_the_code(params):
    for value in (-math.inf, math.inf, math.nan):
        assert drawn([value] * 5, params, 0.5) == NOTHING_ALLOWED
    assert drawn([1.0, math.nan, 2.0], params, 0.5) == NOTHING_ALLOWED


@pytest.mark.parametrize("width", [1, 7, 101, 32003])
def test_the_largest_wins_and_the_lowest_id_among_equals(width):
    generator = torch.Generator().manual_seed(width)
    logits = torch.randint(-50, 50, (9, width), generator=generator).float()
    logits[0] = 0.0
    logits[1] = -0.0
    logits[1, width // 2] = 0.0  # equals -0
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert greedy_ids(logits).tolist() == expected
    assert [int(greedy_ids(row[None])) for row in logits] == expected
    assert chosen(logits) == expected


def test_only_rows_whose_largest_is_not_finite_have_no_greedy_token():
    logits = torch.zeros(5, 101)
    logits[0, 7], logits[1, 50], logits[3, :100] = math.nan, math.inf, -math.inf
    logits[4] = -math.inf
    assert greedy_ids(logits).tolist() == [NOT_FINITE, NOT_FINITE, 0, 100, NOT_FINITE]
    assert chosen(logits) == greedy_ids(logits).tolist()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    width=st.sampled_from([1, 5, 1025, 5000]),
    spread=st.sampled_from([1, 3, 40]),
    share=st.floats(0, 1),
)
def test_the_threshold_is_the_last_weight_that_reaches_the_share(seed, width, spread, share):
    generator = np.random.default_rng(seed)
    weights = np.exp2(generator.normal(0, spread, width).clip(-40, 40)).round().astype(np.int64)
    weights[generator.integers(width)] += 1
    total = int(weights.sum())
    target = max(1, min(total, math.ceil(total * share)))
    expected = next(weight for weight, end in zip(*_descending(weights), strict=True) if end >= target)
    assert int(threshold_of_all(torch.from_numpy(weights), torch.tensor(target))) == expected


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    width=st.sampled_from([1, 15, 31, 32, 33, 1000, 32003]),
    spread=st.sampled_from([0.01, 1.0, 3.0, 30.0]),
    # Coarse logits have many equals.
    grain=st.sampled_from([0.0, 0.5]),
    top_k=st.sampled_from([0, 1, 2, 40, 499, 600]),
    params=filters,
    uniform=st.floats(0, LARGEST_UNIFORM),
)
def test_the_core_draws_the_tokens_of_torch_from_whole_rows(seed, width, spread, grain, top_k, params, uniform):
    """Rows of several blocks, of which some have no likely token."""
    params = dataclasses.replace(params, top_k=top_k)
    logits = spread * torch.randn(3, width + 2, generator=torch.Generator().manual_seed(seed))
    logits = ((logits / grain).round() * grain if grain else logits)[:, 1:-1]  # rows lie apart
    expected = [int(draw_by_torch(row.double(), params, uniform)) for row in logits]
    assert draw_tokens(logits, [(row, params, uniform) for row in range(3)]) == expected
    assert [int(draw(row.double(), params, uniform)) for row in logits] == expected


def _descending(weights: np.ndarray) -> tuple[list[int], list[int]]:
    ordered = sorted(weights.tolist(), reverse=True)
    return ordered, np.cumsum(ordered).tolist()
