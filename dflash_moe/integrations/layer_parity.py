"""Compares the remote experts of one layer with the model's own eager experts, by the bounds of
docs/numerics.md (numerics).

The layer gets the hidden states and routing of the eager model, so that a flip of the router cannot
spread. A float64 run of the same experts module is the truth that both are measured against.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dflash_moe.integrations.host_weights import load_weights
from dflash_moe.integrations.rounded_inputs import inputs_rounded, rounds_inputs
from dflash_moe.integrations.transformers import TORCH_DTYPES
from dflash_moe.model.architecture import find_model_class, load_config
from dflash_moe.model.capture import ExpertsCall
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.dequantize import requantized
from dflash_moe.model.spec import LayerSpec
from dflash_moe.model.weight_formats import is_requantised, split_formats
from dflash_moe.placement import Shard
from dflash_moe.runtime.expert_runtime import ExpertRuntime
from dflash_moe.topology.numerics import DEFAULT_NUMERICS


@dataclass(frozen=True, slots=True)
class LayerParity:
    """What was measured of one layer. Errors are rms against float64 and differences are from
    eager, both divided by the standard deviation of the float64 output.

    Where a worker requantised, the remote error is against float64 with the weights that it holds,
    and `requantisation_error` is how far these move the output. Differences from eager then show
    that too and are not judged (docs/decisions/0009). It is the same where a class rounds inputs:
    the remote error is against float64 with inputs so rounded, which moves the output by
    `activation_error`, and `class_error` is against float64 with exact inputs (0012).
    """

    index: int
    name: str
    tokens: int
    eager_error: float
    remote_error: float
    # The float64 output itself has this error when it is rounded once to the model's dtype.
    rounding_error: float
    difference_rms: float
    difference_max: float
    equal_in_stream: bool
    calls: int
    expected_calls: int | None
    is_requantised: bool = False
    requantisation_error: float = 0.0
    # These are the classes of its holders.
    numerics: tuple[str, ...] = (DEFAULT_NUMERICS,)
    activation_error: float = 0.0
    class_error: float = 0.0

    @property
    def is_rounded(self) -> bool:
        """Whether the class of some holder rounds inputs."""
        return any(rounds_inputs(numerics) for numerics in self.numerics)


def _shards(runtime: ExpertRuntime, layer: LayerSpec) -> tuple[Shard, ...]:
    position = [item.index for item in runtime.spec.layers].index(layer.index)
    return runtime.placement.layers[position]


def held_formats(runtime: ExpertRuntime) -> dict[str, list[str]]:
    """Returns the formats in which each holder keeps weights, that of most experts first."""
    counts: dict[str, Counter[str]] = {}
    for layer in runtime.spec.layers:
        for shard in _shards(runtime, layer):
            counts.setdefault(shard.holder, Counter())[layer.resident_dtype(shard.weights)] += len(shard.experts)
    return {holder: [name for name, _ in count.most_common()] for holder, count in counts.items()}


def load_eager(path: Path, dtype: str) -> Any:
    """Loads a whole model with its own eager experts, in eval mode."""
    checkpoint = Checkpoint.open(path)
    model_class = find_model_class(load_config(checkpoint))
    model, _ = load_weights(
        model_class, checkpoint, has_experts=True, dtype=TORCH_DTYPES[dtype], experts_implementation="eager"
    )
    return model.eval()


def compare_layer(module: Any, layer: LayerSpec, call: ExpertsCall, runtime: ExpertRuntime) -> LayerParity:
    """Measures one layer. `module` is its experts module with weights as they are stored, and
    `call` is what the eager model asked of it and got.
    """
    arguments = (layer.index, call.hidden_states, call.topk_ids, call.topk_weights)
    runtime.set_mode("batched")
    before = count_calls(runtime)
    remote = runtime.experts(*arguments)
    calls = count_calls(runtime) - before
    runtime.set_mode("stream")
    streamed = runtime.experts(*arguments)
    truth = _in_float64(module, call)
    deviation = float(truth.std())
    held = _as_held(module, layer, _shards(runtime, layer))
    held_truth = truth if held is None else _in_float64(held, call)
    class_truth = _as_computed(module if held is None else held, call, layer, _shards(runtime, layer), held_truth)
    difference = (remote.double() - call.output.double()) / deviation
    return LayerParity(
        index=layer.index,
        name=layer.name,
        tokens=call.hidden_states.shape[0],
        eager_error=rms(call.output.double() - truth) / deviation,
        remote_error=rms(remote.double() - class_truth) / deviation,
        rounding_error=rms(truth.to(remote.dtype).double() - truth) / deviation,
        difference_rms=rms(difference),
        difference_max=float(difference.abs().max()),
        equal_in_stream=torch.equal(remote, streamed),
        calls=calls,
        expected_calls=_expected_calls(runtime, layer, call.topk_ids),
        is_requantised=held is not None,
        requantisation_error=rms(held_truth - truth) / deviation,
        numerics=tuple(sorted({shard.numerics for shard in _shards(runtime, layer)})),
        activation_error=rms(class_truth - held_truth) / deviation,
        class_error=rms(remote.double() - held_truth) / deviation,
    )


def _as_computed(module: Any, call: ExpertsCall, layer: LayerSpec, shards: Sequence[Shard], exact: Any) -> Any:
    """Computes the output in float64 with inputs rounded as the class of each holder does. Returns
    `exact` where no class rounds.

    An output is the sum of the outputs of its experts. So the experts of one class are taken alone
    by giving all others the weight zero.
    """
    kept = {shard: (shard.numerics, layer.resident_dtype(shard.weights)) for shard in shards}
    if not any(rounds_inputs(shard.numerics) for shard in shards):
        return exact
    total = torch.zeros_like(exact)
    for numerics, weight_dtype in sorted(set(kept.values())):
        experts = [expert for shard in shards if kept[shard] == (numerics, weight_dtype) for expert in shard.experts]
        is_theirs = torch.isin(call.topk_ids, torch.tensor(experts))
        alone = replace(call, topk_weights=call.topk_weights.where(is_theirs, torch.zeros_like(call.topk_weights)))
        with inputs_rounded(numerics, split_formats(weight_dtype)):
            part = _in_float64(module, alone)
        total += part
    return total


def _as_held(module: Any, layer: LayerSpec, shards: Sequence[Shard]) -> Any:
    """Returns a copy of the experts module with the weights that the holders compute with, or None
    where those are the checkpoint's.

    NumPy code of its own (`model/dequantize.py`) quantises them, so that the quantiser of a worker
    is measured against another.
    """
    changed = {shard: layer.resident_dtype(shard.weights) for shard in shards}
    changed = {shard: kept for shard, kept in changed.items() if is_requantised(kept)}
    if not changed:
        return None
    held = copy.deepcopy(module).float()
    for shard, kept in changed.items():
        first, down = split_formats(kept)
        for name, kept_format in (("gate_up_proj" if held.has_gate else "up_proj", first), ("down_proj", down)):
            weights = held._parameters[name].data
            for expert in shard.experts if is_requantised(kept_format) else ():
                matrix = weights[expert].T if held.is_transposed else weights[expert]
                matrix.copy_(torch.from_numpy(requantized(matrix.contiguous().numpy(), kept_format)))
    return held


def _in_float64(module: Any, call: ExpertsCall) -> Any:
    """Returns what the experts module itself computes in float64. Its weights are widened, and
    dropped again, one layer at a time, so that memory holds one wide layer at most.
    """
    wide = copy.deepcopy(module).double()
    ids = call.topk_ids
    return wide(call.hidden_states.double(), ids, call.topk_weights.double()).double()


def rms(values: Any) -> float:
    """Returns the root of the mean square, computed in float64."""
    return float(values.double().square().mean().sqrt())


def count_calls(runtime: ExpertRuntime) -> int:
    """Returns the number of calls to workers so far."""
    return int(runtime.stats()["totals"]["calls"])


def _expected_calls(runtime: ExpertRuntime, layer: LayerSpec, topk_ids: Any) -> int | None:
    """Returns the number of calls that a batch makes: one to each holder with an expert that some
    row chose. It is None where the batch is cut into slices.
    """
    if topk_ids.shape[0] > runtime.settings.batch_capacity:
        return None
    chosen = set(topk_ids.unique().tolist())
    return len({shard.holder for shard in _shards(runtime, layer) if chosen & set(shard.experts)})
