"""This processor's class of bf16 dot products: who offers it, what it rounds, and that kernels have
the reference's bits.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_moe import _core, _measure
from dflash_moe.errors import UnsupportedError
from dflash_moe.topology.numerics import class_on

CLASS = class_on("bf16", "cpu")
ISA = {"bf16-dot": "avx512bf16", "bf16-bfdot": "neon_bf16"}[CLASS]
needs_instruction = pytest.mark.skipif(ISA not in _core.supported_isas(), reason=f"this processor lacks {ISA}")


def oracle(isa: str, spec: dict[str, Any], weight_dtype: str = "bf16", num_threads: int = 1) -> _core.FfnOracle:
    return _core.FfnOracle(
        spec=spec, num_experts=1, weight_dtype=weight_dtype, isa=isa, num_threads=num_threads, numerics=CLASS
    )


def forward(layer: _core.FfnOracle, rows: Any) -> Any:
    count = len(rows)
    return layer.forward(
        np.asarray(rows, np.float32), np.ones(count, np.uint16), np.zeros(count, np.uint16), np.ones(count, np.float32)
    )


@pytest.mark.parametrize("isa", _core.supported_isas())
def test_only_sets_with_the_instruction_and_the_reference_offer_the_class(isa: str) -> None:
    offers = isa in ("reference", ISA)
    assert (CLASS in _core.numerics_classes(isa)) is offers
    spec = {"in_size": 4, "intermediate_size": 4, "out_size": 4}
    if offers:
        oracle(isa, spec)
    else:
        with pytest.raises(UnsupportedError, match=f"'{isa}' does not compute numerics class {CLASS}"):
            oracle(isa, spec)


@pytest.mark.parametrize("weight_dtype", ["f32", "f16", "q8_0"])
def test_the_class_takes_bf16_weights_only(weight_dtype: str) -> None:
    with pytest.raises(UnsupportedError, match="bf16"):
        oracle("reference", {"in_size": 32, "intermediate_size": 32, "out_size": 32}, weight_dtype)


@pytest.mark.parametrize("isa", ["reference", pytest.param(ISA, marks=needs_instruction)])
def test_rows_and_intermediate_rows_are_rounded_to_bf16(isa: str) -> None:
    spec = {"in_size": 3, "intermediate_size": 1, "out_size": 1, "gate": "none", "activation": "identity"}
    layer = oracle(isa, spec)
    layer.load_expert(0, gate=None, up=np.array([[1, 1, 2]], np.float32), down=np.array([[1]], np.float32))
    # 257 has nine significant bits: to 256 (even). The sum 256 + 2 + 2 * 0.5 = 259 has nine too: to
    # 260 (even).
    np.testing.assert_array_equal(forward(layer, [[257, 2, 0.5], [1, 2, 3]]), [[260], [9]])


@needs_instruction
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("shape", [(48, 40, 56), (33, 65, 31), (513, 70, 129)])
def test_kernels_have_the_references_bits(shape: tuple[int, int, int], num_threads: int) -> None:
    random = np.random.default_rng(sum(shape))
    spec = {"in_size": shape[0], "intermediate_size": shape[1], "out_size": shape[2]}
    gate, up = (random.standard_normal((shape[1], shape[0]), np.float32) / 8 for _ in range(2))
    down = random.standard_normal((shape[2], shape[1]), np.float32) / 8
    layers = [oracle("reference", spec), oracle(ISA, spec, num_threads=num_threads)]
    for layer in layers:
        layer.load_expert(0, gate=gate, up=up, down=down)
    for count in (1, 3, 30):
        rows = random.standard_normal((count, shape[0]), np.float32)
        expected, found = (forward(layer, rows) for layer in layers)
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@needs_instruction
def test_the_peak_of_the_instruction_is_measured_where_there_is_one() -> None:
    samples = _measure.bf16_multiply_add_per_s(ISA, 1, 3, 0.5)
    assert len(samples) == 3
    assert min(samples) > 0
    with pytest.raises(UnsupportedError, match="'scalar' has no bf16 multiply-add"):
        _measure.bf16_multiply_add_per_s("scalar", 1, 3)
