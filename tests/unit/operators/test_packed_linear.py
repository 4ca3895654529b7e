"""`_core.PackedLinear` on torch's memory: against float64, and bit for bit between one row and
many, threads, kernel sets, strides and parts.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_moe import _core
from dflash_moe.errors import ConfigError, UnsupportedError, WorkerError

NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
FORMATS = {
    name: facts
    for name, facts in _core.weight_formats().items()
    if facts["is_stored"] and facts["has_panels"] and name not in NAMES.values()
}
# Where the f16 scales of a block lie, so that random blocks have finite ones; the first of those of
# gguf_mxfp4 is an exponent.
SCALES_AT = {"q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "gguf_mxfp4": ()}
SCALES_AT |= {"q4_1": (0, 2), "q5_1": (0, 2), "q3_k": (108,), "q2_k": (80, 82)}
SETS = ["scalar", "avx2", "avx512", "avx512vnni", "avx512bf16", "neon", "neon_dotprod", "neon_i8mm", "neon_bf16"]
OUTPUTS, INPUTS = 75, 512


def usable_sets() -> list[str]:
    found = []
    for name in SETS:
        try:
            found.append(_core.HostPool(threads=1, isa=name).isa)
        except ConfigError:
            continue
    return found


ISAS = usable_sets()


def pool(threads: int = 1, isa: str = ISAS[-1]) -> _core.HostPool:
    return _core.HostPool(threads=threads, isa=isa)


def floats(rows: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def matrix(weight: torch.Tensor) -> tuple[Any, ...]:
    return (weight.data_ptr(), NAMES[weight.dtype], *weight.shape, *weight.stride())


def bias_of(values: torch.Tensor) -> tuple[Any, ...]:
    return (values.data_ptr(), NAMES[values.dtype], values.numel(), values.stride(0))


def product(
    linear: _core.PackedLinear, rows: torch.Tensor, dtype: torch.dtype, residual: torch.Tensor | None = None, gap: int = 0
) -> torch.Tensor:
    """The outputs in `dtype`, written with a gap of elements behind each row."""
    out = torch.full((rows.shape[0], linear.outputs + gap), 7.0, dtype=dtype)
    linear.run(
        rows.data_ptr(), rows.stride(0) * rows.element_size(), NAMES[rows.dtype], rows.shape[0],
        out.data_ptr(), out.stride(0) * out.element_size(), NAMES[dtype],
        *(() if residual is None else
          (residual.data_ptr(), residual.stride(0) * residual.element_size(), NAMES[residual.dtype])),
    )  # fmt: skip
    assert (out[:, linear.outputs :] == 7.0).all()
    return out[:, : linear.outputs]


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def stored(name: str, outputs: int, seed: int) -> tuple[tuple[Any, ...], list[Any], Any]:
    """(matrix in memory, what keeps it alive, its values) of random valid blocks."""
    rng = np.random.default_rng(seed)
    facts = FORMATS[name]
    blocks = rng.integers(0, 256, (outputs, INPUTS // facts["block"], facts["block_bytes"]), dtype=np.uint8)
    scales: Any = None
    if name == "fp8_e4m3_b128":
        blocks[(blocks & 127) == 127] = 3
        scales = rng.standard_normal((-(-outputs // 128), INPUTS // 128)).astype(np.float32)
    elif name == "mxfp4":
        scales = rng.integers(118, 125, (outputs, INPUTS // 32), dtype=np.uint8)
    elif name == "gguf_mxfp4":
        blocks[..., 0] = rng.integers(118, 125, blocks.shape[:2])
    elif name == "int4_zp":
        factors = (0.01 * rng.standard_normal(blocks.shape[:2])).astype(np.float16).astype(np.float32)
        blocks[..., :4] = (factors.view(np.uint32) | rng.integers(0, 16, factors.shape, np.uint32))[..., None].view(np.uint8)
    else:
        for at in SCALES_AT.get(name, (0,)):
            scale = 0.01 * rng.standard_normal(blocks.shape[:2])
            blocks[..., at : at + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    data = np.ascontiguousarray(blocks.reshape(outputs, -1))
    source: tuple[Any, ...] = (data.ctypes.data, name, outputs, INPUTS, data.shape[1], 0)
    if scales is not None:
        source += (scales.ctypes.data, scales.strides[0])
    values = _core.dequantize(name, data, outputs, INPUTS, b"" if scales is None else scales)
    return source, [data, scales], np.asarray(values)


def assert_near(found: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, added: torch.Tensor | float = 0.0) -> None:
    """Bounds each float32 output by the roundings of its sum: two chains of 256 fmas, one addition
    of them, a bias and a residual (Higham, section 3.1).
    """
    exact = rows.double() @ weight.double().T + added
    size = rows.double().abs() @ weight.double().abs().T + exact.abs() + abs(added)
    assert ((found.double() - exact).abs() <= 262 * 2.0**-24 * size).all()


@pytest.mark.parametrize("dtype", list(NAMES))
def test_a_product_with_bias_and_residual_is_near_float64(dtype: torch.dtype) -> None:
    weight, bias = floats(OUTPUTS, INPUTS, 1, dtype), floats(1, OUTPUTS, 2, dtype)[0]
    linear = _core.PackedLinear(pool(2), [(matrix(weight), bias_of(bias), 0)], numerics="f32-canonical")
    assert (linear.inputs, linear.outputs, linear.formats) == (INPUTS, OUTPUTS, [NAMES[dtype]])
    for num_rows in (1, 3, 50):
        rows, residual = floats(num_rows, INPUTS, 3, dtype), floats(num_rows, OUTPUTS, 4, dtype)
        found = product(linear, rows, torch.float32, residual)
        assert_near(found, weight, rows, residual.double() + bias.double())
        rounded = product(linear, rows, dtype, residual)
        assert torch.equal(bits(rounded), bits(found.to(dtype)))


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_stored_format_is_near_float64_and_gathered_exactly(name: str) -> None:
    source, _keep, values = stored(name, OUTPUTS, seed=5)
    linear = _core.PackedLinear(pool(), [(source, None, 0)], numerics="f32-canonical")
    weight, rows = torch.from_numpy(values), floats(9, INPUTS, 6)
    assert_near(product(linear, rows, torch.float32), weight, rows)
    ids = torch.tensor([OUTPUTS - 1, 0, 33, 33])
    out = torch.empty(4, INPUTS)
    linear.gather(ids.data_ptr(), 4, out.data_ptr(), out.stride(0) * 4, "f32")
    assert torch.equal(bits(out), bits(weight[ids]))


@pytest.mark.parametrize("numerics", ["f32-canonical", "int8-groups", "bf16-dot", "bf16-bfdot"])
def test_bits_do_not_depend_on_rows_threads_kernel_sets_or_strides(numerics: str) -> None:
    bf16, bias = floats(OUTPUTS, INPUTS, 7, torch.bfloat16), floats(1, OUTPUTS, 8)[0]
    q4_k, keep, _ = stored("q4_k", 40, seed=9)
    parts = [(matrix(bf16), bias_of(bias), 0), (q4_k, None, 64), (matrix(bf16), None, 10, "int8_g32")]
    expected = None
    for isa in ISAS:
        for threads in (1, 2, 3):
            try:
                linear = _core.PackedLinear(pool(threads, isa), parts, numerics=numerics)
            except UnsupportedError:
                continue
            assert linear.row_width == INPUTS + 64
            wide = floats(40, INPUTS + 100, 10, torch.bfloat16)
            rows = wide[:, : INPUTS + 64]
            found = product(linear, rows, torch.float32, gap=3)
            expected = found if expected is None else expected
            assert torch.equal(bits(found), bits(expected)), (isa, threads)
            for r in (0, 17, 39):
                alone = product(linear, rows[r : r + 1].clone(), torch.float32)
                assert torch.equal(bits(alone), bits(expected[r : r + 1])), (isa, threads, r)
    assert expected is not None or numerics.startswith("bf16")
    del keep


def test_parts_read_their_own_input_columns() -> None:
    """Per-head matrices, as latent attention has them, each with its own inputs."""
    heads = floats(3 * OUTPUTS, INPUTS, 11).reshape(3, OUTPUTS, INPUTS)
    linear = _core.PackedLinear(pool(2), [(matrix(heads[h]), None, h * INPUTS) for h in range(3)], numerics="f32-canonical")
    rows = floats(5, 3 * INPUTS, 12)
    found = product(linear, rows, torch.float32).reshape(5, 3, OUTPUTS)
    for h in range(3):
        assert_near(found[:, h], heads[h], rows[:, h * INPUTS : (h + 1) * INPUTS])


def test_transposed_weights_and_those_of_a_file_are_the_same(tmp_path: Path) -> None:
    weight, rows = floats(OUTPUTS, INPUTS, 13, torch.float16), floats(4, INPUTS, 14)
    transposed = weight.T.contiguous().T
    assert transposed.stride() == (1, OUTPUTS)
    path = tmp_path / "weights"
    path.write_bytes(weight.numpy().tobytes())
    in_file = (_core.MappedFile(str(path)), 0, "f16", OUTPUTS, INPUTS, INPUTS, 1)
    found = [
        product(_core.PackedLinear(pool(), [(source, None, 0)], numerics="f32-canonical"), rows, torch.float32)
        for source in (matrix(weight), matrix(transposed), in_file)
    ]
    assert torch.equal(bits(found[0]), bits(found[1]))
    assert torch.equal(bits(found[0]), bits(found[2]))


def test_a_class_that_does_not_take_a_format_leaves_it_to_the_default() -> None:
    q8_0, _keep, _ = stored("q8_0", 16, seed=15)
    weight = floats(16, INPUTS, 16)
    linear = _core.PackedLinear(pool(), [(q8_0, None, 0), (matrix(weight), None, 0)], numerics="int8-groups")
    assert linear.numerics == ["int8-groups", "f32-canonical"]
    assert linear.formats == ["q8_0", "f32"]
    assert linear.resident_bytes >= 16 * INPUTS * 4 + 16 * INPUTS // 32 * 34


def test_a_residual_may_be_the_output() -> None:
    weight, rows = floats(OUTPUTS, INPUTS, 17, torch.bfloat16), floats(6, INPUTS, 18, torch.bfloat16)
    linear = _core.PackedLinear(pool(2), [(matrix(weight), None, 0)], numerics="f32-canonical")
    stream = floats(6, OUTPUTS, 19, torch.bfloat16)
    expected = product(linear, rows, torch.bfloat16, stream)
    step = stream.stride(0) * 2
    linear.run(rows.data_ptr(), rows.stride(0) * 2, "bf16", 6, stream.data_ptr(), step, "bf16", stream.data_ptr(), step, "bf16")
    assert torch.equal(bits(stream), bits(expected))


def test_a_value_beyond_the_output_dtype_is_an_error() -> None:
    weight, rows = torch.ones(OUTPUTS, INPUTS), torch.ones(9, INPUTS)
    rows[4] = 1000.0
    linear = _core.PackedLinear(pool(2), [(matrix(weight), None, 0)], numerics="f32-canonical")
    with pytest.raises(WorkerError, match="row 4, column 0"):
        product(linear, rows, torch.float16)
    assert product(linear, rows, torch.bfloat16)[4, 0] == 512_000


def test_wrong_parts_and_ids_are_refused() -> None:
    weight, narrow = floats(8, 64, 20), floats(8, 32, 21)
    with pytest.raises(ConfigError, match="part 1"):
        _core.PackedLinear(pool(), [(matrix(weight), None, 0), (matrix(narrow), None, 0)], numerics="f32-canonical")
    with pytest.raises(ConfigError, match="at least one part"):
        _core.PackedLinear(pool(), [], numerics="f32-canonical")
    with pytest.raises(ConfigError, match="3 or 4 fields"):
        _core.PackedLinear(pool(), [(matrix(weight), None)], numerics="f32-canonical")
    with pytest.raises(UnsupportedError, match="part 0"):
        _core.PackedLinear(pool(), [(matrix(weight), None, 0, "bf16")], numerics="f32-canonical")
    linear = _core.PackedLinear(pool(), [(matrix(weight), None, 0)], numerics="f32-canonical")
    ids, out = torch.tensor([0, 8]), torch.empty(2, 64)
    with pytest.raises(ConfigError, match="row 8 of a matrix with 8 rows"):
        linear.gather(ids.data_ptr(), 2, out.data_ptr(), 256, "f32")


def test_several_layers_at_once_give_the_bits_of_each_alone():
    shared = pool(2)
    weights = [floats(outputs, 96, seed, torch.bfloat16) for seed, outputs in enumerate((75, 1, 40))]
    linears = [_core.PackedLinear(shared, [(matrix(weight), None, 0)], numerics="f32-canonical") for weight in weights]
    rows = floats(9, 96, 7)
    outs = [torch.empty(9, len(weight)) for weight in weights]
    places = tuple((out.data_ptr(), 4 * out.shape[1], "f32") for out in outs)
    _core.run_together(tuple(linears), rows.data_ptr(), 4 * 96, "f32", 9, places)
    for linear, out in zip(linears, outs, strict=True):
        assert torch.equal(out, product(linear, rows, torch.float32))


def test_layers_of_several_pools_and_outputs_that_do_not_match_are_refused():
    weight, rows, out = floats(4, 32, 1), floats(1, 32, 2), torch.empty(1, 4)
    first, other = (_core.PackedLinear(pool(), [(matrix(weight), None, 0)], numerics="f32-canonical") for _ in range(2))
    place = (out.data_ptr(), 16, "f32")
    for linears, outs, text in (
        ((first, other), (place, place), "several pools"), ((first,), (place, place), "an output for each"),
        ((), (), "one or more"), ((first,), (place[:2],), "address, stride"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=text):
            _core.run_together(linears, rows.data_ptr(), 128, "f32", 1, outs)
