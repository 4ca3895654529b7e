"""Numerics class int8-groups through the bindings: who offers it, what it takes and rounds, how
near it is to float64.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_moe import _core, _measure
from dflash_moe.errors import UnsupportedError

CLASS = "int8-groups"
SPEC = {"in_size": 64, "intermediate_size": 1, "out_size": 1, "gate": "none", "activation": "identity"}


def oracle(isa: str, spec: dict[str, Any], weight_dtype: str = "int8_g32", numerics: str = CLASS) -> _core.FfnOracle:
    return _core.FfnOracle(spec=spec, num_experts=1, weight_dtype=weight_dtype, isa=isa, numerics=numerics)


def forward(layer: _core.FfnOracle, rows: Any) -> Any:
    count = len(rows)
    return layer.forward(
        np.asarray(rows, np.float32), np.ones(count, np.uint16), np.zeros(count, np.uint16), np.ones(count, np.float32)
    )


@pytest.mark.parametrize("isa", _core.supported_isas())
def test_every_instruction_set_and_the_reference_offer_the_class(isa: str) -> None:
    assert CLASS in _core.numerics_classes(isa)


@pytest.mark.parametrize("weight_dtype", ["f32", "f16", "bf16", "fp8_e4m3_b128"])
def test_the_class_does_not_take_floats(weight_dtype: str) -> None:
    with pytest.raises(UnsupportedError, match="int8_g32"):
        oracle("reference", {"in_size": 128, "intermediate_size": 128, "out_size": 128}, weight_dtype)


@pytest.mark.parametrize("isa", _core.supported_isas())
def test_codes_are_rounded_half_to_even_per_row_and_32_inputs(isa: str) -> None:
    layer = oracle(isa, SPEC)
    ones = np.ones((1, 64), np.float32)
    layer.load_expert(0, gate=None, up=ones, down=np.ones((1, 1), np.float32))
    # 127 makes the scale of the first group 1: 0.5 and 2.5 go to the even 0 and 2, 3.5 to 4. The
    # second group has its own.
    row = np.zeros(64, np.float32)
    row[:4], row[32:34] = (127, 0.5, 2.5, 3.5), (0.127, 0.0014)
    # The weight 1 is 127 * (1 / 127); the sum is encoded once more before down, where one value is
    # 127 times its own scale.
    expected = 127 + 0 + 2 + 4 + (127 + 1) * 0.001
    np.testing.assert_allclose(forward(layer, [row, -row, 0 * row]), [[expected], [-expected], [0]], rtol=1e-6)


@pytest.mark.parametrize("isa", _core.supported_isas())
def test_a_group_with_an_infinity_makes_its_row_nan_and_no_other(isa: str) -> None:
    layer = oracle(isa, SPEC)
    layer.load_expert(0, gate=None, up=np.ones((1, 64), np.float32), down=np.ones((1, 1), np.float32))
    rows = np.ones((6, 64), np.float32)
    rows[2, 40] = np.inf
    found = forward(layer, rows)
    assert np.isnan(found[:, 0]).tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("isa", _core.supported_isas())
def test_a_product_stays_within_half_a_step_of_each_input(isa: str) -> None:
    random = np.random.default_rng(11)
    spec = {"in_size": 512, "intermediate_size": 96, "out_size": 1, "gate": "none", "activation": "identity"}
    up = random.standard_normal((96, 512), np.float32)
    kept = np.asarray(_core.requantize("int8_g32", up)).reshape(96, 512).astype(np.float64)
    rows = random.standard_normal((8, 512), np.float32)
    steps = np.abs(rows.reshape(8, 16, 32)).max(axis=2).astype(np.float64) / 127
    exact = rows.astype(np.float64) @ kept.T
    # A code is within scale / 2, so the error within amax / 254 * sum |w| a group; float32 sums of
    # 16 groups add 2^-20 at most.
    bound = np.repeat(steps / 2, 32, axis=1) @ np.abs(kept).T + 2.0**-20 * (np.abs(rows) @ np.abs(kept).T)
    # one at a time reaches the reply: down picks it, and a row of one value is exact to 2^-23
    for output in range(0, 96, 19):
        layer = oracle(isa, spec)
        down = np.zeros((1, 96), np.float32)
        down[0, output] = 1
        only = np.zeros_like(up)
        only[output] = up[output]
        layer.load_expert(0, gate=None, up=only, down=down)
        error = np.abs(forward(layer, rows)[:, 0] - exact[:, output])
        assert (error <= bound[:, output] + 2.0**-20 * np.abs(exact[:, output])).all()
        assert error.max() > 0.001 * bound[:, output].max()  # inputs were rounded indeed


@pytest.mark.parametrize("isa", [isa for isa in _core.supported_isas() if isa.startswith("avx")])
def test_the_integer_peak_is_measured(isa: str) -> None:
    samples = _measure.integer_multiply_add_per_s(isa, 1, 3, 0.5)
    assert len(samples) == 3
    assert min(samples) > 0


def test_a_set_without_an_integer_loop_says_so() -> None:
    with pytest.raises(UnsupportedError, match="'scalar' has no integer multiply-add"):
        _measure.integer_multiply_add_per_s("scalar", 1, 3)
