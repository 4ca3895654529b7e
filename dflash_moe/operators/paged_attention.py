"""Paged attention behind transformers' attention interface: a module's own forward makes queries,
keys and values, and our function computes over the pages that hold the keys.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from dflash_moe import _core
from dflash_moe.errors import UnsupportedError
from dflash_moe.operators.addresses import DTYPE_NAMES, dense, rows_of
from dflash_moe.operators.attention_interface import AttentionTerms, on_interface
from dflash_moe.operators.linear import memory_source, weights_of
from dflash_moe.operators.step_context import running_step

if TYPE_CHECKING:
    from dflash_moe.model.dense_tensors import StoredLatents

# Our function has this name on the attention interface.
IMPLEMENTATION = "dflash_moe_paged"
# This attribute of an attention module holds the pages of its layer.
_PAGES = "dflash_moe_pages"


class Pages(Protocol):
    """The pages that an attention module's layer is in."""

    pool: _core.HostPool

    def layer(self, index: int) -> _core.KvLayer:
        """Returns the pages of a layer."""
        ...


@dataclass(frozen=True, slots=True)
class StoredHeads:
    """What a checkpoint stores for absorbed attention, and the classes of its keys and values."""

    latents: StoredLatents
    numerics: tuple[str, ...]


class LatentHeads:
    """The matrices by which an MLA layer's heads read latents: queries are taken to the latents'
    space, and what attention finds there is taken to values. So prefill and decode share one
    arithmetic, and keys are never expanded.
    """

    def __init__(
        self, pool: _core.HostPool, module: Any, weight: torch.Tensor, numerics: str, stored: StoredHeads | None = None
    ) -> None:
        """`weight` [num_heads * (nope + value), latent] is that of the module's kv_b_proj. What is
        `stored` is packed in its stead.
        """
        self.nope, self.value, self.latent = module.qk_nope_head_dim, module.v_head_dim, module.kv_lora_rank
        self.num_heads = weight.shape[0] // (self.nope + self.value)
        size = self.nope + module.qk_rope_head_dim
        heads = weight.view(self.num_heads, self.nope + self.value, self.latent)
        if stored is None:
            key_sources = [memory_source(head[: self.nope].T) for head in heads]
            value_sources = [memory_source(head[self.nope :]) for head in heads]
        else:
            key_sources, value_sources = stored.latents.key_sources(), stored.latents.value_sources()
        keys = [(source, None, head * size) for head, source in enumerate(key_sources)]
        values = [(source, None, head * self.latent) for head, source in enumerate(value_sources)]
        numerics, value_numerics = (numerics, numerics) if stored is None else stored.numerics
        # Rows of queries [num_heads * (nope + rope)] times `keys`, and rows that attention found
        # [num_heads * latent] times `values`.
        self.keys = _core.PackedLinear(pool, keys, numerics=numerics)
        self.values = _core.PackedLinear(pool, values, numerics=value_numerics)
        # The classes that take these weights, which may be others than were asked for.
        self.numerics, self.value_numerics = self.keys.numerics[0], self.values.numerics[0]

    def of_queries(self, query: torch.Tensor) -> torch.Tensor:
        """Returns [num_rows, num_heads, latent + rope] for queries [num_rows, num_heads, nope +
        rope].
        """
        query = dense(query)
        products = query.new_empty((query.shape[0], self.num_heads * self.latent), dtype=torch.float32)
        self.keys.run(*rows_of(query.flatten(1)), *rows_of(products)[:3])
        return torch.cat((products.unflatten(1, (self.num_heads, -1)), query[..., self.nope :].float()), dim=-1)

    def of_found(self, found: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns [num_rows, num_heads, value] for what attention found, [num_rows, num_heads,
        latent].
        """
        found = dense(found)
        out = found.new_empty((found.shape[0], self.num_heads * self.value), dtype=dtype)
        self.values.run(*rows_of(found.flatten(1)), *rows_of(out)[:3])
        return out.unflatten(1, (self.num_heads, -1))

    def exact(self) -> nn.Module:
        """Returns the kv_b_proj that is packed here as a layer of torch in float64."""
        keys = weights_of(self.keys).view(self.num_heads, self.latent, self.nope).transpose(1, 2)
        values = weights_of(self.values).view(self.num_heads, self.value, self.latent)
        weight = torch.cat((keys, values), dim=1).flatten(0, 1)
        linear = nn.Linear(self.latent, weight.shape[0], bias=False, dtype=torch.float64)
        linear.weight = nn.Parameter(weight.double(), requires_grad=False)
        return linear


class LayerPages:
    """Where one attention module finds its pages, the window of keys that it reads (0 for all), and
    its latent heads where it has them.
    """

    __slots__ = ("_sinks", "index", "latent", "pages", "value_size", "window")

    def __init__(self, pages: Pages, index: int, value_size: int, window: int, latent: LatentHeads | None) -> None:
        self.pages = pages
        self.index = index
        self.value_size = value_size
        self.window = window
        self.latent = latent
        # The sinks as float32, by the tensor that they were given as.
        self._sinks: tuple[torch.Tensor, torch.Tensor] | None = None

    def sinks_address(self, given: torch.Tensor | None) -> int:
        """Returns where sinks [num_heads] of any dtype lie in float32, 0 for none. They stay there
        until others are given.
        """
        if given is None:
            return 0
        if self._sinks is None or self._sinks[0] is not given:
            self._sinks = (given, given.detach().float().contiguous())
        address: int = self._sinks[1].data_ptr()
        return address

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerPages:
        # A copy of a module reads the same pages.
        return self


def attach(module: nn.Module, pages: LayerPages) -> None:
    """Gives an attention module the pages of its layer."""
    module.__dict__[_PAGES] = pages
    if pages.latent is not None:
        module.__dict__["expand_kv"] = as_latents


def pages_of(module: nn.Module) -> LayerPages | None:
    """Returns the pages that `attach` gave a module, None for any other module."""
    found: LayerPages | None = module.__dict__.get(_PAGES)
    return found


def as_latents(kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for a module's `expand_kv`: attention reads latents, keys are never expanded."""
    return kv_nope, k_rot


def _attention(
    module: nn.Module, query: torch.Tensor, _key: torch.Tensor, _value: torch.Tensor, terms: AttentionTerms
) -> torch.Tensor:
    """Computes attention over pages, to which the cache has appended the rows' keys and values
    already. The window is that of the pages: a module may leave it to a mask.
    """
    found = module.__dict__.get(_PAGES)
    if found is None:
        raise UnsupportedError(f"{type(module).__name__}: has no pages; only an engine's model uses {IMPLEMENTATION}")
    num_heads, num_rows = query.shape[1:3]
    rows = query[0].transpose(0, 1)
    latent = found.latent
    kv_layer = found.pages.layer(found.index)
    dtype = query.dtype
    if latent is not None:
        rows = latent.of_queries(rows)
    rows = _adjacent(rows)
    step = running_step()
    step.await_keys(found.index)
    out = query.new_empty((num_rows, num_heads, found.value_size), dtype=torch.float32 if latent is not None else dtype)
    _core.paged_attention(
        found.pages.pool, kv_layer, step.plan, rows.data_ptr(), rows.stride(0) * rows.element_size(),
        DTYPE_NAMES[rows.dtype], num_heads, out.data_ptr(), out.stride(0) * out.element_size(), DTYPE_NAMES[out.dtype],
        scale=terms.scale, window=found.window, softcap=terms.softcap, sinks_address=found.sinks_address(terms.sinks),
    )  # fmt: skip
    if latent is not None:
        out = latent.of_found(out, dtype)
    return out.unsqueeze(0)


def _adjacent(rows: torch.Tensor) -> torch.Tensor:
    """Returns rows [num_rows, num_heads, head_dim] whose heads lie side by side."""
    return rows if rows.stride()[1:] == (rows.shape[2], 1) else rows.contiguous()


def append(layer: _core.KvLayer, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Appends the keys and values [1, num_kv_heads, num_rows, size] of all rows of a step to their
    slots, int64 [num_rows], in one call.
    """
    key, value = _adjacent(key[0].transpose(0, 1)), _adjacent(value[0].transpose(0, 1))
    layer.append(
        slots.data_ptr(), slots.numel(), key.data_ptr(), key.stride(0) * key.element_size(), DTYPE_NAMES[key.dtype],
        value.data_ptr(), value.stride(0) * value.element_size(), DTYPE_NAMES[value.dtype],
    )  # fmt: skip


def expand_latents(module: nn.Module) -> None:
    """Has a copy of an attention module expand latents again as its own code does, in float64. Any
    other module stays as it is.
    """
    found = pages_of(module)
    if found is not None and found.latent is not None:
        del module.__dict__["expand_kv"]
        module.kv_b_proj = found.latent.exact()


on_interface(IMPLEMENTATION, _attention)
