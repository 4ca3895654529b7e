"""What the routed experts of one layer should give: the model's own experts module in float64, and
in float32, over the weights as the checkpoint stores them.

An output is the sum of the outputs of its experts. So the module is given one expert at a time,
which is in memory in float64 alone, and never a layer.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflash_moe.integrations.parameter_values import ParameterValues
from dflash_moe.model.architecture import load_architecture
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.formats.dequantize import requantized
from dflash_moe.model.formats.weight_formats import is_requantised, split_formats
from dflash_moe.proofs.rounded_inputs import inputs_rounded, rounds_inputs

if TYPE_CHECKING:
    from dflash_moe.model.capture import ExpertsCall
    from dflash_moe.model.spec import LayerSpec
    from dflash_moe.placement import Shard

_Weights = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LayerTruths:
    """Outputs [num_tokens, out_size] for the inputs and routing of one call.

    `exact` is in float64 over the stored weights, `held` over those that the holders keep, and
    `computed` over these with inputs rounded as the class of each holder does. `widened` is in
    float32 over the stored weights, as an eager model would compute it that runs in float32.
    """

    exact: Any
    held: Any
    computed: Any
    widened: Any


class StoredExperts:
    """The experts of a checkpoint, with the modules of their model to compute them."""

    def __init__(self, path: str | Path) -> None:
        """Reads headers only. Errors are those of `load_architecture`."""
        checkpoint = Checkpoint.open(path)
        architecture = load_architecture(checkpoint)
        self._modules = architecture.experts
        self._values = ParameterValues(architecture.model, checkpoint, torch.float32)

    def truths(self, layer: LayerSpec, shards: Sequence[Shard], call: ExpertsCall) -> LayerTruths:
        """Computes what a call of the layer should give, whose experts are in these shards. Each
        expert is read once. Errors are those of `ParameterValues.experts`.
        """
        module = self._modules[layer.name]
        shape = (call.hidden_states.shape[0], layer.ffn.out_size)
        exact, held, computed = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
        widened = torch.zeros(shape)
        parameters = [name for name, value in module._parameters.items() if value is not None]
        chosen = [expert for expert in call.topk_ids.unique().tolist() if 0 <= expert < layer.num_experts]
        shard_of = {expert: shard for shard in shards for expert in shard.experts}
        for expert, stored in self._values.experts(layer.name, chosen, parameters):
            shard = shard_of[expert]
            kept = layer.resident_dtype(shard.weights)
            rows, ask = _asking(module, expert, call)
            found = ask(stored, torch.float64)
            exact.index_add_(0, rows, found)
            widened.index_add_(0, rows, ask(stored, torch.float32))
            if is_requantised(kept):
                stored = _as_held(module, stored, kept)
                found = ask(stored, torch.float64)
            held.index_add_(0, rows, found)
            if rounds_inputs(shard.numerics):
                with inputs_rounded(shard.numerics, split_formats(kept)):
                    found = ask(stored, torch.float64)
            computed.index_add_(0, rows, found)
        return LayerTruths(exact, held, computed, widened)


def _asking(module: Any, expert: int, call: ExpertsCall) -> tuple[Any, Callable[[_Weights, Any], Any]]:
    """Returns the rows that chose `expert`, one of them twice where it chose it twice, and what
    computes their outputs with given weights in a given dtype.
    """
    rows, places = (call.topk_ids == expert).nonzero(as_tuple=True)
    ids = call.topk_ids[rows, places].unsqueeze(1)
    num_experts = module._parameters["down_proj"].shape[0]

    def ask(weights: _Weights, dtype: Any) -> Any:
        alone = copy.copy(module)
        # The module looks its expert up by id and finds the same one under every id.
        alone._parameters = {name: value.to(dtype).expand(num_experts, *value.shape[1:]) for name, value in weights.items()}
        alone.config = copy.copy(module.config)
        alone.config._experts_implementation_internal = "eager"
        found = alone(call.hidden_states[rows].to(dtype), ids, call.topk_weights[rows, places].unsqueeze(1).to(dtype))
        return found.to(dtype)

    return rows, ask


def _as_held(module: Any, stored: _Weights, kept: str) -> _Weights:
    """Returns the weights of one expert with which a holder computes that keeps them as `kept`.

    NumPy code of its own (`model/formats/dequantize.py`) quantises them, so that the quantiser of a
    worker is measured against another.
    """
    first, down = split_formats(kept)
    held = dict(stored)
    for name, kept_format in (("gate_up_proj" if module.has_gate else "up_proj", first), ("down_proj", down)):
        if is_requantised(kept_format):
            matrix = stored[name][0].T if module.is_transposed else stored[name][0]
            values = torch.from_numpy(requantized(matrix.contiguous().numpy(), kept_format))
            held[name] = (values.T if module.is_transposed else values).unsqueeze(0)
    return held
