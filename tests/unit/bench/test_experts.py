"""`bench experts` on a tiny layer: every field of the interface, batches as routed, counts that
agree with each other.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dflash_moe import _core, _measure
from dflash_moe.bench.expert_batch import ExpertShape, make_batch
from dflash_moe.bench.experts import NUMERICS, ExpertsParams, ratios, run_experts
from dflash_moe.errors import ConfigError

SHAPE = ExpertShape(hidden_size=64, moe_intermediate_size=32, num_experts=4, top_k=2)
PROMISED = {
    "format", "tokens", "rows_per_expert", "hidden_size", "moe_intermediate_size", "num_experts", "top_k", "threads", "isa",
    "routing", "weights_from", "backend", "kernel", "gflops", "bytes_per_s", "peak_gflops", "peak_bytes_per_s",
    "samples_s", "median_s", "p95_s",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_moe.bench.experts.ROTATION_BYTES", 1 << 20)
    monkeypatch.setattr("dflash_moe.bench.experts.PEAK_READ_BYTES", 1 << 20)
    monkeypatch.setattr("dflash_moe.bench.experts.SAMPLE_S", 1e-4)


def tiny(**changes: object) -> ExpertsParams:
    defaults = {
        "shapes": (SHAPE,), "formats": ("bf16",), "threads": (1,), "repeat": 2,
        "numerics": ("f32-canonical",), "tokens": (1, 8), "zipf_tokens": (8,), "cache_tokens": (1,),
    }  # fmt: skip
    return ExpertsParams(**(defaults | changes))  # type: ignore[arg-type]


def test_every_row_has_the_promised_fields_and_rates_that_follow_from_its_median() -> None:
    result = run_experts(tiny())
    assert result.complete
    ours = [row for row in result.rows if row["backend"] == "cpu"]
    assert [(row["tokens"], row["routing"], row["weights_from"]) for row in ours] == [
        (1, "uniform", "dram"), (8, "uniform", "dram"), (8, "zipf", "dram"), (1, "uniform", "cache"),
    ]  # fmt: skip
    for row in result.rows:
        assert row.keys() >= PROMISED
        assert row["gflops"] == pytest.approx(6e-9 * row["tokens"] * 2 * 64 * 32 / row["median_s"])
        assert row["bytes_per_s"] <= 3 * 64 * 32 * 2 * 4 / row["median_s"]
        assert row["peak_gflops"] > 0
        assert row["peak_bytes_per_s"] > 0


def test_torch_runs_the_same_cases_and_the_summary_compares_with_its_fastest() -> None:
    pytest.importorskip("torch")
    result = run_experts(tiny(tokens=(8,), zipf_tokens=(), cache_tokens=()))
    names = {row["name"] for row in result.rows}
    assert names >= {"bf16", "torch_linear_bf16"}
    (compared,) = result.summary
    fastest = min(row["median_s"] for row in result.rows if row["backend"] == "torch")
    own = next(row["median_s"] for row in result.rows if row["backend"] == "cpu")
    assert compared["ratio"] == pytest.approx(fastest / own)
    assert ratios([row for row in result.rows if row["backend"] == "cpu"]) == []


@pytest.mark.parametrize("routing", ["uniform", "zipf"])
def test_a_batch_has_top_k_different_experts_a_row_in_ascending_order(routing: str) -> None:
    batch = make_batch(ExpertShape(num_experts=32, top_k=8), 500, routing, seed=3)
    ids = batch.expert_ids.reshape(500, 8)
    assert (np.diff(ids.astype(int), axis=1) > 0).all()
    assert batch.weights.reshape(500, 8).sum(axis=1) == pytest.approx(np.ones(500), rel=1e-5)
    loads = np.bincount(batch.expert_ids, minlength=32)
    assert (loads.max() > 3 * loads.min()) == (routing == "zipf")


def test_the_kernels_compute_what_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from dflash_moe.bench import torch_experts

    layers = torch_experts.TorchLayers.create(SHAPE, "f32", 1)
    batch = make_batch(SHAPE, 8, "uniform", seed=1)
    routed = torch_experts._route(batch, layers)
    with torch.inference_mode():
        looped = torch_experts._linear_loop(layers.gate_up[0], layers.down[0], routed)
        grouped = torch_experts._grouped(layers.gate_up[0], layers.down[0], routed)
    oracle = _core.FfnOracle(
        spec={"in_size": 64, "intermediate_size": 32, "out_size": 64}, num_experts=4, weight_dtype="f32", isa="reference"
    )
    for expert in range(4):
        gate, up = layers.gate_up[0][expert].chunk(2)
        oracle.load_expert(expert, gate=gate.numpy(), up=up.numpy(), down=layers.down[0][expert].numpy())
    expected = oracle.forward(batch.rows, batch.row_counts, batch.expert_ids, batch.weights)
    for found in (looped, grouped):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-8)


def test_an_unknown_format_and_too_little_memory_are_refused_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'q9' has no kernel to measure"):
        run_experts(tiny(formats=("q9",)))
    monkeypatch.setattr("dflash_moe.bench.experts.memory_available", lambda: 1000)
    with pytest.raises(ConfigError, match="formats with fewer bytes"):
        run_experts(tiny())


@pytest.mark.parametrize(
    "fmt",
    [name for name, facts in _core.weight_formats().items() if facts["has_panels"] and name not in ("f32", "f16", "bf16")],
)
def test_every_quantised_format_is_measured_on_a_width_it_can_cut(fmt: str) -> None:
    result = run_experts(
        tiny(
            shapes=(dataclasses.replace(SHAPE, hidden_size=256),), formats=(fmt,), tokens=(8,), zipf_tokens=(), cache_tokens=()
        )
    )
    row = result.rows[0]
    block = _core.weight_formats()[fmt]["block"]
    assert (row["format"], row["backend"], row["kernel"]) == (fmt, "cpu", "f32-canonical")
    assert row["moe_intermediate_size"] == max(32, block)
    # far below bf16's
    assert row["bytes_per_s"] * row["median_s"] < 0.7 * 3 * 256 * row["moe_intermediate_size"] * 2 * 4


@pytest.mark.parametrize("isa", _core.supported_isas())
def test_peaks_of_every_instruction_set_are_positive(isa: str) -> None:
    assert min(_measure.multiply_add_per_s(isa, 1, 3, 0.5)) > 0
    assert min(_measure.read_bytes_per_s(isa, 2, 2, 1 << 20)) > 0
    with pytest.raises(ConfigError, match="1..1024 threads"):
        _measure.multiply_add_per_s(isa, 0, 3)


def test_int8_groups_stand_beside_f32_canonical_with_a_peak_of_their_own_where_they_take_the_format() -> None:
    one = {"tokens": (8,), "zipf_tokens": (), "cache_tokens": ()}
    result = run_experts(tiny(formats=("q8_0", "bf16"), numerics=NUMERICS, with_torch=False, **one))
    has_bf16 = "bf16-dot" in _core.numerics_classes(_core.best_isa())
    assert [(row["name"], row["kernel"]) for row in result.rows] == [
        ("q8_0", "f32-canonical"), ("q8_0_int8-groups", "int8-groups"), ("bf16", "f32-canonical"),
        *([("bf16_bf16-dot", "bf16-dot")] if has_bf16 else []),
    ]  # fmt: skip
    floats, integers = (row["peak_gflops"] for row in result.rows[:2])
    assert floats != integers  # measured apart
    (alone,) = run_experts(
        tiny(formats=("q8_0",), numerics=("int8-groups",), tokens=(8,), zipf_tokens=(), cache_tokens=())
    ).rows
    assert alone["kernel"] == "int8-groups"


def test_a_class_that_does_not_take_the_format_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="none of the numerics classes int8-groups takes format 'bf16'"):
        run_experts(tiny(numerics=("int8-groups",)))
