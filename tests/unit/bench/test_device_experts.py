"""`bench experts` on a device, tried on the simulated one.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json

import pytest

from dflash_moe.bench.device_experts import DeviceParams, run_device_experts
from dflash_moe.bench.expert_batch import ExpertShape
from dflash_moe.bench.harness import Recorder
from dflash_moe.errors import ConfigError

SHAPE = ExpertShape(hidden_size=64, moe_intermediate_size=32, num_experts=4, top_k=2)


def test_every_format_and_batch_has_a_row_that_names_the_device(tmp_path):
    params = DeviceParams("sim", shape=SHAPE, formats=("bf16", "q8_0"), tokens=(1, 3), zipf_tokens=(), num_layers=2, repeat=2,
                          numerics=("f32-canonical",))  # fmt: skip
    result = run_device_experts(params, recorder=Recorder(tmp_path / "out.json"))
    assert [(row["format"], row["tokens"]) for row in result.rows] == [("bf16", 1), ("bf16", 3), ("q8_0", 1), ("q8_0", 3)]
    for row in result.rows:
        assert row["device"].startswith("sim:0 (")
        assert (row["backend"], row["kernel"], row["moe_intermediate_size"]) == ("sim", "f32-canonical", 32)
        assert len(row["samples_s"]) == 2 * row["samples_per_round"]
        assert 0 < row["device_median_s"] < max(row["samples_s"]), "a device computes within the time its caller waits"
        assert row["gflops"] == pytest.approx(6e-9 * row["tokens"] * 2 * 64 * 32 / row["device_median_s"])
        assert "of_peak_bytes" not in row, "nothing measured a ceiling there"
    stored = json.loads((tmp_path / "out.json").read_text())
    assert stored["complete"]
    assert stored["params"]["layers"] == 2


def test_int8_activations_are_measured_for_the_formats_that_take_them(tmp_path):
    params = DeviceParams("sim", shape=SHAPE, formats=("q8_0", "int4_g32"), tokens=(2,), zipf_tokens=(), num_layers=2, repeat=1,
                          numerics=("int8-groups",))  # fmt: skip
    result = run_device_experts(params, recorder=Recorder(tmp_path / "out.json"))
    assert [(row["format"], row["kernel"]) for row in result.rows] == [("q8_0", "int8-groups"), ("int4_g32", "int8-groups")]


def test_a_class_that_the_device_does_not_compute_is_refused_naming_its_own():
    with pytest.raises(ConfigError, match=r"device sim:0 .* does not compute 'bf16-dot'; its classes: f32-canonical"):
        run_device_experts(DeviceParams("sim", shape=SHAPE, numerics=("bf16-dot",)))


def test_an_unknown_format_and_a_device_that_is_too_small_are_refused():
    with pytest.raises(ConfigError, match="format 'f8' has no kernel to measure"):
        run_device_experts(DeviceParams("sim", formats=("f8",)))
    huge = ExpertShape(hidden_size=8192, moe_intermediate_size=8192, num_experts=4096, top_k=2)
    with pytest.raises(ConfigError, match=r"device sim:0 .*: 4 layers in f32 need 12288.0 GiB, .* are free; 0 such layers fit"):
        run_device_experts(DeviceParams("sim", shape=huge, formats=("f32",)))
