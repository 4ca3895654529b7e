"""How far an operator, or a chain of them, may be from a module.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import torch

from dflash_moe.operators.bounds import excess, largest_error, mutual_excess


def test_a_chains_errors_are_chance_and_another_form_is_none():
    exact = torch.randn(40, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noise = 1e-5 * exact.abs().amax(-1, keepdim=True)
    own = (exact + noise).float()
    # The same roundings in another order are off by a little more or less.
    assert excess((exact - 1.5 * noise).float(), own, exact, is_pooled=True) <= 1.0
    assert excess((exact - 3.0 * noise).float(), own, exact, is_pooled=True) > 1.0
    assert excess((exact - 1.5 * noise).float(), own, exact) > 1.0


def test_two_layers_may_each_be_as_far_off_as_the_first_of_their_kind_allows():
    exact = torch.randn(40, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noise = 1e-5 * exact.abs().amax(-1, keepdim=True)
    error = largest_error((exact + noise).float(), exact)
    assert abs(error - 1e-5) < 2e-7
    assert mutual_excess((exact - 1.9 * noise).float(), (exact + 1.9 * noise).float(), error) <= 1.0
    assert mutual_excess((exact - 2.2 * noise).float(), (exact + 2.2 * noise).float(), error) > 1.0
    for damaged in (float("nan"), float("inf")):
        wrong = (exact + noise).float()
        wrong[7, 3] = damaged
        assert mutual_excess(wrong, (exact + noise).float(), error) > 1.0
        assert mutual_excess((exact + noise).float(), wrong, error) > 1.0
