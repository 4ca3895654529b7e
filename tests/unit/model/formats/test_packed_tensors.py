"""AWQ, GPTQ and compressed-tensors: words become weights as worked out by hand, on every path; what
contradicts itself or is not read is named.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from bench.models.int4_files import METHODS, pack, quantise_int4, quantization_of
from dflash_moe import _core
from dflash_moe.errors import CheckpointError, UnsupportedError
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.expert_tensors import check_expert, matrix_source
from dflash_moe.model.ffn import FfnSpec, TensorPattern
from dflash_moe.model.formats.dequantize import dequantize
from tests.unit.model.int4_blocks import BLOCKS, Block

CASES = [(method, number) for method in METHODS for number in range(3)]


def write(path, tensors: dict[str, tuple[str, np.ndarray]], method: dict):
    path.mkdir(exist_ok=True)
    header, data = {}, b""
    for name, (dtype, value) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [len(data), len(data) + value.nbytes]}
        data += np.ascontiguousarray(value).tobytes()
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (path / "config.json").write_text(json.dumps({"quantization_config": method}))
    return path


def named(parts: dict, name: str = "w") -> dict:
    return {f"{name}.{end}": part for end, part in parts.items()}


def words_of(block: Block, method: str, repeats: int = 1) -> dict:
    """The tensors of a block, its inputs repeated."""
    words = np.array(block.words, np.uint32).view(np.int32)
    scales = np.array(block.scales, np.float32)
    zeros = None if block.zeros is None else np.array(block.zeros, np.uint32).view(np.int32)
    if method == "compressed-tensors":
        bits = (scales.view(np.uint32) >> 16).astype(np.uint16)
        found = {"weight_packed": ("I32", np.tile(words, (1, repeats))), "weight_scale": ("BF16", bits)}
        return found | ({} if zeros is None else {"weight_zero_point": ("I32", zeros)})
    halves = ("F16", scales.astype(np.float16))
    return {"qweight": ("I32", np.tile(words, (repeats, 1))), "scales": halves, "qzeros": ("I32", zeros)}


@pytest.mark.parametrize(("method", "number"), CASES)
def test_words_mean_the_weights_worked_out_by_hand_in_numpy_and_in_the_core(tmp_path, method, number):
    block = BLOCKS[method][number]
    repeats = 32 // len(block.weights[0])
    expected = np.tile(np.array(block.weights, np.float32), (1, repeats))
    checkpoint = Checkpoint.open(
        write(tmp_path / "m", named(words_of(block, method, repeats)), quantization_of(method, -1, is_symmetric=False))
    )
    assert set(checkpoint.tensors) == {"w.weight"}
    assert checkpoint.tensors["w.weight"].shape == (8, 32)
    np.testing.assert_array_equal(checkpoint.values("w.weight"), expected)
    np.testing.assert_array_equal(core_values(checkpoint, "w.weight"), expected)


@pytest.mark.parametrize(("method", "number"), CASES)
def test_the_packers_of_the_tests_make_the_words_worked_out_by_hand(method, number):
    block = BLOCKS[method][number]
    weights, scales = np.array(block.weights), np.array(block.scales)
    zeros = hand_zeros(block, method)
    by_output = scales[:, 0] if method == "compressed-tensors" else scales[0]
    codes = (weights / by_output[:, None] + zeros[:, None]).astype(np.uint8)
    made, expected = pack(method, codes, zeros[:, None], by_output[:, None].astype(np.float32)), words_of(block, method)
    for end, (dtype, values) in expected.items():
        assert made[end][0] == dtype
        np.testing.assert_array_equal(made[end][1], values)


def hand_zeros(block: Block, method: str) -> np.ndarray:
    """The zero points of eight outputs, digit by digit."""
    digits = f"{0x88888888 if block.zeros is None else block.zeros[0][0]:08x}"[::-1]
    order = (0, 2, 4, 6, 1, 3, 5, 7) if method == "awq" else range(8)
    zeros = np.zeros(8, np.uint8)
    for digit, output in zip(digits, order, strict=True):
        zeros[output] = int(digit, 16) + (method == "gptq")
    return zeros


def core_values(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """The weights as the core keeps them once it has packed them from the mapped file."""
    outputs, inputs = checkpoint.tensors[name].shape
    pool = _core.HostPool(threads=1, isa=_core.best_isa())
    packed = _core.PackedLinear(pool, [(matrix_source(checkpoint, name, outputs, inputs), None, 0)], numerics="f32-canonical")
    ids, found = np.arange(outputs, dtype=np.int64), np.empty((outputs, inputs), np.float32)
    packed.gather(ids.ctypes.data, outputs, found.ctypes.data, found.strides[0], "f32")
    return found


def random_matrix(method: str, outputs: int, inputs: int, group: int, seed: int = 0) -> tuple[dict, np.ndarray]:
    """Tensors and the weights that they mean."""
    values = np.random.default_rng(seed).normal(size=(outputs, inputs)).astype(np.float32)
    codes, zeros, scales = quantise_int4(values, group, is_symmetric=False)
    wide = (codes.astype(np.float32) - np.repeat(zeros, group, 1)) * np.repeat(scales, group, 1)
    return pack(method, codes, zeros, scales), wide


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("inputs", "group"), [(256, 32), (256, 64), (384, 128), (96, 96)])
def test_every_group_gives_the_weights_in_numpy_and_in_the_core(tmp_path, method, inputs, group):
    parts, expected = random_matrix(method, 72, inputs, group)
    stated = -1 if group == inputs else group
    checkpoint = Checkpoint.open(write(tmp_path / "m", named(parts), quantization_of(method, stated, is_symmetric=False)))
    np.testing.assert_array_equal(checkpoint.values("w.weight"), expected)
    np.testing.assert_array_equal(core_values(checkpoint, "w.weight"), expected)


def test_blocks_of_the_resident_format_hold_f16_and_bf16_scales_exactly():
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    brains = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32)
    scales = np.concatenate([halves, brains[brains < 2.0**123]])
    blocks = np.zeros((scales.size, 1, 20), np.uint8)
    blocks[:, 0, :4] = (scales.view(np.uint32) | np.uint32(3))[:, None].view(np.uint8)
    blocks[:, 0, 4] = 4
    np.testing.assert_array_equal(dequantize("int4_zp", blocks, scales.size, 32)[:, 0], scales)
    np.testing.assert_array_equal(np.asarray(_core.dequantize("int4_zp", blocks, scales.size, 32, b""))[:, 0], scales)


def ffn() -> FfnSpec:
    return FfnSpec(
        in_size=64, intermediate_size=64, out_size=64, gate="none", up_tensor=TensorPattern("w.weight", False),
        down_tensor=TensorPattern("w.weight", False),
    )  # fmt: skip


def changed(method: str, end: str, change) -> dict:
    parts = named(random_matrix(method, 64, 64, 32)[0])
    if method == "compressed-tensors":
        parts["w.weight_shape"] = ("I64", np.array([64, 64], np.int64))
    parts["w." + end] = change(*parts.get("w." + end, ("I32", np.arange(64, dtype=np.int32) // 32)))
    return parts


def order(dtype: str, groups: np.ndarray) -> tuple[str, np.ndarray]:
    return dtype, np.roll(groups, 1)


def shorter(dtype: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    return dtype, np.ascontiguousarray(values[:, :-1])


REFUSED = [
    ("gptq", "g_idx", order, UnsupportedError, "tensor 'w.g_idx': its groups do not ascend by 32 inputs"),
    ("compressed-tensors", "weight_g_idx", order, UnsupportedError, "tensor 'w.weight_g_idx': its groups do not ascend"),
    ("gptq", "qzeros", shorter, CheckpointError, "tensor 'w.qzeros' is I32 [2, 7], expected I32 [2, 8]"),
    ("awq", "qzeros", shorter, CheckpointError, "tensor 'w.qzeros' is I32 [2, 7], expected I32 [2, 8]"),
    (
        "compressed-tensors",
        "weight_zero_point",
        shorter,
        CheckpointError,
        "'w.weight_zero_point' is I32 [8, 1], expected I32 [8, 2]",
    ),
    ("awq", "qweight", shorter, CheckpointError, "tensor 'w.qweight' has shape [64, 7], expected [rows, 64 or 8]"),
    ("gptq", "scales", lambda _, v: ("F32", v.astype(np.float32)), UnsupportedError, "tensor 'w.scales' is F32 [2, 64]"),
    ("gptq", "scales", lambda d, v: (d, v[[0, 1, 1]]), UnsupportedError, "tensor 'w.scales' has 3 groups for 64 inputs"),
    ("gptq", "scales", lambda d, v: (d, v[[0, 1, 1, 1]]), UnsupportedError, "tensor 'w.scales' has 4 groups for 64 inputs"),
    ("compressed-tensors", "weight_shape", lambda d, v: (d, v - 1), CheckpointError, "'w.weight_shape' says [63, 63]"),
    ("compressed-tensors", "weight_shape", lambda _, v: ("I32", v.astype(np.int32) + 8), CheckpointError, "says [72, 72]"),
    ("gptq", "qweight", lambda _, v: ("I64", v.astype(np.int64)), UnsupportedError, "tensor 'w.qweight' is I64 [8, 64]"),
    ("awq", "weight", lambda _d, _v: ("F32", np.zeros(4, np.float32)), CheckpointError, "'w.weight' is there twice"),
]


@pytest.mark.parametrize(("method", "end", "change", "kind", "message"), REFUSED)
def test_tensors_that_contradict_one_another_are_named(tmp_path, method, end, change, kind, message):
    write(tmp_path / "m", changed(method, end, change), quantization_of(method, 32, is_symmetric=False))
    with pytest.raises(kind, match=re.escape(message)):
        check_expert(Checkpoint.open(tmp_path / "m"), ffn(), 0)


def test_lacking_scales_and_truncated_files_are_named(tmp_path):
    parts, method = named(random_matrix("awq", 64, 64, 32)[0]), quantization_of("awq", 32, is_symmetric=False)
    path = write(tmp_path / "m", parts, method) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        Checkpoint.open(tmp_path / "m")
    del parts["w.scales"]
    with pytest.raises(CheckpointError, match=r"'w\.qweight' lacks its scales 'w\.scales'"):
        Checkpoint.open(write(tmp_path / "m", parts, method))


KEYS = [
    ("gptq", {"bits": 3}, "config.json.quantization_config.bits: found 3"),
    ("gptq", {"bits": 8}, "quantization_config.bits: found 8; read are 4"),
    ("awq", {"bits": 8}, "quantization_config.bits: found 8"),
    ("awq", {"version": "gemv"}, "quantization_config.version: found 'gemv'"),
    ("awq", {"group_size": 48}, "quantization_config.group_size: found 48; read are 32, 64, 128, -1"),
    ("gptq", {"checkpoint_format": "marlin"}, "quantization_config.checkpoint_format: found 'marlin'"),
    ("gptq", {"quant_method": "aqlm"}, "quantization_config: method aqlm is not supported"),
    ("compressed-tensors", {"format": "int-quantized"}, "quantization_config.format: found 'int-quantized'"),
    ("compressed-tensors", {"config_groups": None}, "quantization_config.config_groups: found None"),
]


@pytest.mark.parametrize(("method", "change", "message"), KEYS)
def test_what_is_not_read_is_refused_naming_its_key(tmp_path, method, change, message):
    fields = quantization_of(method, 32, is_symmetric=False) | change
    write(tmp_path / "m", named(random_matrix(method, 64, 64, 32)[0]), fields)
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        Checkpoint.open(tmp_path / "m")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bits": 8}, "config_groups.group_0.weights.num_bits: found 8"),
        ({"strategy": "block"}, "weights.strategy: found 'block'"),
    ],
)
def test_schemes_of_compressed_tensors_are_refused_naming_their_key(tmp_path, change, message):
    fields = quantization_of("compressed-tensors", 32, is_symmetric=False)
    fields["config_groups"]["group_0"]["weights"] |= change
    write(tmp_path / "m", named(random_matrix("compressed-tensors", 64, 64, 32)[0]), fields)
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        Checkpoint.open(tmp_path / "m")


def test_a_scale_that_is_not_finite_is_named_when_it_is_loaded(tmp_path):
    parts = named(random_matrix("gptq", 64, 64, 32)[0])
    parts["w.scales"][1][1, 5] = np.inf
    checkpoint = Checkpoint.open(write(tmp_path / "m", parts, quantization_of("gptq", 32, is_symmetric=False)))
    with pytest.raises(CheckpointError, match="output 5, input 32: a scale or value in int4_zp is NaN or infinite"):
        core_values(checkpoint, "w.weight")
