"""Every family with the settings of its own configuration that a proof of a layer is most likely to
overlook, past every position where they change something: logits are eager's, whoever computes.

The usual setting and two odd ones of each family; `make verify-all` takes all. They are the same
each time.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from bench.models.families import REQUIRED, families_on_interface
from bench.models.family_sweep import sweep, try_setting
from bench.models.odd_settings import OddSetting, most_dangerous

pytestmark = [pytest.mark.transformers, pytest.mark.timeout(600)]

NUM_ODD = 2


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.long
@pytest.mark.parametrize("arch", families_on_interface())
def test_a_family_is_right_with_its_most_dangerous_settings(arch):
    outcomes = list(sweep(arch, partial(most_dangerous, count=NUM_ODD)))
    for outcome in outcomes:
        print(f"{arch}: {outcome}")
    assert not [outcome for outcome in outcomes if outcome.is_wrong]
    if arch in REQUIRED:
        assert outcomes[0].taken == "layers"
    if all(outcome.refused_by for outcome in outcomes):
        pytest.skip(outcomes[0].reason[:100])


@pytest.mark.parametrize(
    ("arch", "fields"),
    [
        # A window that attention is not told of.
        ("phimoe", {"sliding_window": 21}),
        ("qwen2_moe", {"use_sliding_window": True}),
        # Scores that are one function for one expert.
        ("mixtral", {"num_experts_per_tok": 1}),
        # A second rotary module, which no text reaches.
        ("qwen3_vl_moe", {}),
    ],
)
def test_layers_are_taken_over_whole_and_right(arch, fields):
    outcome = try_setting(arch, OddSetting("", fields), [])
    assert outcome is not None
    assert not outcome.is_wrong, outcome
    assert outcome.taken == "layers", outcome
