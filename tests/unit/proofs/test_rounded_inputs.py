"""Rounding of inputs as the classes define it, and only of the inputs of matrix products.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dflash_moe.proofs.rounded_inputs import (  # noqa: E402
    inputs_rounded,
    rounds_below,
    to_bf16,
    to_f16_groups,
    to_int8_groups,
)


def test_bf16_keeps_eight_bits_of_each_input():
    rows = torch.tensor([[1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-9 + 2**-20]], dtype=torch.float64)
    assert to_bf16(rows).tolist() == [[1.0, 1.0, 1.0 + 2**-6, 1.0]]  # ties to even


@pytest.mark.parametrize("width", [1, 31, 32, 33, 100])
def test_int8_steps_are_those_of_the_group_and_the_largest_is_exact(width):
    rows = torch.randn(3, width, dtype=torch.float64, generator=torch.Generator().manual_seed(width)).float().double()
    rounded = to_int8_groups(rows)
    assert rounded.shape == rows.shape
    for start in range(0, width, 32):
        group, found = rows[:, start : start + 32], rounded[:, start : start + 32]
        steps = group.abs().amax(1, keepdim=True) / 127
        assert bool(((found - group).abs() <= steps * 0.500001).all())
        assert torch.allclose(found / steps, (found / steps).round(), atol=1e-4)


def test_a_group_of_zeros_stays_and_its_neighbours_scale_is_not_its_own():
    rows = torch.zeros(1, 64, dtype=torch.float64)
    rows[0, 40] = 127.0
    rows[0, 41] = 0.4
    assert to_int8_groups(rows)[0, [0, 40, 41]].tolist() == [0.0, 127.0, 0.0]


def test_f16_keeps_eleven_bits_of_each_input_whatever_its_size_and_less_only_far_below_the_groups_largest():
    rows = torch.zeros(1, 64, dtype=torch.float64)
    rows[0, 0] = 2.0**100 * (1 + 2**-10 + 2**-11)  # a tie: to even
    rows[0, 1] = 2.0**73 * (1 + 2**-7)
    # 2^-39 of the largest: nothing is left below f16's least subnormal
    rows[0, 2] = 2.0**61 * (1 + 2**-7)
    rows[0, 3] = 2.0**50
    rows[0, 32:] = 2.0**-120
    assert to_f16_groups(rows)[0, :4].tolist() == [2.0**100 * (1 + 2**-9), rows[0, 1], 2.0**62, 0.0]
    assert torch.equal(to_f16_groups(rows)[0, 32:], rows[0, 32:])
    assert to_f16_groups(torch.randn(3, 45)).shape == (3, 45)


def test_f16_rounds_weights_of_f32_alone():
    inputs = torch.tensor([[1.0]], dtype=torch.float64)
    weight = torch.tensor([[2.0**-30 * (1 + 2**-12)]], dtype=torch.float64)
    for formats, expected in (("f32", "f32"), 2.0**-30), (("bf16", "bf16"), float(weight)), (("q8_0", "q4_k"), float(weight)):
        with inputs_rounded("f16-dot2", formats):
            assert float(torch.nn.functional.linear(inputs, weight)) == expected


@pytest.mark.parametrize("product", ["linear", "matmul", "operator"])
def test_the_first_factor_of_every_product_is_rounded_and_nothing_else(product):
    inputs = torch.tensor([[1.0 + 2**-9]], dtype=torch.float64)
    weight = torch.tensor([[1.0 + 2**-30]], dtype=torch.float64)
    with inputs_rounded("bf16-dot"):
        made = {
            "linear": lambda: torch.nn.functional.linear(inputs, weight),
            "matmul": lambda: torch.matmul(inputs, weight),
            "operator": lambda: inputs @ weight,
        }[product]()
        assert float(inputs + 0) == 1.0 + 2**-9
    assert float(made) == float(weight)
    assert float(torch.matmul(inputs, weight)) != float(weight)


def test_classes_of_matrix_units_round_the_weights_too():
    inputs = torch.tensor([[1.0]], dtype=torch.float64)
    weight = torch.tensor([[1.0 + 2**-9]], dtype=torch.float64)
    for numerics in ("bf16-mma", "bf16-mfma", "bf16-wmma"):
        with inputs_rounded(numerics):
            assert float(torch.nn.functional.linear(inputs, weight)) == 1.0


def test_only_the_model_itself_can_make_a_class_no_coarser():
    found = {(numerics, dtype) for numerics in ("f32-canonical", "bf16-dot", "bf16-bfdot", "int8-groups", "f16-dot2")
             for dtype in ("f32", "f16", "bf16") if rounds_below(numerics, dtype)}  # fmt: skip
    assert found == {
        *((numerics, dtype) for numerics in ("bf16-dot", "bf16-bfdot") for dtype in ("f32", "f16")),
        *(("int8-groups", dtype) for dtype in ("f32", "f16", "bf16")),
        ("f16-dot2", "f32"),
    }
