"""The self-test of `doctor --selftest` compares every kernel set and numerics class of this CPU
with the reference, bit for bit. The data are random and seeded.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_moe import _core
from dflash_moe.config import DTYPES
from dflash_moe.topology.numerics import DEFAULT_NUMERICS, takes_weights

Case = tuple[str, str, str]
REFERENCE = "reference"
# These formats are made from floats.
WEIGHTS = (*DTYPES, "int8_g32", "int4_g32")
NUM_EXPERTS = 5
# This is no multiple of any vector width or tile, so that every kernel has a remainder.
NUM_ROWS = 37
TOP_K = 3
# These widths are above one K block of 256, and no multiples of 16.
SIZES = {"in_size": 300, "intermediate_size": 267, "out_size": 291}
SPECS: dict[str, dict[str, Any]] = {
    "silu": {"activation": "silu", "gate": "gated"},
    "gelu_tanh": {"activation": "gelu_tanh", "gate": "gated"},
    "relu_squared": {"activation": "relu_squared", "gate": "none"},
    "clamped_swiglu": {
        "gate": "clamped_swiglu", "alpha": 1.702, "up_offset": 1.0, "gate_max": 7.0, "up_limit": 7.0,
        "has_gate_up_bias": True, "has_down_bias": True,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The result of one kernel set or device, class and weight format, over activations and wire
    dtypes. The test is passed when no element differs.
    """

    # On a card this is the device.
    isa: str
    weight_dtype: str
    cases: int
    elements: int
    differing: int
    numerics: str = DEFAULT_NUMERICS
    # A test that did not end says here what kept it from that.
    error: str = ""

    @property
    def is_passed(self) -> bool:
        """True where all bits are equal."""
        return self.differing == 0 and not self.error


def run_self_tests() -> list[SelfTest]:
    """Tests every supported kernel set but the reference itself, in the order of the core, in all
    its classes. It takes seconds.
    """
    expected: dict[tuple[Case, str], np.ndarray[Any, Any]] = {}
    tests = []
    for isa in (isa for isa in _core.supported_isas() if isa != REFERENCE):
        for numerics, weight_dtype in itertools.product(_core.numerics_classes(isa), WEIGHTS):
            if not takes_weights(numerics, weight_dtype):
                continue
            cases = list(itertools.product([weight_dtype], SPECS, DTYPES))
            for case in cases:
                if (case, numerics) not in expected:
                    expected[case, numerics] = _forward(REFERENCE, case, numerics)
            wanted = [expected[case, numerics] for case in cases]
            found = [_forward(isa, case, numerics) for case in cases]
            differing = sum(int(np.count_nonzero(one != other)) for one, other in zip(wanted, found, strict=True))
            tests.append(SelfTest(isa, weight_dtype, len(cases), sum(one.size for one in wanted), differing, numerics))
    return tests


def _forward(isa: str, case: Case, numerics: str) -> np.ndarray[Any, Any]:
    """Returns the bit patterns of the reply [NUM_ROWS, out_size] of a case, which is (weight
    format, spec, wire dtype). The data are the same for every `isa`.
    """
    weight_dtype, spec_name, wire_dtype = case
    spec = SPECS[spec_name]
    random = np.random.default_rng(1)
    oracle = _core.FfnOracle(
        spec=SIZES | spec, num_experts=NUM_EXPERTS, weight_dtype=weight_dtype, isa=isa, num_threads=2, numerics=numerics
    )
    for expert in range(NUM_EXPERTS):
        oracle.load_expert(expert, **_weights(random, spec))
    counts = random.integers(1, TOP_K + 1, NUM_ROWS, dtype=np.uint16)
    ids = np.concatenate([np.sort(random.permutation(NUM_EXPERTS)[:count]) for count in counts]).astype(np.uint16)
    rows = random.standard_normal((NUM_ROWS, SIZES["in_size"]), dtype=np.float32)
    weights = random.random(ids.size, dtype=np.float32)
    reply: Any = oracle.forward(rows, counts, ids, weights, row_dtype=wire_dtype, reply_dtype=wire_dtype)
    bits: np.ndarray[Any, Any] = reply.view(np.uint32) if wire_dtype == "f32" else reply
    return bits


def _weights(random: np.random.Generator, spec: dict[str, Any]) -> dict[str, Any]:
    in_size, intermediate, out_size = (SIZES[key] for key in ("in_size", "intermediate_size", "out_size"))

    def matrix(outputs: int, inputs: int) -> np.ndarray[Any, Any]:
        scaled: np.ndarray[Any, Any] = random.standard_normal((outputs, inputs), dtype=np.float32) / np.float32(inputs**0.5)
        return scaled

    def bias(outputs: int) -> np.ndarray[Any, Any]:
        return random.standard_normal(outputs, dtype=np.float32)

    is_gated = spec["gate"] != "none"
    weights: dict[str, Any] = {
        "gate": matrix(intermediate, in_size) if is_gated else None,
        "up": matrix(intermediate, in_size),
        "down": matrix(out_size, intermediate),
    }
    if spec.get("has_gate_up_bias"):
        weights |= {"gate_bias": bias(intermediate), "up_bias": bias(intermediate)}
    if spec.get("has_down_bias"):
        weights["down_bias"] = bias(out_size)
    return weights
