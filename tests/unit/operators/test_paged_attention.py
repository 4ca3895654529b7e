"""Paged attention through the bindings: near float64 within a derived bound, and a row's bits its
own, whatever is computed beside it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from dflash_moe import _core
from dflash_moe.errors import ConfigError, WorkerError

ISAS = [isa for isa in _core.supported_isas() if isa != "reference"]
U = 2.0**-24  # half a unit in the last place of float32
BLOCK = 16


@dataclass
class Layer:
    """The sizes of a layer and the form of its attention."""

    num_heads: int = 4
    num_kv_heads: int = 2
    key_size: int = 64
    value_size: int = 64
    dtype: str = "f32"
    form: dict[str, Any] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        return float(np.float32(self.form.get("scale", self.key_size**-0.5)))


@dataclass
class Tokens:
    """One sequence: queries, keys and values [num_tokens, heads, size]."""

    q: Any
    k: Any
    v: Any


def tokens_of(layer: Layer, count: int, seed: int = 1, spread: float = 1.0) -> Tokens:
    random = np.random.default_rng(seed)

    def normal(heads: int, size: int) -> Any:
        return random.standard_normal((count, heads, size)).astype(np.float32)

    return Tokens(
        normal(layer.num_heads, layer.key_size) * np.float32(spread),
        normal(layer.num_kv_heads, layer.key_size),
        normal(layer.num_kv_heads, layer.value_size),
    )


def pages(layer: Layer, num_blocks: int) -> _core.KvLayer:
    """Returns a layer whose every token is NaN until something is stored."""
    kv = _core.KvLayer(num_blocks, layer.num_kv_heads, layer.key_size, layer.value_size, layer.dtype)
    count = num_blocks * BLOCK
    nothing = np.full((count, layer.num_kv_heads * max(layer.key_size, layer.value_size)), np.nan, np.float32)
    append(kv, np.arange(count), nothing, nothing)
    return kv


def append(kv: _core.KvLayer, slots: Any, k: Any, v: Any, dtype: str = "f32") -> None:
    slots = np.asarray(slots, np.int64)
    k, v = np.ascontiguousarray(k), np.ascontiguousarray(v)
    kv.append(slots.ctypes.data, len(slots), k.ctypes.data, k.strides[0], dtype, v.ctypes.data, v.strides[0], dtype)


def store(kv: _core.KvLayer, tokens: Tokens, table: Any, first: int, end: int) -> None:
    positions = np.arange(first, end)
    append(kv, table[positions // BLOCK] * BLOCK + positions % BLOCK, tokens.k[first:end], tokens.v[first:end])


def attend(
    layer: Layer, kv: _core.KvLayer, rows: list[tuple[Tokens, Any, int, int]], isa: str = ISAS[-1], threads: int = 1
) -> Any:
    """Returns [num_rows, num_heads, value_size] for (tokens, block table, first, count) rows."""
    plan = _core.AttentionPlan([(np.asarray(table, np.int32), first, count) for _, table, first, count in rows])
    q = np.concatenate([tokens.q[first : first + count] for tokens, _, first, count in rows])
    out = np.full((plan.num_rows, layer.num_heads, layer.value_size), 7, np.float32)
    sinks = np.asarray(layer.form.get("sinks", []), np.float32)
    _core.paged_attention(
        _core.HostPool(threads=threads, isa=isa), kv, plan, q.ctypes.data, q.strides[0], "f32", layer.num_heads,
        out.ctypes.data, out.strides[0], "f32", scale=layer.scale, window=layer.form.get("window", 0),
        softcap=layer.form.get("softcap", 0.0), sinks_address=sinks.ctypes.data if sinks.size else 0,
    )  # fmt: skip
    return out


def alone(layer: Layer, tokens: Tokens, first: int, count: int, isa: str = ISAS[-1], threads: int = 1) -> Any:
    """Returns the rows of a sequence that has a layer of its own."""
    table = np.arange((first + count + BLOCK - 1) // BLOCK) + 2
    kv = pages(layer, len(table) + 3)
    store(kv, tokens, table, 0, first + count)
    return attend(layer, kv, [(tokens, table, first, count)], isa, threads)


def rounded(values: Any, dtype: str) -> Any:
    """Returns what pages of the dtype hold of float32 values, in float64."""
    if dtype == "f16":
        return values.astype(np.float16).astype(np.float64)
    if dtype == "bf16":
        bits = values.view(np.uint32)
        return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


def dense_row(layer: Layer, tokens: Tokens, position: int, head: int) -> tuple[Any, Any]:
    """Returns one output in float64 and the most by which float32 may miss it, to first order in U
    and with a tenth for higher orders.

    A product of n elements is wrong by (n + 1) U times its magnitudes, the scale adds U, and a cap
    8 U of the score (division, tanh of 2 ulp, multiplication) while its slope is at most 1. A
    weight takes the errors of its score and of the largest, is rounded to U of its exponent and by
    exp to 2 U; each merge of one tile after another does the last two again. A chain of 256 values,
    the partial sums and two roundings per merge add U each, and the quotient of two such sums takes
    both errors.
    """
    form, group = layer.form, head // (layer.num_heads // layer.num_kv_heads)
    first = max(0, position - form["window"] + 1) if form.get("window") else 0
    q = tokens.q[position, head].astype(np.float64)
    k = rounded(tokens.k[first : position + 1, group], layer.dtype)
    v = rounded(tokens.v[first : position + 1, group], layer.dtype)
    scores, errors = k @ q * layer.scale, np.abs(k) @ np.abs(q) * layer.scale * (layer.key_size + 2) * U
    if form.get("softcap"):
        scores = form["softcap"] * np.tanh(scores / form["softcap"])
        errors = errors + 8 * U * np.abs(scores)
    if form.get("sinks") is not None:  # a key without a value
        scores, errors, v = np.append(scores, form["sinks"][head]), np.append(errors, 0), np.vstack([v, 0 * v[:1]])
    tiles = position // 256 - first // 256 + 2
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    span = scores.max() - scores
    relative = errors + errors.max() + 2 * U * span + 4 * tiles * U
    bound = (weights * (relative + (256 + 2 * tiles) * U)) @ np.abs(v)
    of_sum = weights @ relative + (16 + 16 + 2 * tiles + 2) * U
    return weights @ v, 1.1 * (bound + of_sum * (weights @ np.abs(v))) + 1e-36


SHAPES = [
    Layer(4, 4, 40, 40), Layer(4, 2, 64, 64, "bf16"), Layer(8, 1, 80, 96, "f16"), Layer(16, 1, 96, 80, "bf16"),
    Layer(8, 2, 128, 128, "bf16"), Layer(3, 1, 192, 128), Layer(5, 1, 256, 256, "f16"), Layer(16, 1, 576, 512, "bf16"),
]  # fmt: skip
FORMS: list[dict[str, Any]] = [
    {}, {"window": 37}, {"softcap": 3.0}, {"sinks": True}, {"window": 300, "softcap": 30.0, "sinks": True, "scale": 1.0},
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_attention_is_as_near_to_float64_as_its_roundings_allow(shape: Layer, form: dict[str, Any]) -> None:
    sinks = {"sinks": np.linspace(-4, 4, shape.num_heads, dtype=np.float32)} if form.get("sinks") else {}
    layer = Layer(shape.num_heads, shape.num_kv_heads, shape.key_size, shape.value_size, shape.dtype, {**form, **sinks})
    tokens = tokens_of(layer, 600)
    for first, count in ((0, 20), (590, 10), (520, 1)):
        found = alone(layer, tokens, first, count)
        for row in range(count):
            for head in range(layer.num_heads):
                exact, bound = dense_row(layer, tokens, first + row, head)
                assert (np.abs(found[row, head] - exact) <= bound).all(), (first + row, head)


@pytest.mark.parametrize("spread", [1e-4, 1.0, 1e3])
def test_scores_from_flat_to_one_hot_stay_within_the_bound(spread: float) -> None:
    layer = Layer(2, 1, 64, 64)
    tokens = tokens_of(layer, 530, spread=spread)
    found = alone(layer, tokens, 529, 1)
    for head in range(2):
        exact, bound = dense_row(layer, tokens, 529, head)
        assert (np.abs(found[0, head] - exact) <= bound).all()


@pytest.mark.parametrize("form", FORMS[:3] + [{"sinks": [0.5, -2.0, 3.0, 9.0]}], ids=str)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_every_kernel_set_and_number_of_threads_gives_the_same_bits(form: dict[str, Any], dtype: str) -> None:
    layer = Layer(4, 2, 80, 72, dtype, form)
    tokens = tokens_of(layer, 540)
    expected = alone(layer, tokens, 500, 40, "scalar").tobytes()
    for isa in ISAS:
        for threads in (1, 2, 3):
            assert alone(layer, tokens, 500, 40, isa, threads).tobytes() == expected, (isa, threads)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cuts", [[1, 16, 17, 255, 256, 257, 511], [300], list(range(1, 520, 40))], ids=str)
def test_a_prompt_cut_anywhere_has_the_bits_of_the_whole(isa: str, cuts: list[int]) -> None:
    layer = Layer(6, 2, 64, 64, "bf16", {"window": 400})
    tokens = tokens_of(layer, 520)
    whole = alone(layer, tokens, 0, 520, isa)
    table = np.arange(33)[::-1].copy()
    kv, parts = pages(layer, 33), []
    for first, end in zip([0, *cuts], [*cuts, 520], strict=True):
        store(kv, tokens, table, first, end)
        parts.append(attend(layer, kv, [(tokens, table, first, end - first)], isa, threads=2))
    assert np.concatenate(parts).tobytes() == whole.tobytes()


def test_a_row_beside_others_in_permuted_and_shared_blocks_has_the_bits_of_its_own() -> None:
    layer = Layer(8, 2, 128, 128, "bf16")
    random = np.random.default_rng(5)
    sequences = [
        (tokens_of(layer, count, seed), first) for seed, (count, first) in enumerate([(700, 699), (33, 0), (300, 250)])
    ]
    shared = tokens_of(layer, 700, 0)  # like the first up to token 512
    for ours, others in zip(vars(shared).values(), vars(tokens_of(layer, 700, 9)).values(), strict=True):
        ours[512:] = others[512:]
    expected = [alone(layer, tokens, first, len(tokens.q) - first) for tokens, first in [*sequences, (shared, 650)]]
    for _ in range(3):
        free = list(random.permutation(140))
        kv, rows = pages(layer, 140), []
        for tokens, first in sequences:
            table = np.array([free.pop() for _ in range((len(tokens.q) + 15) // BLOCK)])
            store(kv, tokens, table, 0, len(tokens.q))
            rows.append((tokens, table, first, len(tokens.q) - first))
        table = np.concatenate([rows[0][1][:32], [free.pop() for _ in range(12)]])
        store(kv, shared, table, 512, 700)
        rows.append((shared, table, 650, 50))
        order = random.permutation(4)
        for threads in (1, 2):
            found = attend(layer, kv, [rows[i] for i in order], threads=threads)
            assert found.tobytes() == b"".join(expected[i].tobytes() for i in order)


def test_a_copied_block_and_what_is_read_back_are_what_was_stored() -> None:
    layer = Layer(2, 2, 12, 20, "bf16")
    tokens = tokens_of(layer, 16)
    kv = pages(layer, 4)
    store(kv, tokens, np.array([1]), 0, 16)
    kv.copy_block(1, 3)
    for block in (1, 3):
        k, v = kv.read(block)
        np.testing.assert_array_equal(k.transpose(1, 0, 2), rounded(tokens.k, "bf16"))
        np.testing.assert_array_equal(v.transpose(1, 0, 2), rounded(tokens.v, "bf16"))
    assert np.isnan(kv.read(2)[0]).all()
    assert kv.num_bytes == 4 * 2 * 16 * (12 + 32) * 2  # rows of values are whole vectors


def test_other_dtypes_of_rows_are_widened_and_rounded_once() -> None:
    layer = Layer(2, 1, 32, 32)
    tokens = tokens_of(layer, 20)
    tokens.q, tokens.k, tokens.v = (x.astype(np.float16).astype(np.float32) for x in (tokens.q, tokens.k, tokens.v))
    expected = alone(layer, tokens, 0, 20)
    kv, table = pages(layer, 2), np.arange(2, dtype=np.int32)
    halves = [np.ascontiguousarray(x.astype(np.float16)) for x in (tokens.q, tokens.k, tokens.v)]
    append(kv, np.arange(20), halves[1], halves[2], "f16")
    out = np.zeros((20, 2, 40), np.float16)  # rows with a gap behind them
    q, plan = halves[0], _core.AttentionPlan([(table, 0, 20)])
    np.testing.assert_array_equal(plan.positions, np.arange(20))
    _core.paged_attention(
        _core.HostPool(threads=1, isa=ISAS[-1]), kv, plan, q.ctypes.data, q.strides[0], "f16", 2,
        out.ctypes.data, out.strides[0], "f16", scale=layer.scale,
    )  # fmt: skip
    flat = out.reshape(20, 80)
    np.testing.assert_array_equal(flat[:, :64], expected.reshape(20, 64).astype(np.float16))
    assert not flat[:, 64:].any()


def test_what_does_not_fit_is_refused_by_name() -> None:
    layer = Layer()
    kv = pages(layer, 2)
    tokens = tokens_of(layer, 40)
    with pytest.raises(ConfigError, match="the plan has block 2"):
        attend(layer, kv, [(tokens, [0, 2], 20, 1)])
    with pytest.raises(ConfigError, match="sequence 0 has 1 blocks; 21 tokens need 2"):
        attend(layer, kv, [(tokens, [0], 20, 1)])
    with pytest.raises(ConfigError, match="int32"):
        _core.AttentionPlan([(np.zeros(2, np.int64), 0, 1)])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="slot 32"):
        append(kv, [32], tokens.k[:1], tokens.v[:1])
    with pytest.raises(ConfigError, match="key_size"):
        _core.KvLayer(1, 1, 0, 4, "f32")
    halves = _core.KvLayer(2, 2, 64, 64, "f16")
    with pytest.raises(WorkerError, match="row 1 has a key that exceeds the range of f16"):
        append(halves, [0, 1], np.full((2, 128), [[1], [1e6]], np.float32), np.zeros((2, 128), np.float32))
