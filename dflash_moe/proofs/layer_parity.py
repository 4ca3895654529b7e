"""Compares the remote experts of one layer with the model's own eager experts, by the bounds of
docs/numerics.md (numerics).

The layer gets the hidden states and routing of the eager model, so that a flip of the router cannot
spread. A float64 run of the same experts module (`expert_truths.py`) is the truth that both are
measured against.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.model.capture import ExpertsCall
from dflash_moe.model.formats.weight_formats import is_requantised
from dflash_moe.model.spec import LayerSpec
from dflash_moe.placement import Shard
from dflash_moe.proofs.expert_truths import StoredExperts
from dflash_moe.proofs.rounded_inputs import rounds_inputs
from dflash_moe.proofs.two_passes import rms
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
    # Where the model's dtype cannot hold the stored weights, eager rounds its own and these are the
    # differences from eager experts in float32 whose output is rounded once; else they are None.
    widened_rms: float | None = None
    widened_max: float | None = None
    # The largest difference from eager, or from float64 where an output is nearer that than eager's
    # is, and likewise from eager experts in float32.
    judged_max: float = 0.0
    widened_judged_max: float | None = None

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


def compare_layer(stored: StoredExperts, layer: LayerSpec, call: ExpertsCall, runtime: ExpertRuntime) -> LayerParity:
    """Measures one layer. `stored` are the experts of the checkpoint, and `call` is what the eager
    model asked of this layer and got.
    """
    arguments = (layer.index, call.hidden_states, call.topk_ids, call.topk_weights)
    runtime.set_mode("batched")
    before = count_calls(runtime)
    remote = runtime.experts(*arguments)
    calls = count_calls(runtime) - before
    runtime.set_mode("stream")
    streamed = runtime.experts(*arguments)
    shards = _shards(runtime, layer)
    truths = stored.truths(layer, shards, call)
    truth = truths.exact
    deviation = float(truth.std())
    difference = (remote.double() - call.output.double()) / deviation
    is_rounded_by_eager = runtime.spec.dtype not in ("f32", layer.weight_dtype)
    widened = (remote.double() - truths.widened.to(call.output.dtype).double()) / deviation
    return LayerParity(
        index=layer.index,
        name=layer.name,
        tokens=call.hidden_states.shape[0],
        eager_error=rms(call.output.double() - truth) / deviation,
        remote_error=rms(remote.double() - truths.computed) / deviation,
        rounding_error=rms(truth.to(remote.dtype).double() - truth) / deviation,
        difference_rms=rms(difference),
        difference_max=float(difference.abs().max()),
        equal_in_stream=torch.equal(remote, streamed),
        calls=calls,
        expected_calls=_expected_calls(runtime, layer, call.topk_ids),
        is_requantised=any(is_requantised(layer.resident_dtype(shard.weights)) for shard in shards),
        requantisation_error=rms(truths.held - truth) / deviation,
        numerics=tuple(sorted({shard.numerics for shard in shards})),
        activation_error=rms(truths.computed - truths.held) / deviation,
        class_error=rms(remote.double() - truths.held) / deviation,
        widened_rms=rms(widened) if is_rounded_by_eager else None,
        widened_max=float(widened.abs().max()) if is_rounded_by_eager else None,
        judged_max=_judged_max(remote, call.output, truth) / deviation,
        widened_judged_max=_judged_max(remote, truths.widened.to(call.output.dtype), truth) / deviation
        if is_rounded_by_eager
        else None,
    )


def _judged_max(ours: Any, theirs: Any, truth: Any) -> float:
    """Returns the largest distance of an output from `theirs`, or from `truth` where it is nearer
    that than `theirs` is: there the distance is theirs to answer for (0050).
    """
    error = (ours.double() - truth).abs()
    difference = (ours.double() - theirs.double()).abs()
    return float(difference.where(error > (theirs.double() - truth).abs(), error).max())


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
