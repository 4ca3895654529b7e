"""Which host layers a decoder layer might be, by the kinds, names and shapes of its children. None
of it is believed: `block_forms.py` compares each candidate with the layer's own code.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import nn

from dflash_moe.operators.activations import HostActivation
from dflash_moe.operators.attention_probe import AttentionLayer
from dflash_moe.operators.layers.attention_block import AttentionBlock, GroupedAttention, LatentAttention
from dflash_moe.operators.layers.blocks import Experts, MlpParts, MoeParts
from dflash_moe.operators.layers.bound_calls import Rotary
from dflash_moe.operators.linear import HostLinear
from dflash_moe.operators.norms import HostNorm
from dflash_moe.operators.paged_attention import LayerPages
from dflash_moe.operators.routers import HostRouter

# The parts of a host layer: attention, feed-forward, and the norm before the latter.
Parts = tuple[AttentionBlock, MlpParts | MoeParts, HostNorm]
# Makes the routed experts of a candidate, given how many there are.
MakeExperts = Callable[[int], Experts]


def candidates(
    name: str, layer: nn.Module, attention: AttentionLayer, pages: LayerPages, table_width: int, make_experts: MakeExperts
) -> Iterator[Parts]:
    """Yields the parts of each host layer that the decoder layer `name` may be. Its tables of
    cosines are `table_width` wide.
    """
    local = attention.module.removeprefix(f"{name}.")
    children = dict(layer.named_children())
    norms = [child for child in children.values() if isinstance(child, HostNorm)]
    others = [
        child for key, child in children.items() if not isinstance(child, HostNorm) and key != local and _has_state(child)
    ]
    module = children.get(local)
    if module is None or len(norms) != 2 or len(others) != 1 or any(True for _ in layer.parameters(recurse=False)):
        return
    feed_forward = _feed_forward(others[0], make_experts)
    if feed_forward is None:
        return
    # Norms that compute the same are one candidate, whichever comes first.
    orders = [tuple(norms)] if _same_norm(*norms) else list(itertools.permutations(norms))
    for (first, second), rotary in itertools.product(orders, _rotaries(table_width)):
        block: AttentionBlock | None
        if attention.is_latent:
            block = _latent_attention(module, first, attention, pages, rotary)
        else:
            block = _grouped_attention(module, first, attention, pages, rotary)
        if block is not None:
            yield block, feed_forward, second


def _same_norm(a: HostNorm, b: HostNorm) -> bool:
    if a.form != b.form or not torch.equal(a.scale, b.scale) or (a.shift is None) != (b.shift is None):
        return False
    return a.shift is None or b.shift is None or torch.equal(a.shift, b.shift)


def _rotaries(table_width: int) -> Iterator[Rotary]:
    for layout in ("halves", "interleaved", "interleaved_to_halves"):
        yield Rotary(layout, table_width, table_width)
    # Over half tables it makes no difference to which places interleaved pairs are written: queries
    # and keys are written alike, and only their products count.
    for layout in ("halves", "interleaved"):
        yield Rotary(layout, 2 * table_width, table_width)


# -- attention -------------------------------------------------------------------------------------
def _grouped_attention(
    module: nn.Module, norm: HostNorm, attention: AttentionLayer, pages: LayerPages, rotary: Rotary
) -> GroupedAttention | None:
    # By these names norms come before the rotary embedding, or behind it. Which one is right can
    # only be seen where their weights differ.
    names = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"))
    is_behind = any(isinstance(getattr(module, name, None), HostNorm) for name in names[1])
    found = _children(module, ("q_proj", "k_proj", "v_proj", "o_proj"), names[is_behind], attention)
    if found is None or rotary.dim > attention.key_size:
        return None
    (query, key, value, output), (query_norm, key_norm) = found
    if query is None or key is None or value is None or output is None:
        return None
    call, kv_heads = attention.call, attention.num_kv_heads
    sizes = [query.out_features, key.out_features, value.out_features]
    if sizes != [call.num_heads * attention.key_size, kv_heads * attention.key_size, kv_heads * attention.value_size]:
        return None
    for child, width in ((query_norm, query.out_features), (key_norm, key.out_features)):
        if child is not None and child.scale.numel() not in (attention.key_size, width):
            return None
    return GroupedAttention(norm, query, key, value, query_norm, key_norm, rotary, call, pages, kv_heads, output, is_behind)


def _latent_attention(
    module: nn.Module, norm: HostNorm, attention: AttentionLayer, pages: LayerPages, rotary: Rotary
) -> LatentAttention | None:
    names = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
    found, heads = _children(module, names, ("q_a_layernorm", "kv_a_layernorm"), attention), pages.latent
    if found is None or heads is None or rotary.dim != attention.value_size:
        return None
    (direct, down, up, latent, output), (query_norm, latent_norm) = found
    query = up if direct is None else direct
    is_low_rank = down is not None and query_norm is not None
    if query is None or latent is None or output is None or latent_norm is None or (direct is None) != is_low_rank:
        return None
    sizes = [query.out_features, latent.out_features, output.in_features, latent_norm.scale.numel()]
    expected = [
        heads.num_heads * (heads.nope + rotary.dim), heads.latent + rotary.dim, heads.num_heads * heads.value, heads.latent,
    ]  # fmt: skip
    if sizes != expected or attention.call.num_heads != heads.num_heads:
        return None
    return LatentAttention(norm, down, query_norm, query, latent, latent_norm, rotary, attention.call, pages, heads, output)


def _children(
    module: nn.Module, linears: tuple[str, ...], norms: tuple[str, ...], attention: AttentionLayer
) -> tuple[list[HostLinear | None], list[HostNorm | None]] | None:
    """Returns the children of these names, or None where one is of another kind, or where the
    module has further children or parameters.
    """
    children = {name: child for name, child in module.named_children() if _has_state(child)}
    found_linears, found_norms = [children.pop(name, None) for name in linears], [children.pop(name, None) for name in norms]
    own = [value for value in module.parameters(recurse=False) if value is not attention.call.sinks]
    if children or own:
        return None
    if not all(child is None or isinstance(child, HostLinear) for child in found_linears):
        return None
    if not all(child is None or isinstance(child, HostNorm) for child in found_norms):
        return None
    return found_linears, found_norms


# -- feed forward ----------------------------------------------------------------------------------
def _feed_forward(module: nn.Module, make_experts: MakeExperts) -> MlpParts | MoeParts | None:
    mlp = _mlp(module)
    if mlp is not None:
        return mlp
    router, shared, gate, experts = None, None, None, None
    for child in module.children():
        if isinstance(child, HostRouter) and router is None:
            router = child
        elif isinstance(child, HostLinear) and child.out_features == 1 and gate is None:
            gate = child
        elif _mlp(child) is not None and shared is None:
            shared = _mlp(child)
        elif hasattr(child, "num_experts") and not isinstance(child, HostRouter) and experts is None:
            experts = child
        elif _has_state(child):
            return None
    if router is None or experts is None or (gate is not None and shared is None):
        return None
    correction = None
    if router.signature.takes_correction and router.form.has_bias:
        correction = _correction(module, router.form.num_experts)
        if correction is None:
            return None
    if shared is not None and gate is not None:
        shared = MlpParts(shared.gate, shared.up, shared.down, shared.activation, gate)
    return MoeParts(router, make_experts(router.form.num_experts), shared, correction)


def _mlp(module: nn.Module) -> MlpParts | None:
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


def _correction(module: nn.Module, num_experts: int) -> torch.Tensor | None:
    """Returns the one vector over experts that a block has, with which it calls its router."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    found = [value for value in own if value.numel() == num_experts]
    return found[0].detach().float().flatten().contiguous() if len(found) == 1 else None


def _has_state(module: nn.Module) -> bool:
    """Says whether a child can be more than a name for something."""
    host = (HostLinear, HostNorm, HostRouter)
    return (
        isinstance(module, host)
        or hasattr(module, "num_experts")
        or any(True for _ in module.parameters())
        or any(isinstance(child, host) for child in module.modules())
    )
