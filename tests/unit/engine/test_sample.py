"""The sampler of a step: against a plain twin, bits that do not depend on company, speculation,
errors of single rows, and how little is read back.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from dflash_moe.engine.sampling.sample import Sampler, SampleRow
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.engine.sampling.sampling_state import SamplingState, uniform_of
from dflash_moe.engine.sampling.token_masks import packed
from dflash_moe.errors import ConfigError, DflashError, EngineError

PROMPT, OUTPUTS = [3, 3, 8, 90], [5, 8, 5, 5]
# What a request can ask for, each with and without temperature where that is possible.
KINDS = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "top_p": SamplingParams(top_p=0.9),
    "top_k": SamplingParams(top_k=20, temperature=1.3),
    "min_p": SamplingParams(min_p=0.02),
    "all filters": SamplingParams(min_p=0.01, top_k=50, top_p=0.95, temperature=0.9),
    "penalties": SamplingParams(repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=-0.4),
    "greedy penalties": SamplingParams(temperature=0, repetition_penalty=0.6, presence_penalty=-1, frequency_penalty=1),
    "bias": SamplingParams(logit_bias={0: 2.5, 77: -3, 100: 4}),
    "logprobs": SamplingParams(logprobs=5),
    "greedy logprobs": SamplingParams(temperature=0, logprobs=20),
}


def state_of(params: SamplingParams, seed: int = 11, choice: int = 0) -> SamplingState:
    state = SamplingState(params, seed=seed, choice=choice, prompt_ids=PROMPT)
    state.advance(OUTPUTS)
    return state


def logits_of(num_rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)) * 3


def mask_of(width: int, seed: int = 0) -> bytes:
    return packed(torch.rand(width, generator=torch.Generator().manual_seed(seed)) < 0.5)


def twin(logits: torch.Tensor, row: SampleRow) -> np.ndarray:
    """Penalties, bias and mask as plain loops over float64 [vocab_size]."""
    values, params = logits.double().numpy().copy(), row.state.params
    outputs = Counter([*OUTPUTS, *row.tokens_before])
    for token_id in {*PROMPT, *outputs}:
        factor = params.repetition_penalty
        values[token_id] = values[token_id] / factor if values[token_id] > 0 else values[token_id] * factor
    for token_id, count in outputs.items():
        values[token_id] -= count * params.frequency_penalty + params.presence_penalty
    for token_id, bias in params.logit_bias.items():
        values[token_id] += bias
    if row.mask is not None:
        bits = [byte >> place & 1 for byte in row.mask for place in range(8)]
        values[[token_id for token_id in range(len(values)) if not bits[token_id]]] = -np.inf
    return values


@pytest.mark.parametrize("kind", ["greedy", "greedy penalties", "temperature", "penalties", "bias"])
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("drafts", [(), (5, 60, 60, 61)])
def test_penalties_bias_and_masks_are_those_of_the_twin(kind, is_masked, drafts):
    width, params = 101, KINDS[kind]
    logits = logits_of(40, width, seed=3)
    mask = mask_of(width) if is_masked else None
    rows = [SampleRow(state_of(params), position, drafts, mask) for position in range(40)]
    for token_id, row, raw in zip(Sampler().launch(logits, rows).token_ids(), rows, logits, strict=True):
        values = twin(raw, row)
        if params.temperature == 0:
            assert token_id == int(np.argmax(values))
            continue
        likely = np.exp((values - values.max()) / params.temperature)
        ends = np.cumsum(likely) / likely.sum()
        assert likely[token_id] > 0
        uniform = uniform_of(11, 0, row.position)
        assert (ends[token_id - 1] if token_id else 0) - 1e-9 <= uniform <= ends[token_id] + 1e-9


@pytest.mark.parametrize("width", [101, 32003])
@pytest.mark.parametrize("is_masked", [False, True])
def test_a_row_is_the_same_alone_and_in_any_company(width, is_masked):
    logits = logits_of(len(KINDS), width)
    masks = [mask_of(width, seed) if is_masked else None for seed in range(len(KINDS))]
    rows = [SampleRow(state_of(params), 40 + place, (), masks[place]) for place, params in enumerate(KINDS.values())]
    alone = []
    for place, row in enumerate(rows):
        sampled = Sampler().launch(logits[place : place + 1].clone(), [row])
        alone.append((sampled.token_ids()[0], sampled.logprobs.get(0)))
    for order in (range(len(rows)), reversed(range(len(rows))), (5, 0, 9, 3), (4, 10), (0, 7, 1, 1, 1)):
        places = list(order)
        sampled = Sampler().launch(logits[places], [rows[place] for place in places])
        found = [(token_id, sampled.logprobs.get(at)) for at, token_id in enumerate(sampled.token_ids())]
        assert found == [alone[place] for place in places]


@pytest.mark.parametrize("kind", KINDS)
def test_launching_changes_neither_logits_nor_state(kind):
    logits = logits_of(2, 101)
    kept = logits.clone()
    rows = [SampleRow(state_of(KINDS[kind]), 9, (7, 7)), SampleRow(state_of(KINDS[kind]), 10, (), mask_of(101))]
    counts = [[array.tolist() for array in row.state.counts(())] for row in rows]
    first = Sampler().launch(logits, rows).token_ids()
    assert Sampler().launch(logits, rows).token_ids() == first
    assert torch.equal(logits, kept)
    assert [[array.tolist() for array in row.state.counts(())] for row in rows] == counts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [101, 32003])
def test_tokens_are_the_same_one_by_one_and_as_rows_of_one_step(kind, width):
    logits = logits_of(6, width, seed=5)
    state, one_by_one = state_of(KINDS[kind]), []
    for place in range(6):
        one_by_one += Sampler().launch(logits[place : place + 1], [SampleRow(state, 30 + place)]).token_ids()
        state.advance(one_by_one[-1:])
    speculating = state_of(KINDS[kind])
    rows = [SampleRow(speculating, 30 + place, one_by_one[:place]) for place in range(6)]
    assert Sampler().launch(logits, rows).token_ids() == one_by_one


def test_seed_choice_and_position_decide_and_equal_ones_repeat():
    logits = torch.zeros(1, 32003)
    seen = {}
    for triple in [(seed, choice, position) for seed in (1, 2) for choice in (0, 1) for position in (5, 6)] * 2:
        row = SampleRow(SamplingState(SamplingParams(), seed=triple[0], choice=triple[1]), triple[2])
        token_id = Sampler().launch(logits, [row]).token_ids()[0]
        assert seen.setdefault(triple, token_id) == token_id
    assert len(set(seen.values())) == 8


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=2),
        SamplingParams(top_k=5, temperature=0.7),
        SamplingParams(top_p=0.8),
    ],
)
def test_frequencies_are_the_probabilities(params):
    num_draws, logits = 3000, torch.tensor([0.1, 1.0, -1.0, 2.0, 0.0, -2.0, 0.9, 1.5])
    state = SamplingState(params, seed=2024)
    rows = [SampleRow(state, position) for position in range(num_draws)]
    found = np.bincount(Sampler().launch(logits.expand(num_draws, 8), rows).token_ids(), minlength=8)
    likely = np.exp(logits.double().numpy() / params.temperature)
    num_kept = {5: 5}.get(params.top_k, 8)
    if params.top_p < 1:  # 0.36, 0.22, 0.13, 0.12 and 0.05 of all tokens: the first four reach 0.8
        num_kept = 4
    likely[np.argsort(likely)[: 8 - num_kept]] = 0
    expected = likely / likely.sum() * num_draws
    assert found[expected == 0].sum() == 0
    kept = expected > 0
    statistic = (((found - expected) ** 2)[kept] / expected[kept]).sum()
    # The chance of more than 40 with 7 degrees of freedom is 1e-6; the seed is fixed.
    assert statistic < 40


def test_a_row_that_is_wrong_ends_alone_with_a_typed_error():
    width = 101
    logits = logits_of(9, width)
    logits[1, 50], logits[2] = math.nan, -math.inf
    logits[3, 7], logits[4, 99] = math.inf, math.nan
    sampling, greedy = state_of(KINDS["top_p"]), state_of(KINDS["greedy logprobs"])
    nothing, wrong = packed(torch.zeros(width, dtype=torch.bool)), bytes(width)
    bias = SamplingState(SamplingParams(logit_bias={width: 1.0}), seed=0)
    prompt = SamplingState(SamplingParams(repetition_penalty=2), seed=0, prompt_ids=[width])
    rows = [
        SampleRow(greedy, 1), SampleRow(greedy, 2), SampleRow(sampling, 3), SampleRow(sampling, 4), SampleRow(greedy, 5),
        SampleRow(greedy, 6, (), nothing), SampleRow(sampling, 7, (), nothing), SampleRow(sampling, 8, (), wrong),
        SampleRow(bias, 9),
    ]  # fmt: skip
    sampled = Sampler().launch(logits, rows)
    texts = {place: (type(error), str(error)) for place, error in sampled.errors.items()}
    assert set(texts) == set(range(1, 9))
    for place in (1, 2, 3, 4):
        assert texts[place] == (DflashError, texts[1][1])
        assert "no finite largest logit" in texts[place][1]
    for place in (5, 6):
        assert texts[place][0] is ConfigError
        assert "the token mask allows no token" in texts[place][1]
    assert texts[7] == (ConfigError, "a token mask has 101 bytes; allowed: 13, for 101 tokens")
    assert texts[8] == (ConfigError, "logit_bias has the token id 101; allowed: 0..100")
    assert all(token_id < 0 for token_id in sampled.token_ids()[1:])
    assert sampled.token_ids()[0] == int(logits[0].argmax())
    assert set(sampled.logprobs) == {0}
    error = Sampler().launch(logits[:1], [SampleRow(prompt, 0)]).errors[0]
    assert str(error) == "the prompt or an output has the token id 101; allowed: 0..100"


@pytest.mark.parametrize(("logits", "expected"), [((0.5, 0.4), 1), ((0.5, 0.2), 0), ((-0.5, -0.6), 1), ((-0.5, -1.1), 0)])
def test_a_repetition_penalty_makes_positive_and_negative_logits_smaller(logits, expected):
    state = SamplingState(SamplingParams(temperature=0, repetition_penalty=2), seed=0, prompt_ids=[0])
    assert Sampler().launch(torch.tensor([logits]), [SampleRow(state, 1)]).token_ids() == [expected]


def test_penalties_and_biases_of_the_largest_logits_do_not_overflow():
    logits = torch.tensor([[3e38, -3e38, 1.0]])
    state = SamplingState(SamplingParams(temperature=0, repetition_penalty=0.1, logit_bias={0: 100}), seed=0, prompt_ids=[0, 1])
    assert Sampler().launch(logits, [SampleRow(state, 0)]).token_ids() == [0]


def test_only_ids_are_read_back_unless_a_row_asks_for_logprobs():
    sampler, logits = Sampler(), logits_of(3, 32003)
    sampled = sampler.launch(logits, [SampleRow(state_of(KINDS[kind]), 0) for kind in ("greedy", "top_p", "bias")])
    assert sampler.read_back_bytes == 0
    assert (len(sampled.token_ids()), sampled.logprobs, sampled.errors) == (3, {}, {})
    sampled.token_ids()
    assert sampler.read_back_bytes == 3 * 8
    sampler.launch(logits[:2], [SampleRow(state_of(KINDS[kind]), 0) for kind in ("logprobs", "greedy")]).token_ids()
    assert sampler.read_back_bytes == 3 * 8 + 2 * 8 + (2 + 2 * 5) * 8


def test_logits_that_do_not_fit_the_rows_are_a_defect_of_the_engine():
    row = SampleRow(state_of(KINDS["greedy"]), 0)
    for logits in (torch.zeros(2, 5), torch.zeros(5), torch.zeros(1, 5, dtype=torch.bfloat16), torch.zeros(1, 0)):
        with pytest.raises(EngineError, match=r"the sampler was given"):
            Sampler().launch(logits, [row])
    assert Sampler().launch(torch.zeros(0, 5), []).token_ids() == []


def test_logits_of_a_slice_and_with_a_gradient_are_read_as_they_are():
    logits = logits_of(2, 202)[:, ::2].requires_grad_()
    rows = [SampleRow(state_of(KINDS[kind]), 4) for kind in ("greedy", "logprobs")]
    straight = Sampler().launch(logits.detach().clone().contiguous(), rows)
    sliced = Sampler().launch(logits, rows)
    assert (sliced.token_ids(), sliced.logprobs) == (straight.token_ids(), straight.logprobs)
