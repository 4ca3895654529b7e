"""Experts of GGUF files through two workers, as llama.cpp's architectures have them: the result is
that of float64 arithmetic within float32's error.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import numpy as np
import pytest

from dflash_moe.errors import DflashError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.gguf_architectures.gguf_experts import gguf_experts
from dflash_moe.model.stub import write_stub
from dflash_moe.topology import Topology
from tests.gguf_cases import expected, write_experts

pytest.importorskip("gguf", reason="the gguf package is an extra of the tests")

# A worker process and one inside the host.
TWO = "version: 1\nworkers:\n  - {name: w0, threads: 1}\n  - {name: w1, threads: 1, address: loopback}\n"

CASES = {
    "separate": ("qwen3moe", {}),
    "fused": ("qwen35moe", {"is_fused": True}),
    "biased": ("gpt-oss", {"has_biases": True}),
    "biased-mxfp4": ("gpt-oss", {"has_biases": True, "formats": ("gguf_mxfp4", "gguf_mxfp4")}),
    "fused-q8_0": ("deepseek2", {"is_fused": True, "formats": ("q8_0", "q8_0")}),
    "mixed-k": ("glm4moe", {"formats": ("q4_k", "q6_k"), "hidden_size": 256, "width": 256}),
    "offsets": ("qwen3moe", {"formats": ("q4_1", "q5_1")}),
    "low-k": ("glm4moe", {"formats": ("q2_k", "q3_k"), "hidden_size": 256, "width": 256}),
    "clamped": ("maple", {"metadata": {"swiglu_clamp_exp": [0.0, 0.5]}}),
    "gelu": ("grok", {}),
    "relu": ("smallthinker", {}),
    "no-gate": ("nemotron_h_moe", {"has_gate": False}),
    "top-1": ("llama", {"top_k": 1}),
    "latent": ("nemotron_h_moe", {"has_gate": False, "layers": (3, 7), "top_k": [0, 0, 0, 2, 0, 0, 0, 3]}),
}


@pytest.mark.parametrize(("architecture", "settings"), CASES.values(), ids=CASES.keys())
def test_two_workers_compute_what_float64_does(tmp_path, architecture, settings):
    found = gguf_experts(write_experts(tmp_path / "m.gguf", architecture, **settings))
    rng = np.random.default_rng(1)
    assert not found.left_out
    with ExpertRuntime.start(Topology.parse(TWO), model=found.spec) as runtime:
        for layer in found.spec.layers:
            rows = rng.standard_normal((9, layer.ffn.in_size), np.float32)
            ids = np.array([rng.permutation(layer.num_experts)[: layer.top_k] for _ in rows])
            weights = rng.random(ids.shape, np.float32)
            wanted, bound = expected(found.checkpoint, layer, rows, ids, weights)
            got = runtime.experts(layer.index, rows, ids, weights)
            assert got.dtype == np.float32
            assert np.abs(wanted).max() > 100 * bound.max()
            np.testing.assert_array_less(np.abs(got - wanted), bound)


@pytest.mark.parametrize("layout", ["packed", "mapped"])
@pytest.mark.parametrize("case", ["separate", "fused", "no-gate"])
def test_a_scale_per_expert_multiplies_its_matrix(tmp_path, case, layout):
    architecture = {"separate": "qwen3moe", "fused": "qwen35moe", "no-gate": "nemotron_h_moe"}[case]
    parts = {"separate": ("gate", "up", "down"), "fused": ("down",), "no-gate": ("up", "down")}[case]
    scales = {part: np.linspace(0.3, 2.7, 4).astype(np.float32) + number for number, part in enumerate(parts)}
    more = {f"blk.{layer}.ffn_{part}_exps.scale": scale for part, scale in scales.items() for layer in (0, 1)}
    path = write_experts(tmp_path / "m.gguf", architecture, more=more, **CASES[case][1])
    found = gguf_experts(path)
    assert {tensor.name for tensor in found.tensors} == set(found.checkpoint.stored)
    first, second = f"{{name: w0, threads: 1, weights_layout: {layout}}}", "{name: w1, threads: 1, address: unix}"
    topology = f"version: 1\nworkers:\n  - {first}\n  - {second}\n"
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((5, 64), np.float32)
    ids, weights = np.array([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2]]), rng.random((5, 2), np.float32)
    with ExpertRuntime.start(Topology.parse(topology), model=found.spec) as runtime:
        layer = found.spec.layers[1]
        wanted, bound = expected(found.checkpoint, layer, rows, ids, weights, scales)
        np.testing.assert_array_less(np.abs(runtime.experts(1, rows, ids, weights) - wanted), bound)
        unscaled, _ = expected(found.checkpoint, layer, rows, ids, weights)
        assert np.abs(unscaled - wanted).max() > 1000 * bound.max()
        # Both ends read the same bytes for it, those with the scale.
        assert runtime.check_weights() > 0


def test_a_limit_moves_the_result_of_its_own_layer_only(tmp_path):
    plain = gguf_experts(write_experts(tmp_path / "p.gguf", "maple", metadata={"swiglu_clamp_exp": 0.0}))
    bounded = gguf_experts(write_experts(tmp_path / "b.gguf", "maple", metadata={"swiglu_clamp_exp": [0.0, 0.5]}))
    rows, ids, weights = np.full((2, 64), 3, np.float32), np.array([[0, 1], [2, 3]]), np.ones((2, 2), np.float32)
    results = [
        [expected(found.checkpoint, layer, rows, ids, weights)[0] for layer in found.spec.layers] for found in (plain, bounded)
    ]
    assert np.array_equal(results[0][0], results[1][0])
    assert not np.allclose(results[0][1], results[1][1], rtol=0.1)


@pytest.mark.parametrize("address", ["loopback", "unix"])
def test_a_worker_that_is_given_a_stub_says_so(tmp_path, address):
    full = gguf_experts(write_experts(tmp_path / "m.gguf", hidden_size=256, width=256))
    write_stub(full.spec.path, tmp_path / "s.gguf")
    stub = gguf_experts(tmp_path / "s.gguf")
    assert stub.spec.layers == full.spec.layers
    topology = Topology.local(num_workers=1, address=address)
    with pytest.raises(DflashError, match=r"s\.gguf: it is a stub: it holds no experts; give the worker the full file"):
        ExpertRuntime.start(topology, model=stub.spec)
