"""Computes the same expert layer in torch, for comparison: by a loop of linear layers over the
experts, and by grouped matrix products.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash_moe.bench.expert_batch import Batch, ExpertShape, Kernel


@dataclass(frozen=True, slots=True)
class TorchLayers:
    """Random weights of every layer, each in memory of its own: `gate_up` is [E, 2I, H] and `down`
    is [E, H, I], for E experts of width I and hidden size H.
    """

    gate_up: list[Any]
    down: list[Any]
    dtype: Any

    @classmethod
    def create(cls, shape: ExpertShape, fmt: str, num_layers: int, place: str = "cpu") -> TorchLayers:
        """Makes `num_layers` equal layers on torch's device `place`. Forwards take one after the
        other, so that with enough layers the weights come from memory and not from the caches. The
        values are random, because only the time of the forwards is of interest.
        """
        import torch

        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[fmt]
        hidden, inner, experts = shape.hidden_size, shape.moe_intermediate_size, shape.num_experts
        generator = torch.Generator().manual_seed(0)
        gate_up = (torch.rand(experts, 2 * inner, hidden, generator=generator) * 2 - 1).div_(hidden).to(place, dtype)
        down = (torch.rand(experts, hidden, inner, generator=generator) * 2 - 1).div_(inner).to(place, dtype)
        return cls([gate_up.clone() for _ in range(num_layers)], [down.clone() for _ in range(num_layers)], dtype)


@dataclass(frozen=True, slots=True)
class _Routed:
    # The rows of T tokens are [T, H].
    hidden_states: Any
    # This is [pairs]: the token of each pair, sorted by expert.
    rows: Any
    # These are [pairs, 1].
    weights: Any
    # Each expert has so many pairs.
    counts: list[int]
    # This is [E] in int32, the counts summed up.
    ends: Any


def torch_kernels(layers: TorchLayers, threads: int) -> list[Kernel]:
    """Returns the kernels that this torch can run for the dtype of `layers` where they lie.
    `threads` are those of the processor.
    """
    return [Kernel(name, kernel, "torch", _bind(layers, threads, forward)) for name, kernel, forward in _forwards(layers)]


def torch_outputs(layers: TorchLayers, batch: Batch) -> dict[str, Any]:
    """Returns what each of `torch_kernels` makes of a batch with the first layer, as NumPy arrays
    of float32 [T, H], for checks before timing.
    """
    import torch

    routed = _route(batch, layers)
    with torch.inference_mode():
        return {
            name: forward(layers.gate_up[0], layers.down[0], routed).float().numpy() for name, _, forward in _forwards(layers)
        }


def _forwards(layers: TorchLayers) -> list[tuple[str, str, Callable[..., Any]]]:
    name = {"torch.float32": "f32", "torch.float16": "f16", "torch.bfloat16": "bf16"}[str(layers.dtype)]
    found: list[tuple[str, str, Callable[..., Any]]] = [(f"torch_linear_{name}", "loop of linear", _linear_loop)]
    if _has_grouped_mm(layers):
        found.append((f"torch_grouped_{name}", "grouped_mm", _grouped))
    return found


def _bind(
    layers: TorchLayers, threads: int, forward: Callable[..., Any]
) -> Callable[[Batch, str], Callable[[int], list[float]]]:
    import torch

    def bind(batch: Batch, source: str) -> Callable[[int], list[float]]:
        routed = _route(batch, layers)
        count = len(layers.down) if source == "dram" else 1
        clock = _device_seconds if routed.hidden_states.is_cuda else _seconds
        turn = 0

        def run(forwards: int) -> list[float]:
            nonlocal turn
            torch.set_num_threads(threads)
            samples = []
            with torch.inference_mode():
                for _ in range(forwards):
                    turn = (turn + 1) % count
                    samples.append(clock(forward, layers.gate_up[turn], layers.down[turn], routed))
            return samples

        return run

    return bind


def _seconds(forward: Callable[..., Any], *arguments: Any) -> float:
    began = time.perf_counter()
    forward(*arguments)
    return time.perf_counter() - began


def _device_seconds(forward: Callable[..., Any], *arguments: Any) -> float:
    """Returns the seconds that the card computes, by its own events."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    forward(*arguments)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _route(batch: Batch, layers: TorchLayers) -> _Routed:
    """Sorts the pairs of a batch by expert. That is not timed, while ours sorts in its forward, so
    that the comparison leans towards torch.
    """
    import numpy as np
    import torch

    experts, place = layers.down[0].shape[0], layers.down[0].device
    order = np.argsort(batch.expert_ids, kind="stable")
    tokens = np.repeat(np.arange(len(batch.row_counts)), batch.row_counts)[order]
    counts = np.bincount(batch.expert_ids, minlength=experts)
    return _Routed(
        hidden_states=torch.from_numpy(batch.rows).to(place, layers.dtype),
        rows=torch.from_numpy(tokens).to(place),
        weights=torch.from_numpy(batch.weights[order])[:, None].to(place, layers.dtype),
        counts=counts.tolist(),
        ends=torch.from_numpy(np.cumsum(counts).astype(np.int32)).to(place),
    )


def _linear_loop(gate_up: Any, down: Any, routed: _Routed) -> Any:
    import torch
    import torch.nn.functional as functional

    result = torch.zeros_like(routed.hidden_states)
    begin = 0
    for expert, count in enumerate(routed.counts):
        if not count:
            continue
        rows = routed.rows[begin : begin + count]
        gate, up = functional.linear(routed.hidden_states[rows], gate_up[expert]).chunk(2, dim=-1)
        output = functional.linear(functional.silu(gate) * up, down[expert])
        result.index_add_(0, rows, output * routed.weights[begin : begin + count])
        begin += count
    return result


def _grouped(gate_up: Any, down: Any, routed: _Routed) -> Any:
    import torch
    import torch.nn.functional as functional

    hidden = routed.hidden_states[routed.rows]
    gate, up = functional.grouped_mm(hidden, gate_up.transpose(1, 2), offs=routed.ends).chunk(2, dim=-1)
    output = functional.grouped_mm(functional.silu(gate) * up, down.transpose(1, 2), offs=routed.ends)
    return torch.zeros_like(routed.hidden_states).index_add_(0, routed.rows, output * routed.weights)


def _has_grouped_mm(layers: TorchLayers) -> bool:
    import torch
    import torch.nn.functional as functional

    if not hasattr(functional, "grouped_mm"):
        return False
    experts, inner = layers.down[0].shape[0], layers.down[0].shape[2]
    place = layers.down[0].device
    ends = torch.ones(experts, dtype=torch.int32, device=place).cumsum(0, dtype=torch.int32)
    try:
        with torch.inference_mode():
            rows = torch.ones(experts, inner, dtype=layers.dtype, device=place)
            functional.grouped_mm(rows, layers.down[0].transpose(1, 2), offs=ends)
    except (RuntimeError, NotImplementedError, ValueError):
        # This build of torch has no such product, or none for this dtype.
        return False
    return True
