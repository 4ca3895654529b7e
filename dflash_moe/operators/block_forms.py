"""Finds out whether a decoder layer, whose modules were taken over already, is one that `HostLayer`
computes: attention and feed-forward, each behind a norm and added to its input.

Candidates come from the kinds of a layer's children. One is taken only if it is the only one that
fits, on probe rows, the layer's own code run in float64 over the packed weights.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dflash_moe import _core
from dflash_moe.operators.activations import HostActivation
from dflash_moe.operators.attention_probe import AttentionLayer, set_implementation
from dflash_moe.operators.blocks import AttentionParts, BufferPool, Experts, HostLayer, MlpParts, MoeParts, Rotary
from dflash_moe.operators.bounds import excess
from dflash_moe.operators.linear import HostLinear
from dflash_moe.operators.norms import HostNorm
from dflash_moe.operators.paged_attention import LayerPages
from dflash_moe.operators.probes import SEED, probe_rows
from dflash_moe.operators.routers import HostRouter

# More rows than this are not probed; a longer window is an argument that attention's own tests see.
_MAX_ROWS = 200
_ROWS = 40
# At least so many rows must have been routed alike for the others to count as near ties.
_LEAST_ROUTED_ALIKE = 0.75
_LAYOUTS = ("halves", "interleaved", "interleaved_to_halves")


@dataclass(frozen=True, slots=True)
class ProbeStep:
    """A step of rows at positions 0, 1, ... of one sequence: the keyword arguments with which the
    model calls a layer, and its cosines and sines in float32, [num_rows, width].
    """

    arguments: dict[str, Any]
    cos: torch.Tensor
    sin: torch.Tensor


BeginStep = Callable[[int], AbstractContextManager[ProbeStep]]


class _ProbeExperts(nn.Module):  # type: ignore[misc]
    """Stands in for routed experts: scales rows by the routing weights and a number of each expert,
    so that a wrong weight or a wrong expert shows.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(SEED)
        self.factors = torch.rand(num_experts, generator=generator, dtype=torch.float64) + 0.5
        self.seen: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        self.seen = topk_ids.sort(dim=-1).values
        scale = (topk_weights.double() * self.factors[topk_ids.long()]).sum(-1, keepdim=True)
        return (hidden_states.double() * scale).to(hidden_states.dtype)


class _BoundProbe:
    """A `_ProbeExperts` as `blocks.Experts`."""

    def __init__(self, experts: _ProbeExperts) -> None:
        self._experts = experts

    def bind(self, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any) -> _BoundProbe:
        """Binds the tensors."""
        self._tensors = (hidden_states, topk_ids, topk_weights, out)
        return self

    def run(self) -> None:
        """Computes the result."""
        rows, ids, weights, out = self._tensors
        out.copy_(self._experts(rows, ids, weights))

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
        if attention.is_latent:
            return None, "latent attention has no block form", 0.0
        num_rows = min(_MAX_ROWS, max(_ROWS, attention.call.window + 3))
        with self._begin(num_rows) as step:
            candidates = list(self._candidates(name, layer, attention, pages, step.cos.shape[-1]))
            if not candidates:
                return None, "its children are not those of attention and feed-forward behind a norm each", 0.0
            rows = probe_rows(candidates[0].hidden_size, self._dtype, scales=(1.0, 8.0))
            rows = rows.repeat(-(-num_rows // len(rows)), 1)[:num_rows]
            stub, block = self._stub(name, layer)
            exact, exact_ids = self._exact(layer, attention, rows, step, stub, block)
            own = self._own(layer, rows, step, stub, block)
            fitting = []
            for candidate in candidates:
                found = self._excess(candidate, rows, step, own, exact, stub, exact_ids)
                if found <= 1.0:
                    fitting.append((found, candidate))
        if len(fitting) != 1:
            return None, f"{len(fitting) or 'no'} block forms fit", 0.0
        return self._with_experts(name, fitting[0][1]), "", fitting[0][0]

    # -- candidates ----------------------------------------------------------------------------
    def _candidates(
        self, name: str, layer: nn.Module, attention: AttentionLayer, pages: LayerPages, table_width: int
    ) -> Iterator[HostLayer]:
        local = attention.module.removeprefix(f"{name}.")
        children = dict(layer.named_children())
        norms = [child for child in children.values() if isinstance(child, HostNorm)]
        others = [
            child for key, child in children.items() if not isinstance(child, HostNorm) and key != local and _has_state(child)
        ]
        module = children.get(local)
        if module is None or len(norms) != 2 or len(others) != 1 or any(True for _ in layer.parameters(recurse=False)):
            return
        feed_forward = self._feed_forward(others[0])
        if feed_forward is None:
            return
        widths = {table_width, 2 * table_width}
        rotaries = [
            Rotary(layout, dim, table_width) for dim in sorted(widths) if dim <= attention.key_size for layout in _LAYOUTS
        ]
        # Norms that compute the same are one candidate, whichever comes first.
        orders = [tuple(norms)] if _same_norm(*norms) else list(itertools.permutations(norms))
        for (first, second), rotary in itertools.product(orders, rotaries):
            parts = _attention_parts(module, first, attention, pages, rotary)
            if parts is not None:
                yield HostLayer(self._pool, self._buffers, parts, feed_forward, second).eval()

    def _feed_forward(self, module: nn.Module) -> MlpParts | MoeParts | None:
        mlp = _mlp_parts(module)
        if mlp is not None:
            return mlp
        router, shared, gate, experts = None, None, None, None
        for child in module.children():
            if isinstance(child, HostRouter) and router is None:
                router = child
            elif isinstance(child, HostLinear) and child.out_features == 1 and gate is None:
                gate = child
            elif _mlp_parts(child) is not None and shared is None:
                shared = _mlp_parts(child)
            elif hasattr(child, "num_experts") and not isinstance(child, HostRouter) and experts is None:
                experts = child
            elif _has_state(child):
                return None
        if router is not None and router.form.has_bias and router.correction is None:
            # Its correction is given with each call, which the block would have to know.
            return None
        if router is None or experts is None or (gate is not None and shared is None):
            return None
        if shared is not None and gate is not None:
            shared = MlpParts(shared.gate, shared.up, shared.down, shared.activation, gate)
        return MoeParts(router, _BoundProbe(_ProbeExperts(router.form.num_experts)), shared)

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
        parts = MoeParts(found.feed_forward.router, experts, found.feed_forward.shared)
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
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
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
            "position_embeddings": (step.cos.double()[None], step.sin.double()[None]),
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
        stub: _ProbeExperts | None, exact_ids: torch.Tensor | None,
    ) -> float:  # fmt: skip
        buffers = self._buffers.of(rows.shape[0])
        buffers.set_tables(step.cos, step.sin)
        ours = candidate(rows[None])[0]
        is_alike = torch.ones(len(rows), dtype=torch.bool)
        for ids in (None if stub is None else stub.seen, _ids_of(candidate)):
            if ids is not None and exact_ids is not None:
                is_alike &= (ids == exact_ids).all(-1)
        if is_alike.float().mean() < _LEAST_ROUTED_ALIKE:
            return float("inf")
        return excess(ours[is_alike], own[is_alike], exact[is_alike], is_pooled=True)


def _same_norm(a: HostNorm, b: HostNorm) -> bool:
    return a.form == b.form and torch.equal(a.scale, b.scale) and a.shift is None and b.shift is None


def _attention_parts(
    module: nn.Module, norm: HostNorm, attention: AttentionLayer, pages: LayerPages, rotary: Rotary
) -> AttentionParts | None:
    children = {name: child for name, child in module.named_children() if _has_state(child)}
    linears = {name: children.pop(name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    norms = {name: children.pop(name, None) for name in ("q_norm", "k_norm")}
    if children or not all(isinstance(linear, HostLinear) for linear in linears.values()):
        return None
    if any(child is not None and not isinstance(child, HostNorm) for child in norms.values()):
        return None
    own = [value for value in module.parameters(recurse=False) if value is not attention.call.sinks]
    if own:
        return None
    call, kv_heads = attention.call, attention.num_kv_heads
    sizes = [linear.out_features for linear in linears.values() if isinstance(linear, HostLinear)]
    if sizes[:3] != [call.num_heads * attention.key_size, kv_heads * attention.key_size, kv_heads * attention.value_size]:
        return None
    for child, width in zip(norms.values(), sizes[:2], strict=True):
        if isinstance(child, HostNorm) and child.scale.numel() not in (attention.key_size, width):
            return None
    query, key, value, output = linears.values()
    return AttentionParts(
        norm, query, key, value, norms["q_norm"], norms["k_norm"], rotary, call, pages, kv_heads, attention.key_size, output
    )  # type: ignore[arg-type]


def _mlp_parts(module: nn.Module) -> MlpParts | None:
    children = {
        name: child for name, child in module.named_children() if _has_state(child) or isinstance(child, HostActivation)
    }
    linears = [children.pop(name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(isinstance(linear, HostLinear) for linear in linears) or len(children) != 1:
        return None
    activation = next(iter(children.values()))
    if not isinstance(activation, HostActivation):
        return None
    gate, up, down = linears
    return MlpParts(gate, up, down, activation.name)  # type: ignore[arg-type]


def _has_state(module: nn.Module) -> bool:
    """Says whether a child can be more than a name for something."""
    host = (HostLinear, HostNorm, HostRouter)
    return (
        isinstance(module, host)
        or hasattr(module, "num_experts")
        or any(True for _ in module.parameters())
        or any(isinstance(child, host) for child in module.modules())
    )


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
    return wide.double()


def _put(layer: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(layer.get_submodule(parent) if parent else layer, name, module)


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _ids_of(candidate: HostLayer) -> torch.Tensor | None:
    parts = candidate.feed_forward
    if not isinstance(parts, MoeParts) or not isinstance(parts.experts, _BoundProbe):
        return None
    return parts.experts._experts.seen
