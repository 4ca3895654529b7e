"""`_core.dequantize` value for value against the `gguf` package and against NumPy code written
apart; quantisation at load.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_moe import _core, _measure
from dflash_moe.errors import CheckpointError, ConfigError, UnsupportedError
from dflash_moe.model.formats.dequantize import dequantize, requantized

OUTPUTS, INPUTS = 130, 512
GGUF_TYPES = {
    "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0", "q4_k": "Q4_K", "q5_k": "Q5_K", "q6_k": "Q6_K",
    "gguf_mxfp4": "MXFP4", "iq4_nl": "IQ4_NL", "iq4_xs": "IQ4_XS", "iq3_xxs": "IQ3_XXS", "iq3_s": "IQ3_S",
    "iq2_xxs": "IQ2_XXS", "iq2_xs": "IQ2_XS", "iq2_s": "IQ2_S", "iq1_s": "IQ1_S", "iq1_m": "IQ1_M", "tq1_0": "TQ1_0",
    "tq2_0": "TQ2_0", "nvfp4": "NVFP4",
    "q4_1": "Q4_1", "q5_0": "Q5_0", "q5_1": "Q5_1", "q3_k": "Q3_K", "q2_k": "Q2_K",
}  # fmt: skip
LOW_BITS = ("iq3_xxs", "iq3_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq1_s", "iq1_m", "tq1_0", "tq2_0", "nvfp4")
STORED = [name for name, facts in _core.weight_formats().items() if facts["is_stored"]]
# Where the f16 (or e8m0) scales of a block lie, so that random blocks have finite ones.
SCALES_AT = {
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "gguf_mxfp4": (),
    "tq1_0": (52,),
    "tq2_0": (64,),
    "nvfp4": (),
    "iq1_m": (),
}
SCALES_AT |= {"q4_1": (0, 2), "q5_1": (0, 2), "q3_k": (108,), "q2_k": (80, 82)}
SCALES_AT |= {"int4_zp": ()}


def put_words(blocks: Any, scales: Any, rng: np.random.Generator) -> None:
    """Gives blocks of int4_zp these scales, rounded to f16, and random zero points."""
    bits = scales.astype(np.float16).astype(np.float32).view(np.uint32)
    words = bits | rng.integers(0, 32, bits.shape, dtype=np.uint32)
    blocks[..., :4] = words[..., None].view(np.uint8)


def random_matrix(name: str, seed: int) -> tuple[Any, Any]:
    """(bytes uint8 [outputs, bytes of a row], scales or None): random valid blocks."""
    rng = np.random.default_rng(seed)
    facts = _core.weight_formats()[name]
    if name in ("f32", "f16", "bf16"):
        values = rng.standard_normal((OUTPUTS, INPUTS)).astype(np.float32)
        narrow = {"f32": values, "f16": values.astype(np.float16), "bf16": (values.view(np.uint32) >> 16).astype(np.uint16)}
        return np.ascontiguousarray(narrow[name]).view(np.uint8), None
    blocks = rng.integers(0, 256, (OUTPUTS, INPUTS // facts["block"], facts["block_bytes"]), dtype=np.uint8)
    if name == "fp8_e4m3_b128":
        blocks[(blocks & 127) == 127] = 3
        return blocks.reshape(OUTPUTS, -1), rng.standard_normal((2, 4)).astype(np.float32)
    if name == "mxfp4":
        return blocks.reshape(OUTPUTS, -1), rng.integers(0, 240, (OUTPUTS, INPUTS // 32), dtype=np.uint8)
    for at in SCALES_AT.get(name, (0,)):
        blocks[..., at : at + 2] = rng.standard_normal(blocks.shape[:2]).astype(np.float16)[..., None].view(np.uint8)
    if name == "gguf_mxfp4":
        blocks[..., 0] = rng.integers(0, 240, blocks.shape[:2])
    if name == "iq1_m":
        blocks[..., 55] &= 0xBF  # a factor without the exponent of infinity
    if name == "int4_zp":
        put_words(blocks, rng.standard_normal(blocks.shape[:2]), rng)
    return blocks.reshape(OUTPUTS, -1), None


def core_values(name: str, data: Any, scales: Any) -> Any:
    return np.asarray(_core.dequantize(name, data, OUTPUTS, INPUTS, b"" if scales is None else scales))


@pytest.mark.parametrize("name", STORED)
def test_every_stored_format_equals_the_numpy_code_bit_for_bit(name: str) -> None:
    data, scales = random_matrix(name, seed=1)
    expected = dequantize(name, data, OUTPUTS, INPUTS, scales)
    found = core_values(name, data, scales)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
    assert np.unique(found).size > 8


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_every_gguf_type_equals_the_gguf_package_value_for_value(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    from gguf import quants

    data, _ = random_matrix(name, seed=2)
    expected = quants.dequantize(data, gguf.GGMLQuantizationType[GGUF_TYPES[name]]).reshape(OUTPUTS, INPUTS)
    np.testing.assert_array_equal(core_values(name, data, None), expected)


@pytest.mark.parametrize("name", LOW_BITS)
def test_every_index_sign_and_scale_of_low_bit_types_equals_the_gguf_package_bit_for_bit(name: str) -> None:
    """2,048 blocks of random bytes: of each block 32 or 64 indices, so that every entry of a grid
    occurs with every seed worth mentioning; then every value of every byte. Factors are 1 and -1.
    """
    gguf = pytest.importorskip("gguf")
    from gguf import quants

    facts = _core.weight_formats()[name]
    blocks = np.random.default_rng(6).integers(0, 256, (2304, facts["block_bytes"]), dtype=np.uint8)
    blocks[2048:] = np.arange(256)[:, None] + 37 * np.arange(facts["block_bytes"])
    for at in SCALES_AT.get(name, (0,)):
        blocks[:, at : at + 2] = np.where(np.arange(2304) % 2, np.float16(1), np.float16(-1))[:, None].view(np.uint8)
    if name == "iq1_m":
        blocks[:, 49:56:2] = blocks[:, 49:56:2] & 15 | np.array([0, 0, 0xC0, 0x30], np.uint8)
    expected = quants.dequantize(blocks, gguf.GGMLQuantizationType[GGUF_TYPES[name]])
    found = np.asarray(_core.dequantize(name, blocks, 2304, facts["block"]))
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(("name", "bits"), [("int8_g32", 8), ("int4_g32", 4)])
def test_quantisation_at_load_gives_the_nearest_integers_of_groups_of_32(name: str, bits: int) -> None:
    rng = np.random.default_rng(3)
    values = rng.standard_normal((7, 100)).astype(np.float32) * np.float32(0.02)
    values[2, 32:64] = 0
    values[3] *= np.float32(1e-30)
    found = np.asarray(_core.requantize(name, values))
    np.testing.assert_array_equal(found, requantized(values, name))
    largest = np.abs(values[:, :96]).reshape(7, 3, 32).max(axis=2, keepdims=True)
    error = np.abs(found - values)[:, :96].reshape(7, 3, 32)
    assert (error <= 0.50001 * largest / (2 ** (bits - 1) - 1)).all()


def test_sizes_that_do_not_fit_unknown_names_and_damaged_values_are_refused() -> None:
    data, scales = random_matrix("mxfp4", seed=4)
    with pytest.raises(ConfigError, match="takes 33280 bytes and 2080 of scales, got 33280 and 0"):
        _core.dequantize("mxfp4", data, OUTPUTS, INPUTS)
    with pytest.raises(ConfigError, match="a multiple of 256 inputs"):
        _core.dequantize("q4_k", data, 2, 100)
    with pytest.raises(ConfigError, match="contiguous"):
        _core.dequantize("mxfp4", data[:, ::2], OUTPUTS, INPUTS, scales)
    with pytest.raises(UnsupportedError, match="'q8_k' is not known here; known are f32, f16"):
        _core.dequantize("q8_k", data, OUTPUTS, INPUTS)
    values = np.zeros((2, 32), np.float32)
    values[1, 5] = np.nan
    with pytest.raises(CheckpointError, match="output 1, input 5"):
        _core.requantize("int8_g32", values)


@pytest.mark.parametrize("isa", [isa for isa in _core.supported_isas() if isa != "reference"])
@pytest.mark.parametrize(
    "name",
    [name for name, facts in _core.weight_formats().items() if facts["has_panels"] and name not in ("f32", "f16", "bf16")],
)
def test_kernels_compute_with_exactly_the_dequantised_values(isa: str, name: str) -> None:
    """The layer in the format itself against a float32 layer loaded with `_core.dequantize`'s (or
    requantize's) values.
    """
    size = 256
    rng = np.random.default_rng(5)
    spec = {"in_size": size, "intermediate_size": size, "out_size": size}
    packed = _core.FfnOracle(spec=spec, num_experts=1, weight_dtype=name, isa=isa)
    wide = _core.FfnOracle(spec=spec, num_experts=1, weight_dtype="f32", isa=isa)
    is_stored = _core.weight_formats()[name]["is_stored"]
    sources, values = {}, {}
    for part in ("gate", "up", "down"):
        if is_stored:
            data, scales = random_square(name, size, rng)
            sources[part] = (name, data, size, size, b"" if scales is None else scales)
            values[part] = np.asarray(_core.dequantize(*sources[part]))
        else:
            sources[part] = rng.standard_normal((size, size)).astype(np.float32) / np.float32(16)
            values[part] = np.asarray(_core.requantize(name, sources[part]))
    packed.load_expert(0, **sources)
    wide.load_expert(0, **values)
    for tokens in (1, 3, 20):
        rows = rng.standard_normal((tokens, size)).astype(np.float32)
        batch = (rows, np.ones(tokens, np.uint16), np.zeros(tokens, np.uint16), np.ones(tokens, np.float32))
        found, expected = np.asarray(packed.forward(*batch)), np.asarray(wide.forward(*batch))
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
        assert np.isfinite(found).all()
        assert np.abs(found).max() > 0


@pytest.mark.parametrize("isa", [isa for isa in _core.supported_isas() if isa != "reference"])
@pytest.mark.parametrize("weight_dtype", ["bf16", "int4_g32", "q4_k+q6_k", "fp8_e4m3_b128"])
def test_predicted_bytes_are_those_a_layer_holds(isa: str, weight_dtype: str) -> None:
    spec = {"in_size": 512, "intermediate_size": 256, "out_size": 300}
    layer = _measure.LayerBenchmark(spec=spec, num_experts=3, num_layers=1, weight_dtype=weight_dtype, isa=isa, num_threads=1)
    assert _core.packed_bytes(spec=spec, num_experts=3, weight_dtype=weight_dtype, isa=isa) == layer.resident_bytes()


def random_square(name: str, size: int, rng: np.random.Generator) -> tuple[Any, Any]:
    """Random bits with small scales, so that nothing overflows in two projections."""
    facts = _core.weight_formats()[name]
    blocks = rng.integers(0, 256, (size, size // facts["block"], facts["block_bytes"]), dtype=np.uint8)
    if name == "fp8_e4m3_b128":
        blocks[(blocks & 127) == 127] = 3
        return blocks, np.full((2, 2), 1e-3, np.float32)
    if name == "mxfp4":
        return blocks, np.full((size, size // 32), 120, np.uint8)
    for at in SCALES_AT.get(name, (0,)):
        blocks[..., at : at + 2] = np.full((*blocks.shape[:2], 1), 1e-4, np.float16).view(np.uint8)
    if name == "gguf_mxfp4":
        blocks[..., 0] = 120
    if name == "iq1_m":
        blocks[..., 49:56:2] = blocks[..., 49:56:2] & 15 | np.array([0x80, 0xA0, 0, 0], np.uint8)  # 1e-5
    if name == "nvfp4":
        blocks[..., :4] = 1
    if name == "int4_zp":
        put_words(blocks, np.full(blocks.shape[:2], 1e-4), rng)
    return blocks, None
