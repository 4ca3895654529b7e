"""FP8 and MXFP4 checkpoints: values find their scales, layers their tensors, and contradictions are
named.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from bench.models.quantised_files import quantise_fp8, quantise_mxfp4, write_fp8, write_mxfp4
from dflash_moe import _core
from dflash_moe.errors import CheckpointError, UnsupportedError
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.expert_tensors import check_expert, expert_sources, matrix_source
from dflash_moe.model.ffn import FfnSpec, TensorPattern
from dflash_moe.model.formats.dequantize import E4M3, dequantize
from dflash_moe.model.make import MakeOptions, make_checkpoint


def write(path, tensors: dict[str, tuple[str, np.ndarray]]):
    header, data = {}, b""
    for name, (dtype, value) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [len(data), len(data) + value.nbytes]}
        data += value.tobytes()
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def codes(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.int64).astype(np.uint8).reshape(shape)


def test_quantisers_of_the_tests_stay_within_half_a_step():
    values = np.random.default_rng(0).normal(size=(130, 160)).astype(np.float32)
    encoded, scales = quantise_fp8(values)
    assert np.abs(dequantize("fp8_e4m3_b128", encoded, 130, 160, scales) - values).max() < 0.2
    blocks, scales = quantise_mxfp4(values)
    assert np.abs(dequantize("mxfp4", blocks, 130, 160, scales) - values).max() <= 1.0


def test_fp8_values_and_scales_become_one_tensor(tmp_path):
    values, scales = codes(2, 256, 128), np.ones((2, 2, 1), np.float32) * np.array([[[1], [2]], [[3], [4]]], np.float32)
    checkpoint = Checkpoint.open(write(tmp_path, {"w": ("F8_E4M3", values), "w_scale_inv": ("F32", scales)}))
    assert set(checkpoint.tensors) == {"w"}
    assert set(checkpoint.stored) == {"w", "w_scale_inv"}
    whole = checkpoint.values("w")
    for expert in range(2):
        expected = dequantize("fp8_e4m3_b128", values[expert], 256, 128, scales[expert])
        np.testing.assert_array_equal(whole[expert], expected)


@pytest.mark.parametrize("name", ["w_scale", "w_scale_inv"])
@pytest.mark.parametrize(
    ("dtype", "shape"), [("F32", ()), ("BF16", (1,)), ("F32", (1, 1)), ("F16", (256,)), ("BF16", (256, 1)), ("BF16", (2, 3))]
)
def test_fp8_scales_of_every_shape_and_dtype_belong_to_their_weights(tmp_path, name, dtype, shape):
    values, scales = codes(256, 300) & 0x7B, np.arange(1, 1 + math.prod(shape), dtype=np.float32).reshape(shape) / 64
    bits = (scales.view(np.uint32) >> 16).astype(np.uint16)
    stored = {"F32": scales, "F16": scales.astype(np.float16), "BF16": bits}[dtype]
    checkpoint = Checkpoint.open(write(tmp_path, {"w": ("F8_E4M3", values), name: (dtype, stored)}))
    assert set(checkpoint.tensors) == {"w"}
    wide = np.kron(scales, np.ones((128, 128), np.float32))[:, :300] if shape == (2, 3) else scales.reshape(-1, 1)
    held = {"F32": wide, "F16": wide.astype(np.float16), "BF16": wide}[dtype].astype(np.float32)
    expected = E4M3[values] * (held.view(np.uint32) & np.uint32(0xFFFF0000 if dtype == "BF16" else 0xFFFFFFFF)).view(np.float32)
    np.testing.assert_array_equal(checkpoint.values("w"), expected)
    np.testing.assert_array_equal(core_values(checkpoint, "w"), expected)


def core_values(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """The weights as the core keeps them once it has packed them from the mapped file."""
    outputs, inputs = checkpoint.tensors[name].shape
    pool = _core.HostPool(threads=1, isa=_core.best_isa())
    packed = _core.PackedLinear(pool, [(matrix_source(checkpoint, name, outputs, inputs), None, 0)], numerics="f32-canonical")
    ids, found = np.arange(outputs, dtype=np.int64), np.empty((outputs, inputs), np.float32)
    packed.gather(ids.ctypes.data, outputs, found.ctypes.data, found.strides[0], "f32")
    return found


def test_mxfp4_blocks_and_scales_become_one_tensor(tmp_path):
    blocks, scales = codes(3, 8, 2, 16), codes(3, 8, 2) % 20 + 118
    checkpoint = Checkpoint.open(write(tmp_path, {"w_blocks": ("U8", blocks), "w_scales": ("U8", scales)}))
    assert checkpoint.tensors["w"].shape == (3, 8, 64)
    np.testing.assert_array_equal(checkpoint.values("w")[1], dequantize("mxfp4", blocks[1], 8, 64, scales[1]))


def ffn(name: str, in_size: int, width: int, part: str = "all") -> FfnSpec:
    up, down = TensorPattern(name, True, False, part), TensorPattern("d", True)
    sizes = {"in_size": in_size, "intermediate_size": width, "out_size": in_size}
    return FfnSpec(gate="none", up_tensor=up, down_tensor=down, **sizes)


def test_sources_of_a_part_point_at_its_own_scales(tmp_path):
    tensors = {
        "w_blocks": ("U8", codes(2, 64, 1, 16)), "w_scales": ("U8", codes(2, 64, 1)), "d_blocks": ("U8", codes(2, 32, 1, 16)),
        "d_scales": ("U8", codes(2, 32, 1)),
    }  # fmt: skip
    checkpoint = Checkpoint.open(write(tmp_path, tensors))
    info = checkpoint.tensors["w"]
    up = expert_sources(checkpoint, ffn("w", 32, 32, "odd"), 1)["up"]
    assert up[1:7] == (info.offset + 64 * 16 + 16, "mxfp4", 32, 32, 2 * 16, 0)
    assert up[8:] == (info.scales.offset + 64 + 1, 2)
    assert check_expert(checkpoint, ffn("w", 32, 32, "odd"), 0) == ("mxfp4", "mxfp4")


def test_fp8_parts_begin_at_a_square_or_are_refused(tmp_path):
    def stored(outputs: int, inputs: int) -> dict:
        squares = np.ones((2, -(-outputs // 128), -(-inputs // 128)), np.float32)
        return {"w": ("F8_E4M3", codes(2, outputs, inputs)), "w_scale_inv": ("F32", squares)} | {
            "d": ("F32", np.zeros((2, inputs, outputs // 2), np.float32))
        }

    checkpoint = Checkpoint.open(write(tmp_path, stored(512, 128)))
    up = expert_sources(checkpoint, ffn("w", 128, 256, "second_half"), 1)["up"]
    assert up[8:] == (checkpoint.tensors["w"].scales.offset + 4 * (4 + 2), 4)
    checkpoint = Checkpoint.open(write(tmp_path, stored(320, 128)))
    with pytest.raises(UnsupportedError, match="parts must begin at a multiple of 128"):
        expert_sources(checkpoint, ffn("w", 128, 160, "second_half"), 0)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w_blocks": (1, 4, 2, 16), "w_scales": (1, 4, 3)}, r"has shape \[1, 4, 2, 16\] and its scales \[1, 4, 3\]"),
        ({"w_blocks": (1, 4, 2, 15), "w_scales": (1, 4, 2)}, r"'w_blocks' has shape"),
        ({"w_blocks": (1, 4, 2, 16), "w_scales": (1, 4, 2), "w": (4,)}, "'w' is there twice"),
    ],
)
def test_pairs_that_contradict_themselves_are_named(tmp_path, tensors, message):
    write(tmp_path, {name: ("U8", codes(*shape)) for name, shape in tensors.items()})
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)


def test_fp8_with_scales_of_another_kind_is_refused_by_name(tmp_path):
    write(tmp_path, {"w": ("F8_E4M3", codes(1, 256, 128)), "w_scale_inv": ("F32", np.ones((1, 255, 1), np.float32))})
    with pytest.raises(UnsupportedError, match="'w' has format F8_E4M3 without scales per square of 128, output or tensor"):
        check_expert(Checkpoint.open(tmp_path), ffn("w", 128, 256), 0)


@pytest.mark.transformers
def test_a_published_fp8_model_keeps_its_experts_format(tmp_path):
    from dflash_moe.model.spec import model_spec

    sizes = {"num_layers": 1, "hidden_size": 128, "num_experts": 4, "top_k": 2, "moe_intermediate_size": 128, "seed": 1}
    make_checkpoint(MakeOptions("qwen3_moe", dtype="f32", **sizes), tmp_path / "f32")
    spec = model_spec(write_fp8(tmp_path / "f32", tmp_path / "fp8"))
    assert spec.layers[0].weight_dtype == "fp8_e4m3_b128"
    assert spec.layers[0].expert_bytes == 3 * (128 * 128 + 4)
    assert spec.layers[0].ffn.up_tensor.name == "model.layers.0.mlp.experts.{expert}.up_proj.weight"


@pytest.mark.transformers
def test_a_published_mxfp4_model_is_read_without_its_transposition(tmp_path):
    from dflash_moe.model.spec import model_spec

    sizes = {"num_layers": 1, "hidden_size": 64, "num_experts": 4, "top_k": 2, "moe_intermediate_size": 32, "seed": 1}
    make_checkpoint(MakeOptions("gpt_oss", dtype="f32", **sizes), tmp_path / "f32")
    layer = model_spec(write_mxfp4(tmp_path / "f32", tmp_path / "mxfp4")).layers[0]
    assert layer.weight_dtype == "mxfp4"
    assert layer.ffn.gate_tensor == TensorPattern("model.layers.0.mlp.experts.gate_up_proj", True, False, "even")
    assert layer.ffn.down_tensor == TensorPattern("model.layers.0.mlp.experts.down_proj", True, False, "all")
    assert layer.ffn.up_bias_tensor is not None
