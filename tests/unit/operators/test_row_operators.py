"""The row operators of `_core` on torch's memory: within derived bounds of torch in float64, and
with equal bits for a row alone and in any company, on every kernel set, with gaps between rows.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from dflash_moe import _core
from dflash_moe.errors import ConfigError, UnsupportedError

NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
# Half a unit in the last place of values in [1, 2): what rounding once can err, relatively.
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
EPS = ROUNDING[torch.float32]
ISAS = [name for name in _core.supported_isas() if name != "reference"]
POOLS = {isa: _core.HostPool(threads=2, isa=isa) for isa in ISAS}
WIDTHS = [1, 37, 60, 64, 2880]

every_isa = pytest.mark.parametrize("isa", ISAS)
every_dtype = pytest.mark.parametrize("dtype", list(NAMES), ids=NAMES.get)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(rows: torch.Tensor, gap: int = 5) -> torch.Tensor:
    """The same rows with a gap of elements behind each."""
    wide = torch.full((rows.shape[0], rows.shape[1] + gap), 777.0, dtype=rows.dtype)
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


def place(rows: torch.Tensor) -> tuple[int, int, str]:
    return rows.data_ptr(), rows.stride(0) * rows.element_size(), NAMES[rows.dtype]


def last_rounding(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What rounding a value near `exact` to the dtype errs by; its subnormals have a fixed step."""
    facts = torch.finfo(dtype)
    return ROUNDING[dtype] * exact.abs() * 1.01 + facts.smallest_normal * facts.eps / 2


def norm(
    isa: str, rows: torch.Tensor, weight: torch.Tensor | None, *, is_layer: bool = False, **settings: object
) -> torch.Tensor:
    out = strided(torch.zeros_like(rows))
    function = _core.layer_norm if is_layer else _core.rms_norm
    address = 0 if weight is None else weight.data_ptr()
    function(POOLS[isa], *place(rows), *rows.shape, *place(out), epsilon=1e-6, weight_address=address, **settings)
    return out


def exact_rms(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = rows.double()
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.double()


def norm_error(width: int) -> float:
    """The relative error of a norm before its output is rounded: that of a chain of
    width / 16 + 16 positive terms, halved by the root, and of six more roundings (quotient,
    epsilon, root, reciprocal, two products).
    """
    return ((width / 16 + 16) / 2 + 6) * EPS * 1.01


@every_isa
@every_dtype
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_is_within_the_bound_of_float64(isa: str, dtype: torch.dtype, width: int) -> None:
    weight = normal(width, seed=1)
    for scale in (1.0, 1e-4, 1e2):
        rows = strided((normal(9, width, seed=2) * scale).to(dtype))
        exact = exact_rms(rows, weight)
        error = (norm(isa, rows, weight).double() - exact).abs()
        assert (error <= norm_error(width) * exact.abs() + last_rounding(exact, dtype)).all()
    exact = exact_rms(rows, 1 + weight.double())
    error = (norm(isa, rows, weight, adds_one=True).double() - exact).abs()
    assert (error <= (norm_error(width) + EPS) * exact.abs() + last_rounding(exact, dtype)).all()


@every_isa
@every_dtype
@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm_is_within_the_bound_of_float64(isa: str, dtype: torch.dtype, width: int) -> None:
    rows, weight, bias = normal(9, width, seed=3, dtype=dtype), normal(width, seed=4), normal(width, seed=5)
    exact = torch.nn.functional.layer_norm(rows.double(), (width,), weight.double(), bias.double(), 1e-6)
    found = norm(isa, rows, weight, is_layer=True, bias_address=bias.data_ptr()).double()
    # The mean errs by EPS per addition relative to the largest value; over the deviation, that is
    # what each normalised value errs by, and the deviation itself by as much again.
    values = rows.double()
    deviation = torch.sqrt(values.var(-1, keepdim=True, unbiased=False) + 1e-6)
    mean_error = (width / 16 + 18) * EPS * values.abs().amax(-1, keepdim=True) / deviation
    plain = (values - values.mean(-1, keepdim=True)) / deviation
    bound = (mean_error * (1 + plain.abs()) + norm_error(width) * plain.abs()) * weight.abs()
    assert ((found - exact).abs() <= bound + EPS * exact.abs() + last_rounding(exact, dtype)).all()


@every_isa
@every_dtype
def test_a_norm_keeps_the_sum_with_the_residual_and_normalises_it_as_rounded(isa: str, dtype: torch.dtype) -> None:
    rows, stream, weight = normal(5, 60, seed=6, dtype=dtype), strided(normal(5, 60, seed=7, dtype=dtype)), normal(60, seed=8)
    expected = (rows.float() + stream.float()).to(dtype)
    address, stride_bytes, name = place(stream)
    residual = {"residual_address": address, "residual_stride_bytes": stride_bytes, "residual_dtype": name}
    kept = {"sum_address": address, "sum_stride_bytes": stride_bytes, "sum_dtype": name}
    out = norm(isa, rows, weight, normalizes_rounded_sum=True, **residual, **kept)
    assert torch.equal(stream, expected)
    assert torch.equal(out, norm(isa, expected, weight))


def rotated(isa: str, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, **form: object) -> torch.Tensor:
    out = strided(torch.zeros_like(rows))
    _core.rotate(
        POOLS[isa], *place(rows), rows.shape[0], heads, rows.shape[1] // heads, *place(out), cos_address=cos.data_ptr(),
        sin_address=sin.data_ptr(), table_stride_bytes=cos.stride(0) * 4, **form,
    )  # fmt: skip
    return out


def pairs_of(values: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    if layout == "halves":
        first, second = values.chunk(2, dim=-1)
        return first, second
    return values[..., 0::2], values[..., 1::2]


@every_isa
@every_dtype
@pytest.mark.parametrize("layout", ["halves", "interleaved", "interleaved_to_halves"])
@pytest.mark.parametrize(("head_dim", "rotary_dim", "offset"), [(64, 64, 0), (37, 26, 0), (60, 10, 50)])
def test_rotary_embedding_is_within_two_roundings_of_float64(
    isa: str, dtype: torch.dtype, layout: str, head_dim: int, rotary_dim: int, offset: int
) -> None:
    heads, num_rows = 3, 6
    rows = strided(normal(num_rows, heads * head_dim, seed=9, dtype=dtype))
    angle = torch.outer(torch.arange(num_rows) * 97.0, 1e4 ** (-torch.arange(rotary_dim // 2) / rotary_dim))
    cos, sin = angle.cos(), angle.sin()
    out = rotated(isa, rows, cos, sin, heads, rotary_dim=rotary_dim, rotary_offset=offset, layout=layout)
    before, after = (t.reshape(num_rows, heads, head_dim) for t in (rows, out))
    x1, x2 = (part.double() for part in pairs_of(before[..., offset : offset + rotary_dim], layout))
    y1, y2 = pairs_of(after[..., offset : offset + rotary_dim], "interleaved" if layout == "interleaved" else "halves")
    c, s = cos.double()[:, None], sin.double()[:, None]
    for y, exact, size in ((y1, x1 * c - x2 * s, (x2 * s).abs()), (y2, x2 * c + x1 * s, (x1 * s).abs())):
        assert ((y.double() - exact).abs() <= EPS * (size + exact.abs()) * 1.01 + last_rounding(exact, dtype)).all()
    assert torch.equal(after[..., :offset], before[..., :offset])
    assert torch.equal(after[..., offset + rotary_dim :], before[..., offset + rotary_dim :])


def routed(
    isa: str, logits: torch.Tensor, bias: torch.Tensor | None = None, **form: object
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, num_experts = logits.shape
    top_k = int(form["top_k"])  # type: ignore[call-overload]
    ids, weights = torch.full((num_rows, top_k), -1), torch.zeros(num_rows, top_k)
    _core.route(
        POOLS[isa], _core.RouterForm(num_experts=num_experts, **form), *place(logits), num_rows, ids.data_ptr(), "i64",
        weights.data_ptr(), bias_address=0 if bias is None else bias.data_ptr(),
    )  # fmt: skip
    return ids, weights


def lowest_first(values: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the highest values; a stable sort leaves equal ones in ascending order."""
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :count]


# What exp, a sum of up to 256 terms and a quotient err by, relatively.
SCORE_ERROR = (256 / 16 + 16 + 6) * EPS


@every_isa
@pytest.mark.parametrize("num_experts", [8, 37, 60, 256])
def test_softmax_routing_is_torchs_in_float64(isa: str, num_experts: int) -> None:
    logits = strided(normal(33, num_experts, seed=10) * 3)
    top_k = min(4, num_experts)
    probabilities = logits.double().softmax(-1)
    ids, weights = routed(isa, logits, top_k=top_k, normalizes=True, scale=2.5)
    assert torch.equal(ids, lowest_first(probabilities, top_k))
    chosen = probabilities.gather(1, ids)
    exact = 2.5 * chosen / chosen.sum(-1, keepdim=True)
    assert ((weights - exact).abs() <= 3 * SCORE_ERROR * exact).all()
    raw = routed(isa, logits, top_k=top_k)[1]
    assert ((raw - chosen).abs() <= SCORE_ERROR * chosen).all()


@every_isa
def test_sigmoid_routing_in_groups_with_a_bias_is_deepseeks_in_float64(isa: str) -> None:
    logits, bias = normal(33, 256, seed=11), normal(256, seed=12) * 0.1
    scores = logits.double().sigmoid()
    choice = scores + bias.double()
    groups = choice.view(-1, 8, 32).topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(groups).scatter_(1, lowest_first(groups, 4), 1).repeat_interleave(32, dim=1).bool()
    expected = lowest_first(choice.masked_fill(~kept, -math.inf), 8)
    form = {"num_groups": 8, "topk_groups": 4, "normalizes": True, "sum_epsilon": 1e-20, "scale": 2.5}
    ids, weights = routed(isa, logits, bias, top_k=8, score="sigmoid", **form)
    assert torch.equal(ids, expected)
    chosen = scores.gather(1, expected)
    exact = 2.5 * chosen / chosen.sum(-1, keepdim=True)
    assert ((weights - exact).abs() <= 3 * SCORE_ERROR * exact).all()


@every_isa
@pytest.mark.parametrize("weight", ["softmax_of_chosen", "sigmoid_of_chosen"])
def test_routing_by_logits_weighs_the_chosen_alone(isa: str, weight: str) -> None:
    logits = normal(33, 32, seed=13)
    ids, weights = routed(isa, logits, top_k=4, score="identity", weight=weight)
    assert torch.equal(ids, lowest_first(logits, 4))
    chosen = logits.double().gather(1, ids)
    exact = chosen.softmax(-1) if weight == "softmax_of_chosen" else chosen.sigmoid()
    assert ((weights - exact).abs() <= SCORE_ERROR * exact).all()


@every_isa
@pytest.mark.parametrize("threshold", [0.02, 0.4])
def test_a_sparse_mixer_is_phimoe_s_in_float64(isa: str, threshold: float) -> None:
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    logits = normal(65, 16, seed=15) * 2
    # Rows whose second logit is near the first, and rows of equal logits.
    first = logits[:20].amax(-1, keepdim=True)
    logits[:20, 3:4] = first * (1 - threshold / 2)
    logits[20:24] = 0.5
    exact, expected = sparsemixer(logits.double(), threshold / 2, training=False, top_k=2)
    ids, weights = routed(isa, logits, top_k=2, score="identity", weight="sparse_mixer", mixer_threshold=threshold)
    assert torch.equal(ids, expected)
    assert ((weights - exact).abs() <= SCORE_ERROR * exact).all()
    assert (exact < 0.9).any(dim=-1).sum() >= 20


@every_isa
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "identity"])
def test_equal_router_scores_take_the_lowest_ids_and_near_ties_the_higher_score(isa: str, score: str) -> None:
    equal = torch.full((1, 60), 0.25)
    assert routed(isa, equal, top_k=6, score=score)[0].tolist() == [[0, 1, 2, 3, 4, 5]]
    pairs = normal(17, 30, seed=14).repeat_interleave(2, dim=1)
    ids = routed(isa, pairs, top_k=6, score=score)[0]
    assert torch.equal(ids, lowest_first(pairs, 6))
    # Neighbours of 0.25 that are a few units in the last place apart: the choice is by the scores
    # as rounded, of which equal ones take the lowest id.
    near = 0.25 + torch.arange(60).remainder(7)[None] * 2.0**-25
    ids, weights = routed(isa, near, top_k=60, score=score)
    same = weights[:, 1:] == weights[:, :-1]
    assert (weights[:, 1:] <= weights[:, :-1]).all()
    assert (ids[:, 1:] > ids[:, :-1])[same].all()
    if score == "identity":
        assert torch.equal(ids, lowest_first(near, 60))


EXACT_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu_squared": lambda x: torch.relu(x).square(),
    "identity": lambda x: x,
    "sigmoid": torch.sigmoid,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def gated(isa: str, form: _core.GateForm, gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
    out = strided(torch.zeros_like(up))
    _core.apply_gate(POOLS[isa], form, *((0, 0, "f32") if gate is None else place(gate)), *place(up), *up.shape, *place(out))
    return out


@every_isa
@every_dtype
@pytest.mark.parametrize("activation", list(EXACT_ACTIVATIONS))
def test_gates_are_within_the_bound_of_float64(isa: str, dtype: torch.dtype, activation: str) -> None:
    both = normal(9, 2 * 60, seed=15, dtype=dtype)
    gate, up = both[:, :60], both[:, 60:]
    acted = EXACT_ACTIVATIONS[activation](gate.double())
    # activation_test.cc bounds an activation by 4 units of 2^-24 of its argument or of 1.
    slack = 4 * EPS * gate.double().abs().clamp(min=1) * (1 if activation != "relu_squared" else acted.abs().clamp(min=1))
    exact = acted * up.double()
    error = (gated(isa, _core.GateForm(activation=activation), gate, up).double() - exact).abs()
    assert (error <= slack * up.double().abs() + EPS * exact.abs() * 1.01 + last_rounding(exact, dtype)).all()
    alone = gated(isa, _core.GateForm(activation=activation, gate="none"), None, gate.contiguous()).double()
    assert ((alone - acted).abs() <= slack + last_rounding(acted, dtype)).all()


@every_isa
@every_dtype
def test_a_sigmoid_gate_scales_rows_before_they_are_added(isa: str, dtype: torch.dtype) -> None:
    rows, base, gates = (
        normal(9, 60, seed=16, dtype=dtype),
        normal(9, 60, seed=17, dtype=dtype),
        normal(9, 1, seed=18, dtype=dtype),
    )
    out = torch.zeros_like(rows)
    names = ("address", "stride_bytes", "dtype")
    added = {f"base_{name}": value for name, value in zip(names, place(base), strict=True)}
    gate = {f"gate_{name}": value for name, value in zip(names, place(gates), strict=True)}
    _core.add_scaled(POOLS[isa], *place(rows), *rows.shape, *place(out), **added, **gate)
    scaled = rows.double() * gates.double().sigmoid()
    exact = base.double() + scaled
    assert (
        (out.double() - exact).abs() <= 4 * EPS * scaled.abs() + EPS * exact.abs() * 1.01 + last_rounding(exact, dtype)
    ).all()
    _core.add_scaled(POOLS[isa], *place(rows), *rows.shape, *place(out), scale=0.5)
    assert torch.equal(out, rows * 0.5)


@every_isa
def test_argmax_takes_the_lowest_place_among_equals_and_never_a_nan(isa: str) -> None:
    rows = strided(normal(7, 1000, seed=19))
    rows[1] = 2.0
    rows[2, [900, 17, 400]] = 50.0
    rows[3, 0] = math.nan
    rows[4] = math.nan
    rows[5] = -math.inf
    rows[5, 0] = math.nan
    places = torch.full((7,), -1)
    _core.argmax(POOLS[isa], *place(rows), 7, 1000, places.data_ptr())
    expected = torch.where(rows.isnan(), -math.inf, rows).argmax(-1)
    assert places.tolist() == [expected[0], 0, 17, expected[3], 0, 1, expected[6]]


def outputs_of(isa: str, rows: torch.Tensor, tables: torch.Tensor) -> list[torch.Tensor]:
    """What every operator makes of the rows, each of which has a row of cosines and sines."""
    width = rows.shape[1]
    weight, bias = normal(width, seed=20), normal(width, seed=21)
    cos, sin = tables.cos(), tables.sin()
    half = width // 2
    results = [norm(isa, rows, weight), norm(isa, rows, weight, is_layer=True, bias_address=bias.data_ptr())]
    results.append(rotated(isa, rows, cos, sin, 1, rotary_dim=2 * half))
    results.append(rotated(isa, rows, cos, sin, 1, rotary_dim=2 * half, layout="interleaved"))
    for form in (
        {"score": "softmax", "normalizes": True},
        {"score": "sigmoid"},
        {"score": "identity", "weight": "softmax_of_chosen"},
    ):
        results += routed(isa, rows, bias, top_k=min(4, width), **form)
    for activation in EXACT_ACTIVATIONS:
        results.append(gated(isa, _core.GateForm(activation=activation), rows, rows))
    return results


@every_isa
@every_dtype
@pytest.mark.parametrize("width", [1, 37, 60, 64])
def test_a_rows_bits_are_equal_alone_and_in_batches_and_on_every_set(isa: str, dtype: torch.dtype, width: int) -> None:
    rows, tables = normal(64, width, seed=22, dtype=dtype), normal(64, max(width // 2, 1), seed=23)
    rows[5, 0] = math.nan
    rows[6, -1] = math.inf
    alone = [outputs_of(isa, rows[r : r + 1].clone(), tables[r : r + 1].clone()) for r in range(64)]
    for count in (2, 17, 64):
        together = outputs_of(isa, strided(rows[:count]), tables[:count].clone())
        for index, result in enumerate(together):
            expected = torch.cat([outputs[index] for outputs in alone[:count]])
            assert torch.equal(result.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
    for result, portable in zip(together, outputs_of("scalar", rows, tables), strict=True):
        assert torch.equal(result.contiguous().view(torch.uint8), portable.contiguous().view(torch.uint8))


def test_rows_split_over_threads_have_the_bits_of_one_thread() -> None:
    rows, weight = normal(700, 2880, seed=24, dtype=torch.bfloat16), normal(2880, seed=25)
    one, four = (_core.HostPool(threads=threads, isa=ISAS[-1]) for threads in (1, 4))
    found = []
    for pool in (one, four):
        out = torch.zeros_like(rows)
        _core.rms_norm(pool, *place(rows), *rows.shape, *place(out), epsilon=1e-6, weight_address=weight.data_ptr())
        found.append(out)
    assert torch.equal(*found)


def test_arguments_that_cannot_be_are_refused_by_name() -> None:
    rows = normal(2, 8, seed=26)
    pool, at = POOLS[ISAS[0]], place(rows)
    with pytest.raises(ConfigError, match="0 values"):
        _core.rms_norm(pool, *at, 2, 0, *at, epsilon=1e-6)
    with pytest.raises(ConfigError, match="out steps by 4 bytes"):
        _core.rms_norm(pool, *at, 2, 8, at[0], 4, "f32", epsilon=1e-6)
    with pytest.raises(ConfigError, match="dtype 'f64'"):
        _core.rms_norm(pool, at[0], at[1], "f64", 2, 8, *at, epsilon=1e-6)
    with pytest.raises(ConfigError, match="score 'tanh' is not allowed; choose from softmax, sigmoid, identity"):
        _core.RouterForm(num_experts=8, top_k=2, score="tanh")
    with pytest.raises(ConfigError, match="layout 'quarters'"):
        rotated(ISAS[0], rows, rows, rows, 1, rotary_dim=8, layout="quarters")
    with pytest.raises(UnsupportedError, match="activation 'swish'"):
        _core.GateForm(activation="swish")
    with pytest.raises(UnsupportedError, match="gate_max is nan"):
        _core.GateForm(gate_max=math.nan)
