"""Describes what `bench experts` computes: the shape of a layer, a routed batch, and what can
compute it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_moe import _core

# Torch computes with these formats, and rows arrive in them.
FLOATS = ("f32", "f16", "bf16")


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The shape of one MoE layer."""

    hidden_size: int = 1024
    moe_intermediate_size: int = 384
    num_experts: int = 32
    top_k: int = 8

    def layer_bytes(self, fmt: str) -> int:
        """Returns the bytes of all experts of one layer in a format."""
        return self.num_experts * self.expert_bytes(fmt)

    def expert_bytes(self, fmt: str) -> int:
        """Returns the bytes of gate, up and down of one expert in a format."""
        outer = num_bytes(fmt, self.hidden_size, self.moe_intermediate_size)
        return 2 * num_bytes(fmt, self.moe_intermediate_size, self.hidden_size) + outer

    def for_format(self, fmt: str) -> ExpertShape:
        """Returns this shape with the intermediate size rounded up to whole blocks of the
        format.
        """
        block = _core.weight_formats()[fmt]["block"]
        return dataclasses.replace(self, moe_intermediate_size=-(-self.moe_intermediate_size // block) * block)


def num_bytes(fmt: str, outputs: int, inputs: int) -> int:
    """Returns the bytes of a matrix as the format stores it, scales included."""
    facts = _core.weight_formats()[fmt]
    values = outputs * (-(-inputs // facts["block"]) * facts["block_bytes"])
    if not facts["scale_bytes"]:
        return values
    return values + -(-outputs // facts["scale_outputs"]) * -(-inputs // facts["scale_inputs"]) * facts["scale_bytes"]


@dataclass(frozen=True, slots=True)
class Batch:
    """A routed batch as the kernels of a worker take it. `rows` are [num_tokens, hidden_size] in
    float32, `row_counts` [num_tokens] in uint16, `expert_ids` [num_tokens * top_k] in uint16,
    ascending within a row, and `weights` the same in float32. It touches `num_distinct` experts.
    """

    rows: Any
    row_counts: Any
    expert_ids: Any
    weights: Any
    num_distinct: int


def make_batch(shape: ExpertShape, tokens: int, routing: str, seed: int) -> Batch:
    """Draws random rows, each with `top_k` different experts. These are drawn evenly, or with a
    probability that falls as 1 / rank (Zipf).
    """
    rng = np.random.default_rng(seed)
    ranks = np.arange(1, shape.num_experts + 1, dtype=np.float64)
    likelihood = np.zeros(shape.num_experts) if routing == "uniform" else -np.log(ranks)
    # The k largest scores are a draw without replacement.
    scores = likelihood + rng.gumbel(size=(tokens, shape.num_experts))
    ids = np.sort(np.argsort(-scores, axis=1)[:, : shape.top_k], axis=1).astype(np.uint16)
    weights = rng.random((tokens, shape.top_k), dtype=np.float32)
    return Batch(
        rows=rng.standard_normal((tokens, shape.hidden_size), dtype=np.float32),
        row_counts=np.full(tokens, shape.top_k, np.uint16),
        expert_ids=ids.reshape(-1),
        weights=(weights / weights.sum(axis=1, keepdims=True)).reshape(-1),
        num_distinct=len(np.unique(ids)),
    )


@dataclass(frozen=True, slots=True)
class Kernel:
    """Something that computes a batch: `bind(batch, source)` gives the timed forward."""

    name: str
    kernel: str
    backend: str
    bind: Callable[[Batch, str], Callable[[int], list[float]]]
