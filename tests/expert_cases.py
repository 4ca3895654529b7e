"""Makes a tiny checkpoint without any model code, a runtime on this machine that computes it, calls
for it, and what `experts()` must return for them, bit for bit.

The expected bits come from `_core.FfnOracle` for each shard, added in ascending order of shard ids.
That is the whole definition of `experts()` in ten lines.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save_file

from dflash_moe import _core
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.ffn import FfnSpec, TensorPattern
from dflash_moe.model.spec import LayerSpec, ModelSpec
from dflash_moe.placement import Placement
from dflash_moe.topology import Emulate, Topology

NUM_LAYERS, NUM_EXPERTS, TOP_K, WIDTH, INNER = 2, 8, 3, 96, 64


class Batch(NamedTuple):
    """The inputs of one call, `experts(layer, *batch)`: hidden_states is [num_tokens, WIDTH], and
    topk_ids and topk_weights are [num_tokens, TOP_K].
    """

    hidden_states: np.ndarray
    topk_ids: np.ndarray
    topk_weights: np.ndarray


def make_checkpoint(directory: Path, *, seed: int = 7, num_layers: int = NUM_LAYERS) -> Path:
    """Writes config.json and one safetensors file of f32 experts, and returns the directory."""
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(num_layers):
        for expert in range(NUM_EXPERTS):
            for part, shape in (("gate", (INNER, WIDTH)), ("up", (INNER, WIDTH)), ("down", (WIDTH, INNER))):
                values = random.standard_normal(shape, np.float32) * np.float32(0.2)
                tensors[f"layers.{layer}.experts.{expert}.{part}"] = values
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(directory / "model.safetensors"))
    (directory / "config.json").write_text(json.dumps({"model_type": "tiny", "seed": seed}))
    return directory


def tiny_spec(directory: Path, *, num_layers: int = NUM_LAYERS) -> ModelSpec:
    """Returns what `model_spec` would say about a directory that `make_checkpoint` wrote."""
    layers = []
    for index in range(num_layers):
        pattern = f"layers.{index}.experts.{{expert}}"
        ffn = FfnSpec(
            in_size=WIDTH,
            intermediate_size=INNER,
            out_size=WIDTH,
            gate_tensor=TensorPattern(f"{pattern}.gate"),
            up_tensor=TensorPattern(f"{pattern}.up"),
            down_tensor=TensorPattern(f"{pattern}.down"),
        )
        layers.append(
            LayerSpec(
                index=index,
                name=f"layers.{index}.experts",
                num_experts=NUM_EXPERTS,
                top_k=TOP_K,
                ffn=ffn,
                weight_dtype="f32",
                expert_bytes=ffn.num_values() * 4,
            )
        )
    fingerprint = Checkpoint.open(directory).fingerprint()
    return ModelSpec(layers=tuple(layers), dtype="f32", fingerprint=fingerprint, config_name="tiny", path=str(directory))


def make_batch(num_tokens: int, *, seed: int = 0) -> Batch:
    """Makes random rows. No id appears twice in a row."""
    random = np.random.default_rng(seed)
    hidden = random.standard_normal((num_tokens, WIDTH), np.float32)
    ids = np.stack([random.permutation(NUM_EXPERTS)[:TOP_K] for _ in range(num_tokens)]).astype(np.int64)
    weights = random.random((num_tokens, TOP_K), np.float32)
    return Batch(hidden, ids, weights)


def local_topology(
    workers: int = 2, *, replicas: int = 1, address: str | None = None, emulate: Emulate | None = None
) -> Topology:
    """Workers w0, w1 and so on of this machine, which hold every shard `replicas` times."""
    made = Topology.local(num_workers=workers, address=address)
    emulated = tuple(replace(worker, emulate=emulate) for worker in made.workers)
    return replace(made, workers=emulated, placement=replace(made.placement, replicas=replicas))


def call(runtime: ExpertRuntime, num_tokens: int = 20, layer: int = 0) -> np.ndarray:
    """Makes the call that `make_batch(num_tokens)` is."""
    return np.asarray(runtime.experts(layer, *make_batch(num_tokens)))


def expected_of(runtime: ExpertRuntime, num_tokens: int = 20, layer: int = 0) -> np.ndarray:
    """Returns the bits that `call` must return."""
    return Expected(runtime.placement, runtime.spec).experts(layer, make_batch(num_tokens))


class Expected:
    """The oracle of one checkpoint. It has all experts of every layer and is asked shard by shard.
    Weights are kept in `weight_dtype`, and `isa` computes with them in class `numerics`.
    """

    def __init__(
        self,
        placement: Placement,
        spec: ModelSpec,
        *,
        weight_dtype: str = "f32",
        isa: str = "scalar",
        numerics: str = "f32-canonical",
    ) -> None:
        checkpoint = Checkpoint.open(spec.path)
        self._placement = placement
        self._width = spec.layers[0].ffn.out_size
        self._oracles = []
        for layer in spec.layers:
            oracle = _core.FfnOracle(
                spec=layer.ffn.kernel_spec(), num_experts=layer.num_experts, weight_dtype=weight_dtype, isa=isa,
                numerics=numerics,
            )  # fmt: skip
            patterns = {"gate": layer.ffn.gate_tensor, "up": layer.ffn.up_tensor, "down": layer.ffn.down_tensor}
            for expert in range(layer.num_experts):
                oracle.load_expert(
                    expert, **{part: checkpoint.values(pattern.tensor_name(expert)) for part, pattern in patterns.items()}
                )
            self._oracles.append(oracle)

    def experts(self, layer: int, batch: Batch) -> np.ndarray:
        """Returns the expected result in float32 [num_tokens, out_size], for an f32 wire."""
        total = np.zeros((len(batch.hidden_states), self._width), np.float32)
        for shard in self._placement.layers[layer]:
            rows, counts, ids, weights = [], [], [], []
            for row, (row_ids, row_weights) in enumerate(zip(batch.topk_ids, batch.topk_weights, strict=True)):
                held = sorted((int(i), float(w)) for i, w in zip(row_ids, row_weights, strict=True) if int(i) in shard.experts)
                if held:
                    rows.append(row)
                    counts.append(len(held))
                    ids += [expert for expert, _ in held]
                    weights += [weight for _, weight in held]
            if rows:
                reply = self._oracles[layer].forward(
                    batch.hidden_states[rows],
                    np.array(counts, np.uint16),
                    np.array(ids, np.uint16),
                    np.array(weights, np.float32),
                )
                total[rows] += reply
        return total
