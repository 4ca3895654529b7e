"""Puts host layers in the place of a model's decoder layers where they are proven, connected to the
model's pages and to its routed experts.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from dflash_moe.forward.forward import PackedForward, StepRows
from dflash_moe.forward.kept_proofs import ModelProven
from dflash_moe.forward.layer_loop import LayerLoop
from dflash_moe.forward.step_blocks import StepBlocks
from dflash_moe.integrations.expert_route import Detours, ExpertRoute
from dflash_moe.integrations.transformers import route_of
from dflash_moe.model.architecture import find_experts, is_on_interface
from dflash_moe.operators.attention_probe import AttentionProbe
from dflash_moe.operators.layer_buffers import BufferPool
from dflash_moe.operators.layers.block_forms import LayerForms
from dflash_moe.operators.layers.blocks import HostLayer
from dflash_moe.operators.layers.layer_proof import ProbeStep
from dflash_moe.operators.linear import HostLinear
from dflash_moe.operators.norms import HostNorm
from dflash_moe.operators.probes import FACTOR
from dflash_moe.operators.report import Finding, TakeoverReport
from dflash_moe.operators.step_context import StepContext, computing

if TYPE_CHECKING:
    from dflash_moe import _core
    from dflash_moe.experts.expert_call import BoundExperts
    from dflash_moe.operators.paged_attention import LayerPages

_PROBE_TOKENS = 19
# Rows of so many positions are computed at once.
_PART = 128
# The model's outputs before and behind its layers are made so many times as large, to pass limits;
# f16 holds no more.
_FACTORS = {torch.float16: 16.0}


class _RoutedExperts:
    """The routed experts of a module, as host layers call them: through its route, which may be
    exchanged for a while.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def bind(self, hidden_states: Any, topk_ids: Any, topk_weights: Any, out: Any) -> _BoundRoute:
        """Binds the tensors."""
        return _BoundRoute(self._module, (hidden_states, topk_ids, topk_weights), out)


class _BoundRoute:
    """A call of a module's routed experts over fixed tensors."""

    def __init__(self, module: Any, tensors: tuple[Any, Any, Any], out: Any) -> None:
        self._module, self._tensors, self._out = module, tensors, out
        self._bound: BoundExperts | None = None

    def bound(self) -> tuple[BoundExperts, _core.CallCount, Detours] | None:
        """As `BoundCall.bound`: None where something stands in for the route."""
        route = route_of(self._module)
        if not isinstance(route, ExpertRoute):
            return None
        if self._bound is None:
            self._bound = route.runtime.bind(route.layer, *self._tensors, self._out)
        return self._bound, route.count, route.detours

    def run(self, step: StepContext) -> None:
        """Computes the result."""
        bound, clock = self._begin(), step.clock
        if bound is None:
            self._out.copy_(route_of(self._module).call(*self._tensors))
            return
        left_s = clock.leave()
        bound.run()
        clock.enter(left_s)

    def submit(self, step: StepContext) -> Callable[[], None]:
        """Starts the call and returns what waits for its end."""
        bound, clock = self._begin(), step.clock
        if bound is None:
            return lambda: self.run(step)
        submitted_s = perf_counter()
        finish = bound.submit()

        def wait() -> None:
            left_s = clock.leave()
            finish()
            clock.enter(left_s, submitted_s)

        return wait

    def _begin(self) -> BoundExperts | None:
        found = self.bound()
        if found is None:
            return None
        bound, count, _ = found
        count.add()
        return bound


def take_layers(
    packed: PackedForward, probe: AttentionProbe, pages: dict[str, LayerPages], report: TakeoverReport,
    known: ModelProven | None = None,
) -> ModelProven:  # fmt: skip
    """Puts host layers in the place of a model's decoder layers where they fit, and has the forward
    pass loop over them where that gives the bits of the model's own. Returns how the proofs of both
    ended. What `known` has of them is not proven again.
    """
    proven = ModelProven()
    _drop_unasked_tables(packed)
    reason = _why_not_one_table(packed)
    if reason:
        report.findings.append(Finding("", report.class_name, reason=f"layers: {reason}"))
        return proven
    model = packed.model
    buffers = BufferPool(packed.dtype)
    experts = {name: _RoutedExperts(module) for name, module in find_experts(model).items()}
    forms = LayerForms(
        packed.cache.pool, buffers, lambda count: _probe_step(packed, buffers, count), experts, packed.dtype,
        lambda positions: _step_at(packed, positions), packed.notable_positions,
    )  # fmt: skip
    layers = []
    for attention in sorted(probe.layers, key=lambda layer: layer.index):
        name = attention.module.rpartition(".")[0]
        layer = model.get_submodule(name)
        before = None if known is None else known.layers.get(name)
        found, one = forms.find(name, layer, attention, pages[attention.module], probe.layer_calls[name], before)
        proven.layers[name] = one
        kind = type(layer).__name__
        if found is None:
            report.findings.append(Finding(name, kind, reason=one.reason))
            continue
        parent, _, child = name.rpartition(".")
        layers.append((parent, child, layer, found))
        report.findings.append(Finding(name, kind, "layer", "attention and feed-forward blocks", excess=one.excess))
    if layers:
        packed.buffers = buffers
    for parent, child, layer, found in layers:
        _keep_experts(layer, found)
        setattr(model.get_submodule(parent), child, found)
    if len(layers) == len(probe.layers):
        is_proven = known.is_loop_proven if known is not None and known.layers == proven.layers else None
        _loop(packed, [found for _, _, _, found in layers], is_proven)
    proven.is_loop_proven = packed.loop is not None
    return proven


def _drop_unasked_tables(packed: PackedForward) -> None:
    """Forgets rotary modules that a pass over tokens does not ask, such as those of parts that
    see.
    """
    if len(packed.rotary) > 1:
        _logits_at(packed, range(_PROBE_TOKENS))
        packed.rotary = [tables for tables in packed.rotary if tables.is_used]


def _why_not_one_table(packed: PackedForward) -> str:
    """Returns why the layers of a model do not all rotate by the same cosines and sines."""
    if len(packed.rotary) != 1:
        return f"{len(packed.rotary)} rotary modules, expected one"
    if packed.rotary[0].wants_arguments:
        return "the rotary module's tables differ between layers"
    return ""


def _keep_experts(layer: nn.Module, found: HostLayer) -> None:
    """Keeps the routed experts of a layer in the model under their names, because the runtime's
    layers are known by these.
    """
    for name, module in layer.named_modules():
        if is_on_interface(module):
            *path, last = name.split(".")
            place: Any = found
            for part in path:
                if not hasattr(place, part):
                    place.add_module(part, nn.Module())
                place = getattr(place, part)
            place.add_module(last, module)


def _loop(packed: PackedForward, layers: list[HostLayer], is_proven: bool | None) -> None:
    """Has the forward pass loop over the layers where that gives the model's bits, of which
    `is_proven` says whether it does; None asks for the proof.
    """
    model = packed.model
    base = getattr(model, model.base_model_prefix, None)
    norms = [module for module in base.children() if isinstance(module, HostNorm)] if isinstance(base, nn.Module) else []
    head = model.get_output_embeddings()
    if len(norms) != 1 or not isinstance(head, HostLinear) or is_proven is False:
        return
    loop = LayerLoop(packed.cache.pool, model.get_input_embeddings(), layers, norms[0], head, packed.rotary[0])
    if is_proven:
        packed.loop = loop
        return
    expected = list(_probe_logits(packed, (model.get_input_embeddings(), norms[0], head)))
    packed.loop = loop
    found = _probe_logits(packed, (model.get_input_embeddings(), norms[0], head))
    if not all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True)):
        packed.loop = None


def _probe_logits(packed: PackedForward, outer: Sequence[nn.Module]) -> Iterator[torch.Tensor]:
    """Yields logits of rows at the first positions, the same where the modules `outer` around the
    layers give more, and of rows at all notable positions.
    """
    yield _logits_at(packed, range(_PROBE_TOKENS))
    factor = _FACTORS.get(packed.dtype, FACTOR)
    hooks = [module.register_forward_hook(lambda _module, _inputs, out: out * factor) for module in outer]
    try:
        yield _logits_at(packed, range(_PROBE_TOKENS))
    finally:
        for hook in hooks:
            hook.remove()
    size = min(_PART, packed.blocks.num_free * packed.blocks.block_tokens)
    for begin in range(0, len(packed.notable_positions), size):
        positions = packed.notable_positions[begin : begin + size]
        with packed.standing_at(positions):
            yield _logits_at(packed, positions)


def _logits_at(packed: PackedForward, positions: Sequence[int]) -> torch.Tensor:
    """Returns logits of some rows of random tokens, as many as there are positions."""
    count = len(positions)
    token_ids = torch.randint(0, packed.vocab_size, (count,), generator=torch.Generator().manual_seed(count)).tolist()
    sequence = packed.admit(count)
    try:
        return packed.forward([StepRows(sequence, token_ids, num_logits=count)]).clone()
    finally:
        sequence.release()


@contextmanager
def _probe_step(packed: PackedForward, buffers: BufferPool, num_rows: int) -> Iterator[ProbeStep]:
    sequence, planned = packed.admit(num_rows), StepBlocks()
    try:
        planned.append(sequence.blocks, num_rows)
        step = packed.context([StepRows(sequence, range(num_rows))], planned.pack())
        with computing(replace(step, pool=buffers)):
            yield _given(packed, step)
    finally:
        planned.roll_back()


def _step_at(packed: PackedForward, positions: Sequence[int]) -> ProbeStep:
    """Returns what a layer is given of rows at these positions, for copies that need no pages."""
    places = np.array(positions, np.int64)
    return _given(packed, StepContext(places, torch.empty(0), (), [(len(places), 0, len(places))], int(places[-1])))


def _given(packed: PackedForward, step: StepContext) -> ProbeStep:
    tables = packed.rotary[0]
    embeddings, wide = (tables.of(step, torch.zeros(1, 1, 1, dtype=dtype)) for dtype in (packed.dtype, torch.float32))
    exact = tuple(table.double() for table in wide) if isinstance(wide, tuple) else wide.to(torch.complex128)
    arguments = {
        "attention_mask": None, "position_ids": step.position_ids, "past_key_values": packed.cache, "use_cache": True,
        "position_embeddings": embeddings,
    }  # fmt: skip
    return ProbeStep(arguments, *tables.cos_sin(step), exact)
