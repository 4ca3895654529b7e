"""What is known of a GGUF model from its file alone: layers and formulas, what is left out and why,
which architectures are refused.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from dflash_moe.errors import CheckpointError, UnsupportedError
from dflash_moe.model.ffn import ACTIVATIONS, FfnSpec
from dflash_moe.model.gguf_architectures.expert_formulas import FORMULAS, REFUSED
from dflash_moe.model.gguf_architectures.gguf_experts import gguf_experts
from tests.expert_cases import make_checkpoint
from tests.gguf_cases import write_experts

gguf = pytest.importorskip("gguf", reason="the gguf package is an extra of the tests")


def test_a_layer_has_the_sizes_names_and_numbers_of_the_file(tmp_path):
    path = write_experts(tmp_path / "m.gguf", formats=("q8_0", "q4_0"), layers=(1, 12), num_experts=6, top_k=3)
    found = gguf_experts(path)
    assert (found.architecture, found.spec.dtype, found.spec.path) == ("qwen3moe", "f32", str(path))
    assert found.spec.fingerprint == found.checkpoint.fingerprint()
    assert [(layer.index, layer.name) for layer in found.spec.layers] == [(1, "blk.1"), (12, "blk.12")]
    layer = found.spec.layers[0]
    assert (layer.num_experts, layer.top_k, layer.weight_dtype) == (6, 3, "q8_0+q4_0")
    assert (layer.ffn.in_size, layer.ffn.intermediate_size, layer.ffn.out_size) == (64, 32, 64)
    assert layer.expert_bytes == 2 * 64 * 34 + 64 * 18
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(str(path)).tensors}
    assert {tensor.name for tensor in found.tensors} == set(reader)
    for tensor in found.tensors:
        theirs = reader[tensor.name]
        assert (tensor.ggml_type, tensor.num_bytes) == (int(theirs.tensor_type), theirs.n_bytes)
        assert (list(tensor.extents), tensor.file_offset) == (theirs.shape.tolist(), theirs.data_offset)
        assert (tensor.layer, tensor.file) == (int(tensor.name.split(".")[1]), 0)


def test_fused_gate_and_up_are_halves_of_one_tensor(tmp_path):
    layer = gguf_experts(write_experts(tmp_path / "m.gguf", "qwen35moe", is_fused=True)).spec.layers[0]
    assert layer.ffn.gate_tensor is not None
    assert (layer.ffn.gate_tensor.name, layer.ffn.gate_tensor.part) == ("blk.0.ffn_gate_up_exps.weight", "first_half")
    assert (layer.ffn.up_tensor.name, layer.ffn.up_tensor.part) == ("blk.0.ffn_gate_up_exps.weight", "second_half")
    assert layer.ffn.intermediate_size == 32


def test_gpt_oss_has_its_constants_and_biases(tmp_path):
    ffn = gguf_experts(write_experts(tmp_path / "m.gguf", "gpt-oss", has_biases=True)).spec.layers[0].ffn
    assert (ffn.activation, ffn.gate, ffn.alpha, ffn.up_offset, ffn.gate_max, ffn.up_limit) == (
        "silu", "clamped_swiglu", 1.702, 1.0, 7.0, 7.0,
    )  # fmt: skip
    assert ffn.has_gate_up_bias
    assert ffn.has_down_bias


@pytest.mark.parametrize("architecture", sorted(FORMULAS))
def test_every_architecture_makes_a_formula_that_kernels_know(tmp_path, architecture):
    has_gate = FORMULAS[architecture].activation != "relu_squared"
    path = write_experts(tmp_path / "m.gguf", architecture, layers=(0,), has_gate=has_gate)
    ffn = gguf_experts(path).spec.layers[0].ffn
    assert FfnSpec.from_wire(ffn.to_wire()) == ffn
    assert ffn.activation in ACTIVATIONS


@pytest.mark.parametrize("architecture", sorted(REFUSED))
def test_an_architecture_that_is_something_else_is_refused_with_the_reason(tmp_path, architecture):
    with pytest.raises(UnsupportedError, match=f"m.gguf: architecture '{architecture}' is not supported: ") as info:
        gguf_experts(write_experts(tmp_path / "m.gguf", architecture))
    assert str(info.value).endswith(REFUSED[architecture])


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(UnsupportedError, match=r"of architecture 'qwen9' it is not known what .* known are afmoe, arctic"):
        gguf_experts(write_experts(tmp_path / "m.gguf", "qwen9"))


def test_limits_are_per_layer_and_one_after_the_activation_leaves_its_layer_out(tmp_path):
    limits = {"swiglu_clamp_exp": [0.0, 2.5]}
    layers = gguf_experts(write_experts(tmp_path / "a.gguf", "hy_v4", metadata=limits)).spec.layers
    assert [(layer.ffn.gate_max, layer.ffn.up_limit) for layer in layers] == [(math.inf, math.inf), (2.5, 2.5)]
    # This architecture's code does not read the key.
    layers = gguf_experts(write_experts(tmp_path / "b.gguf", "qwen3moe", metadata=limits)).spec.layers
    assert [layer.ffn.gate_max for layer in layers] == [math.inf, math.inf]
    found = gguf_experts(write_experts(tmp_path / "c.gguf", "step35", metadata=limits))
    assert [layer.index for layer in found.spec.layers] == [0]
    assert set(found.left_out) == {f"blk.1.ffn_{part}_exps.weight" for part in ("gate", "up", "down")}
    assert (
        "step35.swiglu_clamp_exp is 2.5 for it, which bounds the activation's result"
        in found.left_out["blk.1.ffn_up_exps.weight"]
    )


NINE = np.ones(9, np.float32)
THREE = np.ones((4, 32, 64), np.float32)


@pytest.mark.parametrize(
    ("architecture", "settings", "reason"),
    [
        ("qwen3moe", {"more": {"blk.1.ffn_gate_exps.lora_a": THREE}}, "a tensor 'blk.1.ffn_gate_exps.lora_a', whose use"),
        ("qwen3moe", {"more": {"blk.1.ffn_gate_up_exps.weight": THREE}}, "has the matrices down, gate, gate_up, up; known are"),
        ("qwen3moe", {"more": {"blk.1.ffn_up_exps.bias": THREE[0]}}, "has biases, which llama.cpp does not have for this"),
        ("gpt-oss", {"more": {"blk.1.ffn_up_exps.bias": np.ones((4, 32), np.float32)}}, "has biases of up alone"),
        ("qwen3moe", {"metadata": {"block_count": 2, "nextn_predict_layers": 1}}, "the layer predicts further tokens"),
        ("qwen3moe", {"top_k": [2, 0]}, "qwen3moe.expert_used_count is 0 for it"),
        ("qwen3moe", {"layers": (0,), "more": {"blk.1.ffn_up_exps.weight": THREE}}, "has the matrices up; known are"),
        ("nemotron_h_moe", {"has_gate": False, "more": {"blk.1.ffn_gate_exps.weight": THREE}}, "a gate, which its activ"),
    ],
)  # fmt: skip
def test_a_layer_that_is_not_understood_is_left_out_alone_by_name(tmp_path, architecture, settings, reason):
    found = gguf_experts(write_experts(tmp_path / "m.gguf", architecture, **settings))
    assert [layer.index for layer in found.spec.layers] == [0]
    assert {tensor.layer for tensor in found.tensors} == {0}
    assert set(found.left_out) == {name for name in found.checkpoint.stored if name.startswith("blk.1.")}
    assert all(reason in text for text in found.left_out.values()), found.left_out


def test_a_layer_of_a_type_that_no_kernel_reads_is_left_out_alone(tmp_path):
    values = np.ones((4, 32, 64), np.float32)
    kind = gguf.GGMLQuantizationType.Q8_1
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "qwen3moe")
    writer.add_expert_used_count(2)
    for layer, part in ((layer, part) for layer in (0, 1) for part in ("gate", "up", "down")):
        own = values.transpose(0, 2, 1).copy() if part == "down" else values
        if (layer, part) == (1, "down"):
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", np.ones((4, 64, 40), np.uint8), raw_dtype=kind)
        else:
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = gguf_experts(tmp_path / "m.gguf")
    assert [layer.index for layer in found.spec.layers] == [0]
    assert set(found.left_out.values()) == {"blk.1.ffn_down_exps.weight has format Q8_1, which no kernel reads"}


@pytest.mark.parametrize(
    ("settings", "scales", "reason"),
    [
        (
            {"formats": ("q8_0", "f32")},
            {"up": 4},
            "a scale per expert on weights stored in Q8_0; workers apply it to F32 alone",
        ),
        (
            {"formats": ("f32", "q8_0")},
            {"down": 4},
            "a scale per expert on weights stored in Q8_0; workers apply it to F32 alone",
        ),
        ({}, {"up": 3}, "its tensors have 3 and 4 experts"),
        ({"is_fused": True}, {"gate_up": 4}, "the layer has scales of gate_up, whose use is not known"),
        ({"is_fused": True}, {"up": 4}, "the layer has scales of up, whose use is not known"),
    ],
)
def test_a_scale_that_workers_cannot_apply_leaves_its_layer_out(tmp_path, settings, scales, reason):
    more = {f"blk.1.ffn_{part}_exps.scale": np.ones(count, np.float32) for part, count in scales.items()}
    found = gguf_experts(write_experts(tmp_path / "m.gguf", "qwen35moe", more=more, **settings))
    assert [layer.index for layer in found.spec.layers] == [0]
    assert set(found.left_out.values()) == {reason}


def test_scales_are_part_of_the_layer_and_its_tensors(tmp_path):
    more = {f"blk.0.ffn_{part}_exps.scale": np.ones(4, np.float32) for part in ("gate", "down")}
    found = gguf_experts(write_experts(tmp_path / "m.gguf", layers=(0,), more=more))
    ffn = found.spec.layers[0].ffn
    assert ffn.gate_scale_tensor is not None
    assert ffn.down_scale_tensor is not None
    assert (ffn.gate_scale_tensor.name, ffn.down_scale_tensor.name) == tuple(more)
    assert ffn.up_scale_tensor is None
    assert {tensor.name: tensor.extents for tensor in found.tensors if tensor.name in more} == dict.fromkeys(more, (4,))


def test_tensors_that_are_the_programs_own_leave_no_layer_out(tmp_path):
    own = {"blk.0.ffn_norm_exps.weight": NINE, "blk.1.ffn_up_exps.input_scale": NINE, "blk.1.ffn_up_exps.scale": NINE}
    found = gguf_experts(write_experts(tmp_path / "m.gguf", "arctic", more=own))
    assert (len(found.spec.layers), found.left_out) == (2, {})
    assert {tensor.name for tensor in found.tensors}.isdisjoint(own)


def test_smaller_experts_beside_the_routed_ones_stay_with_the_program(tmp_path):
    found = gguf_experts(write_experts(tmp_path / "m.gguf", "grovemoe", more={"blk.0.ffn_up_chexps.weight": THREE}))
    assert len(found.spec.layers) == 2
    assert found.left_out == {"blk.0.ffn_up_chexps.weight": "smaller experts beside the routed ones"}


def test_where_no_layer_remains_the_reasons_are_told(tmp_path):
    with pytest.raises(UnsupportedError, match=r"no layer of this qwen3moe model: blk.0.* biases, .*; and 3 more tensors$"):
        gguf_experts(write_experts(tmp_path / "a.gguf", has_biases=True, layers=(0,)))
    with pytest.raises(UnsupportedError, match="the qwen3moe model has no routed experts"):
        gguf_experts(write_experts(tmp_path / "b.gguf", layers=(), more={"token_embd.weight": THREE}))


def test_metadata_that_does_not_fit_the_layers_is_damage(tmp_path):
    with pytest.raises(CheckpointError, match=r"metadata qwen3moe.expert_used_count has 1 values, none for layer 1"):
        gguf_experts(write_experts(tmp_path / "m.gguf", top_k=[2]))
    with pytest.raises(CheckpointError, match=r"metadata maple.swiglu_clamp_exp is 3 for layer 0; expected a finite number"):
        gguf_experts(write_experts(tmp_path / "n.gguf", "maple", metadata={"swiglu_clamp_exp": 3}))
    with pytest.raises(CheckpointError, match="it is no GGUF file"):
        gguf_experts(make_checkpoint(tmp_path / "dir"))
