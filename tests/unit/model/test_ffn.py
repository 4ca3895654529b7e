"""FfnSpec and TensorPattern: what they say on the wire, and that nothing else is believed.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_moe import _core
from dflash_moe.errors import ProtocolError
from dflash_moe.model.ffn import FfnSpec, TensorPattern
from dflash_moe.protocol.schema import Tree

PACKED = TensorPattern("layers.0.experts.gate_up_proj", True, True, "even")
SINGLE = TensorPattern("layers.0.experts.{expert}.up_proj.weight")


def spec(**changes) -> FfnSpec:
    sizes = {"in_size": 64, "intermediate_size": 48, "out_size": 64}
    return FfnSpec(**{**sizes, "gate_tensor": PACKED, "up_tensor": SINGLE, "down_tensor": SINGLE, **changes})


BIASED = spec(
    gate="clamped_swiglu", alpha=1.702, up_offset=1.0, gate_max=7.0, up_limit=7.0,
    gate_bias_tensor=PACKED, up_bias_tensor=PACKED, down_bias_tensor=SINGLE,
)  # fmt: skip


SCALES = TensorPattern("blk.0.ffn_up_exps.scale", True)


@pytest.mark.parametrize(
    "ffn",
    [
        spec(), BIASED, spec(gate="none", gate_tensor=None, activation="relu_squared"), spec(up_scale_tensor=SCALES),
        spec(gate_scale_tensor=SCALES, up_scale_tensor=SCALES, down_scale_tensor=SCALES),
    ],
)  # fmt: skip
def test_a_spec_survives_the_wire(ffn):
    wire = msgpack.unpackb(msgpack.packb(Tree().check(ffn.to_wire())))
    assert FfnSpec.from_wire(wire) == ffn


@pytest.mark.parametrize("ffn", [spec(), BIASED])
def test_the_core_takes_the_formula(ffn):
    _core.FfnOracle(spec=ffn.kernel_spec(), num_experts=1, weight_dtype="f32", isa="reference")


def test_values_of_an_expert_count_matrices_and_biases():
    assert spec().num_values() == 3 * 64 * 48
    assert BIASED.num_values() == 3 * 64 * 48 + 2 * 48 + 64
    assert spec(gate="none", gate_tensor=None).num_values() == 2 * 64 * 48


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"in_size": 0}, "in_size"),
        ({"out_size": 1 << 19}, "out_size"),
        ({"intermediate_size": True}, "intermediate_size"),
        ({"in_size": "64"}, "in_size"),
        ({"activation": "tanh"}, "activation"),
        ({"gate": 1}, "gate"),
        ({"alpha": math.nan}, "alpha"),
        ({"alpha": math.inf}, "alpha"),
        ({"up_limit": -1.0}, "up_limit"),
        ({"gate_max": -math.inf}, "gate_max"),
        ({"surprise": 1}, "surprise"),
        ({"up_tensor": "name"}, "up_tensor"),
        ({"up_tensor": ["a.{expert}", False, False]}, "up_tensor"),
        ({"up_tensor": ["a.{expert}", 0, False, "all"]}, "up_tensor"),
        ({"up_tensor": ["a.{expert}", False, False, "third"]}, "up_tensor.part"),
        ({"up_tensor": ["a", False, False, "all"]}, "up_tensor.name"),
        ({"up_tensor": ["a.{expert}", True, False, "all"]}, "up_tensor.name"),
        ({"up_tensor": ["a.{expert}.{expert}", False, False, "all"]}, "up_tensor.name"),
        ({"up_tensor": ["a.{expert!r}", False, False, "all"]}, "up_tensor.name"),
        ({"up_tensor": ["a.{expert.__class__}", False, False, "all"]}, "up_tensor.name"),
        ({"up_tensor": ["a" * 257, True, False, "all"]}, "up_tensor.name"),
        ({"up_tensor": ["a\n", True, False, "all"]}, "up_tensor.name"),
        ({"gate": "none"}, "gate_tensor"),
        ({"up_bias_tensor": ["b", True, False, "all"]}, "gate_bias_tensor"),
        ({"down_scale_tensor": ["a.{expert}", False, False, "all"]}, "down_scale_tensor"),
    ],
)
def test_a_wire_map_that_is_not_a_spec_is_refused_by_field(changes, field):
    with pytest.raises(ProtocolError, match=field.replace(".", r"\.")):
        FfnSpec.from_wire({**spec().to_wire(), **changes})


def test_a_scale_of_a_gate_that_is_not_there_is_refused():
    wire = spec(gate="none", gate_tensor=None, gate_scale_tensor=SCALES).to_wire()
    with pytest.raises(ProtocolError, match="gate_scale_tensor"):
        FfnSpec.from_wire(wire)


@pytest.mark.parametrize("missing", ["in_size", "activation", "alpha", "down_tensor", "gate_tensor"])
def test_a_missing_field_is_named(missing):
    wire = spec().to_wire()
    del wire[missing]
    with pytest.raises(ProtocolError, match=missing):
        FfnSpec.from_wire(wire)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*spec().to_wire(), "x"]), inner),
        max_leaves=12,
    )
)
def test_arbitrary_trees_end_in_a_protocol_error(tree):
    with pytest.raises(ProtocolError):
        FfnSpec.from_wire(tree)
