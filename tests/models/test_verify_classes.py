"""`verify` with workers whose class rounds inputs: judged against the class's own truth, and
reported.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.models.families import tiny_options
from dflash_moe import Topology, _core
from dflash_moe.model.make import make_checkpoint
from dflash_moe.topology.numerics import class_on

BF16_CLASS = class_on("bf16", "cpu")

pytestmark = pytest.mark.transformers

# Of what rounding inputs moves, on random weights.
REPORTED_BOUNDS = {BF16_CLASS: (1e-3, 6e-3), "int8-groups": (1e-3, 2e-2), "f16-dot2": (1e-5, 1e-3)}
ASKED = {BF16_CLASS: "activations: bf16", "int8-groups": "activations: int8, weights: int8",
         "f16-dot2": "backend: sim, simulate: hip, activations: f16"}  # fmt: skip
OFFERED = [name for name in ASKED if name in ("f16-dot2", *_core.numerics_classes(_core.best_isa()))]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(replace(tiny_options("mixtral"), dtype="bf16"), directory)
    return directory


def verified(directory, first: str, second: str, dtype: str, **overrides: object):
    from dflash_moe.proofs.verify import verify

    lines = "".join(f"  - {{name: w{at}, threads: 1, address: loopback, {more}}}\n" for at, more in enumerate((first, second)))
    return verify(directory, Topology.parse(f"version: 1\nworkers:\n{lines}"), dtype=dtype, overrides=overrides)


@pytest.mark.parametrize("numerics", OFFERED)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_class_that_rounds_inputs_has_the_error_of_float32_against_its_own_truth(mixtral, numerics, dtype):
    report = verified(mixtral, ASKED[numerics], ASKED[numerics], dtype)
    assert report.excesses == []
    assert report.numerics == {"policy": "exact", "classes": {"w0": numerics, "w1": numerics}, "mixed_layers": []}
    least, most = REPORTED_BOUNDS[numerics]
    for layer in report.layers:
        assert layer.numerics == (numerics,)
        assert least < layer.activation_error < most
        if dtype == "f32":
            assert layer.remote_error < 0.02 * layer.activation_error
            assert layer.class_error == pytest.approx(layer.activation_error, rel=0.01)


def test_classes_that_meet_in_one_layer_are_judged_each_by_its_own_truth(mixtral):
    report = verified(mixtral, "activations: f32", "activations: bf16", "f32", numerics="close", cpu_isa="reference")
    assert report.excesses == []
    assert report.numerics["mixed_layers"] == [0, 1]
    for layer in report.layers:
        assert layer.numerics == (BF16_CLASS, "f32-canonical")
        assert layer.remote_error < 0.02 * layer.activation_error


def test_another_rounding_than_the_classs_is_an_excess(mixtral, monkeypatch):
    from dflash_moe.proofs import rounded_inputs

    monkeypatch.setitem(rounded_inputs._ROUNDINGS, "bf16", rounded_inputs.to_int8_groups)
    report = verified(mixtral, "activations: bf16", "activations: bf16", "f32", cpu_isa="reference")
    assert any("error against float64" in excess for excess in report.excesses)
