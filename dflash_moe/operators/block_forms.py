"""Finds out whether a decoder layer, whose modules were taken over already, is one that `HostLayer`
computes: attention and feed-forward, each behind a norm and added to its input.

Candidates come from the kinds of a layer's children. One is taken only if it is the only one that
fits, on probe rows, the layer's own code run in float64 over the packed weights.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dflash_moe import _core
from dflash_moe.operators.attention_probe import AttentionLayer, set_implementation
from dflash_moe.operators.block_candidates import candidates
from dflash_moe.operators.blocks import Experts, HostLayer, MoeParts
from dflash_moe.operators.bounds import excess
from dflash_moe.operators.layer_buffers import BufferPool
from dflash_moe.operators.paged_attention import LayerPages, expand_latents
from dflash_moe.operators.probes import SEED, probe_rows

# More rows than this are not probed; a longer window is an argument that attention's own tests see.
_MAX_ROWS = 200
_ROWS = 40
# At least so many rows must have been routed alike for the others to count as near ties.
_LEAST_ROUTED_ALIKE = 0.75
# A routing weight that differs by more of the row's largest one has jumped.
_NEAR_WEIGHT = 0.25


@dataclass(frozen=True, slots=True)
class ProbeStep:
    """A step of rows at positions 0, 1, ... of one sequence: the keyword arguments with which the
    model calls a layer, its cosines and sines in float32, [num_rows, width], and in float64 what
    the model passes to a layer of them.
    """

    arguments: dict[str, Any]
    cos: torch.Tensor
    sin: torch.Tensor
    exact_embeddings: Any


# Ids of chosen experts and their weights, [num_rows, top_k].
Routing = tuple[torch.Tensor, torch.Tensor]
BeginStep = Callable[[int], AbstractContextManager[ProbeStep]]


class _ProbeExperts(nn.Module):  # type: ignore[misc]
    """Stands in for routed experts: scales rows by the routing weights and a number of each expert,
    so that a wrong weight or a wrong expert shows.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(SEED)
        self.factors = torch.rand(num_experts, generator=generator, dtype=torch.float64) + 0.5
        # The ids of the last call in ascending order, and their weights.
        self.seen: Routing | None = None

    def forward(self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        ids, order = topk_ids.sort(dim=-1)
        self.seen = ids, topk_weights.double().gather(-1, order)
        scale = (topk_weights.double() * self.factors[topk_ids.long()]).sum(-1, keepdim=True)
        return (hidden_states.double() * scale).to(hidden_states.dtype)


class _BoundProbe:
    """A `_ProbeExperts` as `blocks.Experts`."""

    def __init__(self, num_experts: int) -> None:
        self.experts = _ProbeExperts(num_experts)

    def bind(self, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any) -> _BoundProbe:
        """Binds the tensors."""
        self._tensors = (hidden_states, topk_ids, topk_weights, out)
        return self

    def run(self) -> None:
        """Computes the result."""
        rows, ids, weights, out = self._tensors
        out.copy_(self.experts(rows, ids, weights))

    def submit(self) -> Callable[[], None]:
        """Computes the result when it is awaited."""
        return self.run


class LayerForms:
    """Looks for the form of the layers of one model."""

    def __init__(
        self, pool: _core.HostPool, buffers: BufferPool, begin: BeginStep, experts: Mapping[str, Experts], dtype: torch.dtype
    ) -> None:
        """`experts` are the routed experts by the names of their modules."""
        self._pool, self._buffers, self._begin, self._experts, self._dtype = pool, buffers, begin, experts, dtype

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def find(
        self, name: str, layer: nn.Module, attention: AttentionLayer, pages: LayerPages
    ) -> tuple[HostLayer | None, str, float]:
        """Returns what may stand in for `layer`, or None and why, and the largest error over the
        allowed one.
        """
        num_rows = min(_MAX_ROWS, max(_ROWS, attention.call.window + 3))
        with self._begin(num_rows) as step:
            found_parts = list(candidates(name, layer, attention, pages, step.cos.shape[-1], _BoundProbe))
            if not found_parts:
                return None, "its children are not those of attention and feed-forward behind a norm each", 0.0
            layers = [HostLayer(self._pool, self._buffers, *parts).eval() for parts in found_parts]
            rows = probe_rows(layers[0].hidden_size, self._dtype, scales=(1.0, 8.0))
            rows = rows.repeat(-(-num_rows // len(rows)), 1)[:num_rows]
            stub, block = self._stub(name, layer)
            exact, exact_routing = self._exact(layer, attention, rows, step, stub, block)
            own = self._own(layer, rows, step, stub, block)
            fitting = []
            for candidate in layers:
                found = self._excess(candidate, rows, step, own, exact, stub, exact_routing)
                if found <= 1.0:
                    fitting.append((found, candidate))
        if len(fitting) != 1:
            return None, f"{len(fitting) or 'no'} block forms fit", 0.0
        return self._with_experts(name, fitting[0][1]), "", fitting[0][0]

    def _stub(self, name: str, layer: nn.Module) -> tuple[_ProbeExperts | None, str]:
        """Returns probe experts for the layer's own code, and where they go in it."""
        for experts_name in self._experts:
            if experts_name.startswith(f"{name}."):
                path = experts_name.removeprefix(f"{name}.")
                return _ProbeExperts(int(layer.get_submodule(path).num_experts)), path
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
        self,
        layer: nn.Module,
        attention: AttentionLayer,
        rows: torch.Tensor,
        step: ProbeStep,
        stub: _ProbeExperts | None,
        path: str,
    ) -> tuple[torch.Tensor, Routing | None]:
        """Runs the layer's own code in float64 over what is packed, with its eager attention."""
        wide = _in_float64(layer, path)
        if stub is not None:
            _put(wide, path, stub)
        set_implementation(wide, "eager")
        num_rows = rows.shape[0]
        distance = torch.arange(num_rows)[:, None] - torch.arange(num_rows)[None]
        is_seen = (distance >= 0) & ((distance < attention.call.window) if attention.call.window else True)
        mask = torch.zeros(1, 1, num_rows, num_rows, dtype=torch.float64).masked_fill(~is_seen, -1e300)
        arguments = {
            **step.arguments, "attention_mask": mask, "past_key_values": None,
            "position_embeddings": step.exact_embeddings,
        }  # fmt: skip
        out = _first(wide(rows.double()[None], **arguments))[0]
        return out, None if stub is None else stub.seen

    def _own(
        self, layer: nn.Module, rows: torch.Tensor, step: ProbeStep, stub: _ProbeExperts | None, path: str
    ) -> torch.Tensor:
        before = layer.get_submodule(path) if path else None
        try:
            if stub is not None:
                _put(layer, path, stub)
            return _first(layer(rows[None], **step.arguments))[0].clone()
        finally:
            if before is not None:
                _put(layer, path, before)

    def _excess(
        self, candidate: HostLayer, rows: torch.Tensor, step: ProbeStep, own: torch.Tensor, exact: torch.Tensor,
        stub: _ProbeExperts | None, exact_routing: Routing | None,
    ) -> float:  # fmt: skip
        buffers = self._buffers.of(rows.shape[0])
        buffers.set_tables(step.cos, step.sin)
        ours = candidate(rows[None])[0]
        is_alike = torch.ones(len(rows), dtype=torch.bool)
        for routing in (None if stub is None else stub.seen, _routing_of(candidate)):
            if routing is not None and exact_routing is not None:
                is_alike &= _are_alike(routing, exact_routing)
        if is_alike.float().mean() < _LEAST_ROUTED_ALIKE:
            return float("inf")
        return excess(ours[is_alike], own[is_alike], exact[is_alike], is_pooled=True)


def _in_float64(layer: nn.Module, skipped: str) -> nn.Module:
    """Returns a copy of a layer in float64, without the experts at `skipped`."""
    experts = layer.get_submodule(skipped) if skipped else None
    hosts = {name: module for name, module in layer.named_modules() if hasattr(module, "exact")}
    memo: dict[int, Any] = {id(module): None for module in hosts.values()}
    if experts is not None:
        memo[id(experts)] = nn.Identity()
    # What is packed is not copied: each operator gives its own twin.
    for module in hosts.values():
        memo[id(module)] = module.exact()
    wide = copy.deepcopy(layer, memo)
    for module in list(wide.modules()):
        expand_latents(module)
    return wide.double()


def _put(layer: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(layer.get_submodule(parent) if parent else layer, name, module)


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _are_alike(routing: Routing, exact: Routing) -> torch.Tensor:
    """Says of each row whether it is routed as in float64. A weight may jump as a choice does,
    where a router mixes experts in whose logits are near enough.
    """
    ids, weights = routing
    is_near = (weights - exact[1]).abs() <= _NEAR_WEIGHT * exact[1].abs().amax(-1, keepdim=True)
    return (ids == exact[0]).all(-1) & is_near.all(-1)


def _routing_of(candidate: HostLayer) -> Routing | None:
    parts = candidate.feed_forward
    if not isinstance(parts, MoeParts) or not isinstance(parts.experts, _BoundProbe):
        return None
    return parts.experts.experts.seen
