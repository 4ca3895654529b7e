"""How far an operator, or a chain of them, may be from a module.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import torch

from dflash_moe.operators.bounds import excess


def test_a_chains_errors_are_chance_and_another_form_is_none():
    exact = torch.randn(40, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noise = 1e-5 * exact.abs().amax(-1, keepdim=True)
    own = (exact + noise).float()
    # The same roundings in another order are off by a little more or less.
    assert excess((exact - 1.5 * noise).float(), own, exact, is_pooled=True) <= 1.0
    assert excess((exact - 3.0 * noise).float(), own, exact, is_pooled=True) > 1.0
    assert excess((exact - 1.5 * noise).float(), own, exact) > 1.0
