"""The state of a choice: random numbers that depend on seed, choice and position alone, and counts
that only a commit changes.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_moe.engine.sampling.sampling_params import MAX_SEED, SamplingParams
from dflash_moe.engine.sampling.sampling_state import SamplingState, uniform_of

GOLDEN = ["0x1.93cc75bb5db81p-1", "0x1.b6f6a2d1b25dfp-1", "0x1.938a5f8aca3b0p-2"]


def test_the_random_numbers_are_the_documented_ones():
    packed = b"".join(number.to_bytes(8, "little") for number in (7, 2, 100))
    digest = int.from_bytes(blake2b(packed, digest_size=8, person=b"dflash sampling").digest(), "little")
    assert uniform_of(7, 2, 100) == (digest // 2**11) / 2**53
    # Kept for ever: a seed that was written down gives the same tokens in later versions.
    assert [uniform_of(*triple).hex() for triple in ((0, 0, 0), (1, 0, 0), (MAX_SEED, 63, 1 << 40))] == GOLDEN


def test_seed_choice_and_position_each_change_the_number():
    triples = [(seed, choice, position) for seed in range(8) for choice in range(8) for position in range(64)]
    numbers = [uniform_of(*triple) for triple in triples]
    assert len(set(numbers)) == len(triples)
    assert all(0.0 <= number < 1.0 for number in numbers)
    # The mean of 4,096 uniform numbers is within six standard deviations, 0.0045 each, of a half.
    assert abs(np.mean(numbers) - 0.5) < 0.027
    assert SamplingState(SamplingParams(), seed=3, choice=5).uniform(9) == uniform_of(3, 5, 9)


@pytest.mark.parametrize("changes", [{"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": 0.1}])
@settings(max_examples=30, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 300), max_size=150), steps=st.lists(st.lists(st.integers(0, 300), max_size=40), max_size=6),
    drafts=st.lists(st.integers(0, 300), max_size=5),
)  # fmt: skip
def test_counts_are_those_of_the_committed_tokens_and_the_assumed_drafts(changes, prompt, steps, drafts):
    state = SamplingState(SamplingParams(**changes), seed=0, prompt_ids=prompt)
    for tokens in steps:
        state.advance(tokens)
    for before in (drafts, [], drafts):
        ids, counts = state.counts(before)
        expected = Counter(token_id for tokens in (*steps, before) for token_id in tokens)
        wanted = set(expected) | (set(prompt) if "repetition_penalty" in changes else set())
        assert len(ids) == len(set(ids.tolist()))
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {token_id: expected[token_id] for token_id in wanted}


def test_nothing_is_counted_without_penalties():
    state = SamplingState(SamplingParams(), seed=0, prompt_ids=[1, 2])
    state.advance([3, 4])
    assert state.counts([])[0].size == 0
    assert not state.has_penalties
