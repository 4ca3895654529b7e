"""NumPy dequantisers: value for value those of the `gguf` package, torch's FP8, and transformers'
MXFP4.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import numpy as np
import pytest

from bench.models.weight_blocks import random_blocks
from dflash_moe import _core
from dflash_moe.errors import UnsupportedError
from dflash_moe.model.formats.dequantize import E4M3, dequantize, e8m0, quantize_int, requantized
from dflash_moe.model.formats.weight_formats import FORMATS, RESIDENT_CHOICES, STORED_NAMES, common_format, resident_formats

PACKED_FORMATS = (
    "q8_0", "q4_0", "q4_k", "q5_k", "q6_k", "gguf_mxfp4", "iq4_nl", "iq4_xs", "iq3_xxs", "iq3_s", "iq2_xxs", "iq2_xs", "iq2_s",
    "q4_1", "q5_0", "q5_1", "q3_k", "q2_k",
)  # fmt: skip
GGUF_FORMATS = (*PACKED_FORMATS, "iq1_s", "iq1_m", "tq1_0", "tq2_0", "nvfp4")
LOW_BITS = ("iq3_xxs", "iq3_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq1_s", "iq1_m", "tq1_0", "tq2_0", "nvfp4")
# Where the f16 factors lie in the blocks of formats that keep the signs of all zeros.
FACTORS_AT = {"q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q3_k": (108,), "q2_k": (80, 82)}
# Zeros, the least and the largest f16 of both signs, and numbers whose products need many bits.
FACTORS = np.array([1, 0.0, -0.0, 6e-8, -6e-8, 65504, -65504, 0.033, -0.017], np.float16)


@pytest.mark.parametrize("name", GGUF_FORMATS)
def test_blocks_have_the_values_the_gguf_package_gives_them(name):
    gguf = pytest.importorskip("gguf", reason="the gguf package is an extra of the tests")
    data = random_blocks(name, 7, 512, seed=3)
    kind = getattr(gguf.GGMLQuantizationType, name.removeprefix("gguf_").upper())
    theirs = gguf.dequantize(data, kind)
    ours = dequantize(name, data, 7, 512)
    assert np.isfinite(ours).all()
    assert len(np.unique(ours)) > 25
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", FACTORS_AT)
def test_every_byte_pattern_of_a_block_has_the_bits_that_the_gguf_package_gives_it(name):
    """Each byte of codes and scales takes all 256 values, beside each combination of factors."""
    gguf = pytest.importorskip("gguf", reason="the gguf package is an extra of the tests")
    shape, at = FORMATS[name], FACTORS_AT[name]
    steps = np.random.default_rng(6).integers(0, 256, (len(FACTORS) ** len(at), 1, shape.block_bytes))
    blocks = (np.arange(256)[:, None] * (2 * np.arange(shape.block_bytes) + 1) + steps).astype(np.uint8)
    assert all(len(np.unique(blocks[0, :, byte])) == 256 for byte in range(shape.block_bytes))
    for place, factors in zip(at, np.meshgrid(*[FACTORS] * len(at)), strict=True):
        blocks[..., place : place + 2] = factors.reshape(-1, 1, 1).view(np.uint8)
    rows = blocks.reshape(-1, shape.block_bytes)
    theirs = gguf.dequantize(rows, getattr(gguf.GGMLQuantizationType, name.upper()))
    for ours in (dequantize(name, rows, len(rows), shape.block), _core.dequantize(name, rows, len(rows), shape.block)):
        np.testing.assert_array_equal(np.asarray(ours).view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("name", FACTORS_AT)
def test_random_blocks_give_weights_of_ordinary_size(name):
    weights = dequantize(name, random_blocks(name, 64, 4096), 64, 4096)
    assert 0.018 < weights.std() < 0.022
    assert abs(weights.mean()) < 0.002


@pytest.mark.parametrize("name", LOW_BITS)
def test_random_blocks_of_low_bit_formats_give_weights_a_deviation_of_a_fiftieth(name):
    assert 0.018 < dequantize(name, random_blocks(name, 64, 1536), 64, 1536).std() < 0.022


def test_fp8_codes_are_those_of_torch():
    torch = pytest.importorskip("torch")
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(E4M3, theirs)
    np.testing.assert_array_equal(np.signbit(E4M3), np.signbit(theirs))


def test_fp8_scales_belong_to_squares_of_128():
    codes = np.full((130, 260), 0x38, np.uint8)  # 1.0
    scales = np.arange(6, dtype=np.float32).reshape(2, 3) + 1
    values = dequantize("fp8_e4m3_b128", codes, 130, 260, scales)
    assert values[0, 0] == 1
    assert values[127, 128] == 2
    assert values[129, 259] == 6


def test_mxfp4_has_the_values_transformers_gives_it():
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    generator = np.random.default_rng(5)
    blocks = generator.integers(0, 256, (2, 6, 3, 16), dtype=np.uint8)
    scales = generator.integers(110, 140, (2, 6, 3), dtype=np.uint8)
    theirs = mxfp4.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
    for expert in range(2):
        ours = dequantize("mxfp4", blocks[expert], 6, 96, scales[expert])
        np.testing.assert_array_equal(ours, theirs[expert].numpy().T)


def test_exponents_reach_from_subnormal_to_nan():
    values = e8m0(np.array([0, 1, 127, 254, 255], np.uint8))
    assert values[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert np.isnan(values[4])


@pytest.mark.parametrize(("bits", "largest"), [(8, 127), (4, 7)])
def test_integers_are_within_half_a_step_and_keep_the_largest(bits, largest):
    values = np.random.default_rng(1).normal(size=(5, 70)).astype(np.float32)
    values[2] = 0
    integers, scales = quantize_int(values, bits)
    assert np.abs(integers).max() == largest
    assert scales.shape == (5, 3)
    assert (scales[2] == 0).all()
    again = requantized(values, f"int{bits}_g32")
    steps = np.repeat(scales, 32, axis=1)[:, :70]
    assert (np.abs(again - values) <= steps * 0.5001).all()
    assert (again[2] == 0).all()


def test_a_format_without_a_rule_is_named():
    with pytest.raises(UnsupportedError, match="Q1_0"):
        dequantize("Q1_0", np.zeros(36, np.uint8), 1, 256)


def test_bytes_count_blocks_and_scales():
    assert FORMATS["q4_k"].stored_bytes(3, 512) == 3 * 2 * 144
    assert FORMATS["fp8_e4m3_b128"].stored_bytes(130, 256) == 130 * 256 + 2 * 2 * 4
    assert FORMATS["mxfp4"].stored_bytes(4, 64) == 4 * (32 + 2)
    assert FORMATS["int8_g32"].stored_bytes(2, 33) == 2 * 2 * (32 + 4)


@pytest.mark.parametrize("name", [*PACKED_FORMATS, "int8_g32", "int4_g32"])
def test_a_workers_bytes_are_predicted(tmp_path, name):
    """Widths that are whole panels of every instruction set."""
    from dflash_moe.model.ffn import FfnSpec, TensorPattern

    stored = name if name in GGUF_FORMATS else "f32"
    blocks = random_blocks(name, 192, 768) if name in GGUF_FORMATS else np.ones((192, 768), np.float32)
    path = tmp_path / "blocks"
    path.write_bytes(blocks.tobytes() * 4)
    step = blocks.nbytes // 192

    def source(outputs: int, inputs: int):
        row = step * inputs // 768
        return (_core.MappedFile(str(path)), 0, stored, outputs, inputs, row if stored == name else inputs, int(stored != name))

    names = {label: TensorPattern(label, True) for label in ("gate_tensor", "up_tensor", "down_tensor")}
    ffn = FfnSpec(in_size=768, intermediate_size=768, out_size=768, **names)
    store = _core.ShardStore(isa=_core.best_isa(), num_threads=1)
    loan = store.borrow(ffn.kernel_spec(), 1, name, 1)
    loan.load_expert(0, gate=source(768, 768), up=source(768, 768), down=source(768, 768))
    assert store.resident_bytes() == ffn.resident_bytes(name)


def test_only_floats_are_requantised():
    assert {resident_formats("bf16", weights) for weights in RESIDENT_CHOICES} == {"bf16", "int8_g32", "int4_g32"}
    assert {resident_formats("q4_k+q6_k", weights) for weights in RESIDENT_CHOICES} == {"q4_k+q6_k"}
    assert common_format(["f16", "f16"]) == "f16"
    assert common_format(["q4_k", "q6_k"]) == "f32"
    assert set(STORED_NAMES.values()) <= set(FORMATS)


@pytest.mark.parametrize("name", GGUF_FORMATS)
def test_the_core_gives_blocks_the_same_values(name):
    data = random_blocks(name, 9, 768, seed=11)
    np.testing.assert_array_equal(_core.dequantize(name, data, 9, 768), dequantize(name, data, 9, 768))


def test_the_core_gives_scaled_formats_the_same_values():
    generator = np.random.default_rng(2)
    codes = generator.integers(0, 256, (130, 160), dtype=np.uint8)
    squares = generator.normal(size=(2, 2)).astype(np.float32)
    ours = dequantize("fp8_e4m3_b128", codes, 130, 160, squares)
    np.testing.assert_array_equal(_core.dequantize("fp8_e4m3_b128", codes, 130, 160, squares), ours)
    blocks, exponents = codes[:, :80].copy(), generator.integers(0, 250, (130, 5), dtype=np.uint8)
    ours = dequantize("mxfp4", blocks, 130, 160, exponents)
    np.testing.assert_array_equal(_core.dequantize("mxfp4", blocks, 130, 160, exponents), ours)


@pytest.mark.parametrize("name", ["int8_g32", "int4_g32"])
def test_the_core_quantises_to_the_same_integers(name):
    values = np.random.default_rng(4).normal(size=(50, 96)).astype(np.float32)
    values[7, 32:64] = 0
    values[8] *= 1e-30
    values[9] = np.linspace(-1, 1, 96)  # ties between integers
    np.testing.assert_array_equal(_core.requantize(name, values), requantized(values, name))
