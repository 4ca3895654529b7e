"""Finds out whether a decoder layer, whose modules were taken over already, is one that `HostLayer`
computes: attention and feed-forward, each behind a norm and added to its input.

Candidates come from the kinds of a layer's children. One is taken only if it is the only one that
fits, on probe rows, the layer's own code run in float64 over the packed weights.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dflash_moe import _core
from dflash_moe.operators.attention_interface import set_implementation
from dflash_moe.operators.attention_probe import AttentionLayer
from dflash_moe.operators.bounds import excess, largest_error, mutual_excess
from dflash_moe.operators.layer_buffers import BufferPool
from dflash_moe.operators.layers.block_candidates import candidates
from dflash_moe.operators.layers.blocks import Experts, HostLayer, MoeParts
from dflash_moe.operators.layers.layer_proof import LEAST_ROUTED_ALIKE, ExactCopy, LayerProof, ProbeStep
from dflash_moe.operators.layers.probe_experts import BoundProbe, ProbeExperts, Routing, are_alike
from dflash_moe.operators.paged_attention import LayerPages, expand_latents
from dflash_moe.operators.probes import probe_rows
from dflash_moe.operators.step_context import running_step

# More rows than this are not probed; a longer window is an argument that attention's own tests see.
_MAX_ROWS = 200
_ROWS = 40


@dataclass(frozen=True, slots=True)
class LayerProven:
    """How the proof of one layer ended: which of its `num_candidates` candidates stands in for it,
    by its place among them, and the largest error over the allowed one; or, in place of the former,
    why none does.
    """

    num_candidates: int
    place: int | None
    reason: str = ""
    excess: float = 0.0


# Begins a step of so many rows, at positions 0, 1, ...
BeginStep = Callable[[int], AbstractContextManager[ProbeStep]]
# Gives what a layer is given of rows at some positions, of which nothing is begun.
StepAt = Callable[[Sequence[int]], ProbeStep]


class LayerForms:
    """Looks for the form of the layers of one model."""

    def __init__(
        self, pool: _core.HostPool, buffers: BufferPool, begin: BeginStep, experts: Mapping[str, Experts], dtype: torch.dtype,
        elsewhere: StepAt, positions: Sequence[int],
    ) -> None:  # fmt: skip
        """`experts` are the routed experts by the names of their modules. Layers are proven at
        `positions` too, by the steps of `elsewhere`.
        """
        self._pool, self._buffers, self._begin, self._experts, self._dtype = pool, buffers, begin, experts, dtype
        self._elsewhere, self._positions = elsewhere, positions
        # Why no form stands for a kind of layer, empty where one does, by `_kind_of`.
        self._kinds: dict[Any, str] = {}
        # Of the first layer of a kind: how many candidates it had, which of them stands in for it,
        # and how far its own code was from float64.
        self._first: dict[Any, tuple[int, int, float]] = {}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def find(
        self, name: str, layer: nn.Module, attention: AttentionLayer, pages: LayerPages, called: Mapping[str, Any],
        known: LayerProven | None = None,
    ) -> tuple[HostLayer | None, LayerProven]:  # fmt: skip
        """Returns what may stand in for `layer`, or None, and how the proof ended. The model calls
        the layer with the arguments `called` beside hidden states. Where `known` says how a proof
        of the same layer ended, by the same code, it is not made again.
        """
        num_rows = min(_MAX_ROWS, max(_ROWS, attention.call.window + 3))
        with self._begin(num_rows) as step:
            found_parts = list(candidates(name, layer, attention, pages, step.cos.shape[-1], BoundProbe))
            if known is not None and known.num_candidates == len(found_parts):
                found = None if known.place is None else HostLayer(self._pool, self._buffers, *found_parts[known.place]).eval()
                return None if found is None else self._with_experts(name, found), known

            def unfit(reason: str) -> tuple[None, LayerProven]:
                return None, LayerProven(len(found_parts), None, reason)

            if not found_parts:
                return unfit("its children are not those of attention and feed-forward behind a norm each")
            step, reason = _as_called(step, called)
            if reason:
                return unfit(reason)
            layers = [HostLayer(self._pool, self._buffers, *parts).eval() for parts in found_parts]
            rows = probe_rows(layers[0].hidden_size, self._dtype, scales=(1.0, 8.0))
            rows = rows.repeat(-(-num_rows // len(rows)), 1)[:num_rows]
            stub, path = self._stub(name, layer)
            own = self._own(layer, rows, step, stub, path)
            own_routing = None if stub is None else stub.seen
            kind = _kind_of(layer, attention)
            like = self._like_the_first(kind, layers, rows, step, own, own_routing)
            if like is not None:
                return self._with_experts(name, like[0]), like[1]
            copied = exact_copy(layer, attention.module.removeprefix(f"{name}."), stub, path)
            exact, reason = self._exact(copied, attention, rows, step)
            if reason:
                return unfit(reason)
            fitting = []
            for place, candidate in enumerate(layers):
                ours, is_alike = self._computed(candidate, rows, step, own_routing, copied.routing)
                if _are_enough(is_alike):
                    excess_found = excess(ours[is_alike], own[is_alike], exact[is_alike], is_pooled=True)
                    own_error = largest_error(own[is_alike], exact[is_alike])
                    fitting += [(excess_found, place, own_error)] if excess_found <= 1.0 else []
        if len(fitting) != 1:
            return unfit(f"{len(fitting) or 'no'} block forms fit")
        excess_found, place, own_error = fitting[0]
        reason = self._why_not(kind, layers[place], copied, attention, called)
        if reason:
            return unfit(reason)
        self._first.setdefault(kind, (len(layers), place, own_error))
        return self._with_experts(name, layers[place]), LayerProven(len(layers), place, excess=excess_found)

    def _like_the_first(
        self, kind: Any, layers: Sequence[HostLayer], rows: torch.Tensor, step: ProbeStep, own: torch.Tensor,
        own_routing: Routing | None,
    ) -> tuple[HostLayer, LayerProven] | None:  # fmt: skip
        """Returns the candidate that has the form of an earlier layer of this kind, where it
        computes of rows what this layer's own code does. None asks for the proof in float64.
        """
        num_candidates, place, error = self._first.get(kind, (0, 0, 0.0))
        if num_candidates != len(layers):
            return None
        ours, is_alike = self._computed(layers[place], rows, step, own_routing, own_routing)
        found = mutual_excess(ours[is_alike], own[is_alike], error) if _are_enough(is_alike) else float("inf")
        return (layers[place], LayerProven(num_candidates, place, excess=found)) if found <= 1.0 else None

    def _why_not(
        self, kind: Any, found: HostLayer, copied: ExactCopy, attention: AttentionLayer, called: Mapping[str, Any]
    ) -> str:
        """Returns where a layer of this kind computes something else than the form that was found
        for it; an empty text where it does not.
        """
        if kind not in self._kinds:
            proof = LayerProof(copied, found, attention.call)
            reason = proof.beyond_limits(_as_called(self._elsewhere(range(proof.num_rows)), called)[0])
            for begin in range(0, len(self._positions), _MAX_ROWS):
                part = self._positions[begin : begin + _MAX_ROWS]
                reason = reason or proof.at(part, _as_called(self._elsewhere(part), called)[0])
            self._kinds[kind] = reason
        return self._kinds[kind]

    def _stub(self, name: str, layer: nn.Module) -> tuple[ProbeExperts | None, str]:
        """Returns probe experts for the layer's own code, and where they go in it."""
        for experts_name in self._experts:
            if experts_name.startswith(f"{name}."):
                path = experts_name.removeprefix(f"{name}.")
                return ProbeExperts(int(layer.get_submodule(path).num_experts)), path
        return None, ""

    def _with_experts(self, name: str, found: HostLayer) -> HostLayer:
        if not isinstance(found.feed_forward, MoeParts):
            return found
        experts = next(experts for experts_name, experts in self._experts.items() if experts_name.startswith(f"{name}."))
        parts = replace(found.feed_forward, experts=experts)
        layer = HostLayer(self._pool, self._buffers, found.attention, parts, found.feed_forward_norm)
        layer.eval()
        return layer

    # -- proof ---------------------------------------------------------------------------------
    def _exact(
        self, copied: ExactCopy, attention: AttentionLayer, rows: torch.Tensor, step: ProbeStep
    ) -> tuple[torch.Tensor, str]:
        """Runs the layer's own code in float64 over what is packed, with its eager attention, and
        says why its positions and lengths are more than ours are told.
        """
        set_implementation(copied.layer, "eager")
        num_rows = rows.shape[0]
        distance = torch.arange(num_rows)[:, None] - torch.arange(num_rows)[None]
        is_seen = (distance >= 0) & ((distance < attention.call.window) if attention.call.window else True)
        mask = torch.zeros(1, 1, num_rows, num_rows, dtype=torch.float64).masked_fill(~is_seen, -1e300)
        looks: set[str] = set()
        arguments = {**step.exact_arguments(looks), "attention_mask": mask}
        out = _first(copied.layer(rows.double()[None], **arguments))[0]
        if looks:
            return out, f"its code reads {' and '.join(sorted(looks))}, of which block forms are told cosines and sines alone"
        return out, ""

    def _own(self, layer: nn.Module, rows: torch.Tensor, step: ProbeStep, stub: ProbeExperts | None, path: str) -> torch.Tensor:
        before = layer.get_submodule(path) if path else None
        try:
            if stub is not None:
                _put(layer, path, stub)
            return _first(layer(rows[None], **step.arguments))[0].clone()
        finally:
            if before is not None:
                _put(layer, path, before)

    def _computed(
        self, candidate: HostLayer, rows: torch.Tensor, step: ProbeStep, own: Routing | None, exact: Routing | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what a candidate computes of rows, and which of them it and the layer's own code
        (`own`) route as `exact` says: only these can be compared.
        """
        running_step().buffers.set_tables(step.cos, step.sin)
        ours = candidate(rows[None])[0]
        is_alike = torch.ones(len(rows), dtype=torch.bool)
        for routing in (own, _routing_of(candidate)):
            if routing is not None and exact is not None:
                is_alike &= are_alike(routing, exact)
        return ours, is_alike


def _are_enough(is_alike: torch.Tensor) -> bool:
    return bool(is_alike.float().mean() >= LEAST_ROUTED_ALIKE)


def exact_copy(layer: nn.Module, attention: str, experts: ProbeExperts | None, path: str) -> ExactCopy:
    """Returns a copy of a layer in float64. `attention` is the name of its attention module, and
    `experts` take the place of the routed ones at `path`.
    """
    hosts = {name: module for name, module in layer.named_modules() if hasattr(module, "exact")}
    # What is packed is not copied: each operator gives its own twin.
    exact = {id(module): module.exact() for module in hosts.values()}
    memo: dict[int, Any] = dict(exact)
    if path:
        memo[id(layer.get_submodule(path))] = nn.Identity()
    wide = copy.deepcopy(layer, memo)
    for module in list(wide.modules()):
        expand_latents(module)
    wide = wide.double()
    if experts is not None:
        _put(wide, path, experts)
    return ExactCopy(wide, exact, wide.get_submodule(attention), experts)


def _as_called(step: ProbeStep, called: Mapping[str, Any]) -> tuple[ProbeStep, str]:
    """Returns a step with the arguments that the model calls a layer with, and why no form takes
    these, where one is more than a setting.
    """
    arguments = dict(step.arguments)
    for name, value in called.items():
        if name not in arguments and not isinstance(value, (bool, int, float, str, type(None))):
            return step, f"it is called with {name}, which no block form takes"
        if name not in arguments or (value is None and name in ("position_ids", "position_embeddings")):
            arguments[name] = value
    return replace(step, arguments=arguments), ""


def _kind_of(layer: nn.Module, attention: AttentionLayer) -> Any:
    """Returns what layers have in common that compute the same function of other weights: classes
    and settings of their modules, and what attention is told.
    """
    simple = (bool, int, float, str, type(None), tuple, frozenset)
    modules = tuple(
        (name, type(module), tuple(sorted((key, str(value)) for key, value in vars(module).items()
                                          if isinstance(value, simple) and key != "layer_idx")))
        for name, module in layer.named_modules()
    )  # fmt: skip
    forms = tuple(str(getattr(module, "form", "")) for module in layer.modules())
    call = attention.call
    return modules, forms, (call.num_heads, call.scale, call.window, call.softcap, call.sinks is None)


def _put(layer: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(layer.get_submodule(parent) if parent else layer, name, module)


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _routing_of(candidate: HostLayer) -> Routing | None:
    parts = candidate.feed_forward
    if not isinstance(parts, MoeParts) or not isinstance(parts.experts, BoundProbe):
        return None
    return parts.experts.experts.seen
