"""Which holders may share a layer, by what they say they compute on.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

from dflash_moe.errors import ConfigError
from dflash_moe.placement.numerics import check_architectures

CARDS = {"near": ("bf16-mma", "sm_80"), "far": ("bf16-mma", "sm_90"), "helper": ("f32-canonical", "avx512")}


def test_matrix_units_of_two_generations_are_refused_by_name():
    expected = r"bf16-mma on sm_80 \(worker near\) and on sm_90 \(worker far\) has not the same bits; .*--numerics close"
    with pytest.raises(ConfigError, match=expected):
        check_architectures(CARDS, "exact")


def test_close_allows_and_tells_it(caplog):
    check_architectures(CARDS, "close")
    assert "bf16-mma on sm_80 (worker near) and on sm_90 (worker far)" in caplog.text


@pytest.mark.parametrize("numerics", ["f32-canonical", "int8-groups"])
def test_classes_with_one_set_of_bits_run_on_any_architectures(numerics):
    check_architectures({"near": (numerics, "sm_80"), "far": (numerics, "gfx906"), "helper": (numerics, "avx2")}, "exact")


def test_two_cards_of_one_architecture_share_a_layer():
    check_architectures({"near": ("bf16-mma", "sm_90"), "far": ("bf16-mma", "sm_90")}, "exact")
