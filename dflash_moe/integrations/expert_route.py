"""The way of an expert call from a model's own code to a runtime, plainly or out of a compiled
graph. A route stands where a framework's layer computed its experts: transformers' layers hold
theirs (integrations/transformers.py), and vLLM's are found by name (integrations/vllm).

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dflash_moe import _core
from dflash_moe.operators.step_context import current_step

if TYPE_CHECKING:
    from dflash_moe.experts.expert_runtime import ExpertRuntime
    from dflash_moe.model.spec import LayerSpec


@dataclass(slots=True)
class Detours:
    """How many blocks are open in which something stands in for the routes of a model: what was
    bound to them asks this one number in every step.
    """

    open: int = 0


class ExpertRoute:
    """The layer of a runtime to which the calls of one experts module go. It counts the calls."""

    __slots__ = ("__weakref__", "count", "detours", "key", "layer", "out_size", "runtime")

    def __init__(self, runtime: ExpertRuntime, layer: LayerSpec, detours: Detours) -> None:
        """`detours` are those of the model."""
        self.runtime = runtime
        self.layer = layer.index
        self.out_size = layer.ffn.out_size
        self.detours = detours
        # Programs of the core count their calls here too.
        self.count = _core.CallCount()
        self.key = _taken_key(layer.name, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertRoute:
        # A copied model calls the same workers.
        return self

    def call(self, hidden_states: Any, topk_ids: Any, topk_weights: Any) -> Any:
        """Returns [num_tokens, out_size] in the dtype of `hidden_states`, with the arguments and
        errors of `ExpertRuntime.experts`.
        """
        self.count.add()
        step = current_step()
        if step is None:
            return self.runtime.experts(self.layer, hidden_states, topk_ids, topk_weights)
        left_s = step.clock.leave()
        found = self.runtime.experts(self.layer, hidden_states, topk_ids, topk_weights)
        step.clock.enter(left_s)
        return found


def call_experts(route: Any, hidden_states: Any, topk_ids: Any, topk_weights: Any) -> Any:
    """Calls a route, or what stands in for one, and becomes one opaque operator where a compiler is
    looking. All others get a direct call, which costs a third of the operator's dispatch.
    """
    if torch.compiler.is_compiling():
        return _experts_op(hidden_states, topk_ids, topk_weights, route.key, route.out_size)
    return route.call(hidden_states, topk_ids, topk_weights)


# A compiled graph can carry a text but no object, so that the operator finds its route by a key.
# That is the layer's name and not id(): compilers keep graphs on disk for the next start, where the
# object is another. Entries vanish with their route.
_routes: weakref.WeakValueDictionary[str, ExpertRoute] = weakref.WeakValueDictionary()


def _taken_key(name: str, route: ExpertRoute) -> str:
    """Enters the route under its layer's name, or under the first free number behind it where
    another model of this process has that name.
    """
    keys = itertools.chain([name], (f"{name}#{number}" for number in itertools.count(2)))
    key = next(key for key in keys if key not in _routes)
    _routes[key] = route
    return key


def _call_route(hidden_states: Any, topk_ids: Any, topk_weights: Any, route: str, out_size: int) -> Any:
    return _routes[route].call(hidden_states, topk_ids, topk_weights)


def _like_result(hidden_states: Any, topk_ids: Any, topk_weights: Any, route: str, out_size: int) -> Any:
    return hidden_states.new_empty((hidden_states.shape[0], out_size))


_SCHEMA = "(Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, str route, int out_size) -> Tensor"
_experts_op = torch.library.custom_op("dflash_moe::experts", _call_route, mutates_args=(), schema=_SCHEMA)
_experts_op.register_fake(_like_result)
