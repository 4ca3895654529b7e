"""Cards against torch in float32, at the shape of a real layer: ragged rows, experts with many
rows, with one and with none.

Where no card is, the simulated one runs the same checks on a small layer, and the processor
computes torch's side.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflash_moe import ExpertRuntime, Topology, _core
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.spec import ModelSpec
from dflash_moe.testing.tiny import layer_name, tiny_checkpoint

torch = pytest.importorskip("torch")

CARDS = [
    f"{backend}, device: {index}"
    for backend in ("cuda", "hip")
    for index, device in enumerate(_core.probe_backend(backend)["devices"])
    if not device["reason"]
]
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = (2048, 768, 32, 8) if CARDS else (64, 48, 8, 4)
TOKENS = (1, 7, 64, 1024, 4096) if CARDS else (1, 7, 24)
# Of the root mean square. f32: sums of 2,048 in another order. bf16: rows and inner rows rounded to
# 8 bits, 2^-9 each at most.
TOLERANCE = {"f32": 1e-5, "bf16": 1e-2}
PLACE = "cuda" if CARDS and torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return tiny_checkpoint(
        tmp_path_factory.mktemp("accuracy"), hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE, num_experts=EXPERTS,
        top_k=TOP_K, num_layers=1, dtype="bf16",
    )  # fmt: skip


@pytest.fixture(scope="module")
def weights(spec):
    """Of every expert: gate, up and down as torch's float32 tensors."""
    return [[matrix(spec, expert, name) for name in ("gate_proj", "up_proj", "down_proj")] for expert in range(EXPERTS)]


def matrix(spec: ModelSpec, expert: int, name: str) -> Any:
    stored = Checkpoint.open(spec.path).values(f"{layer_name(0)}.{expert}.{name}.weight")
    return torch.from_numpy(np.array(stored)).to(PLACE)


def ragged(tokens: int) -> tuple[Any, Any, Any]:
    """Rows with 1..TOP_K experts (sentinels fill up), the first expert in most of them, the last in
    none.
    """
    random = np.random.default_rng(tokens)
    hidden = random.standard_normal((tokens, HIDDEN), dtype=np.float32)
    likely = 1.0 / np.arange(1, EXPERTS) ** 1.5
    ids = np.stack([random.choice(EXPERTS - 1, TOP_K, replace=False, p=likely / likely.sum()) for _ in range(tokens)])
    ids[np.arange(TOP_K) >= random.integers(1, TOP_K + 1, (tokens, 1))] = EXPERTS
    return hidden, ids.astype(np.int64), random.random((tokens, TOP_K), dtype=np.float32)


def by_torch(weights: list[list[Any]], hidden: Any, ids: Any, scales: Any) -> Any:
    rows, chosen, scale = (torch.from_numpy(array).to(PLACE) for array in (hidden, ids, scales))
    result = torch.zeros_like(rows)
    for expert, (gate, up, down) in enumerate(weights):
        token, place = torch.where(chosen == expert)
        inner = torch.nn.functional.silu(rows[token] @ gate.T) * (rows[token] @ up.T)
        result.index_add_(0, token, (inner @ down.T) * scale[token, place][:, None])
    return result.cpu().numpy()


@pytest.mark.parametrize("activations", list(TOLERANCE))
@pytest.mark.parametrize("card", CARDS or ["sim, simulate: cuda", "sim, simulate: hip"])
def test_ragged_batches_are_within_the_class_of_torchs_float32(spec, weights, card, activations):
    asked = f"version: 1\nworkers: [{{name: card, backend: {card}, activations: {activations}}}]\n"
    with ExpertRuntime.start(Topology.parse(asked), model=spec, dtype="f32") as runtime:
        for tokens in TOKENS:
            batch = ragged(tokens)
            found, expected = np.asarray(runtime.experts(0, *batch)), by_torch(weights, *batch)
            error = np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))
            assert error <= TOLERANCE[activations], f"{tokens} tokens"
        assert runtime.stats()["workers"]["card"]["calls"] >= len(TOKENS)
