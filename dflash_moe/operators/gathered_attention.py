"""Attention by torch over paged keys and values, behind transformers' attention interface: for each
group of sequences keys and values are gathered from the pages into a buffer, and torch's
scaled_dot_product_attention reads them there. It runs wherever torch runs.

Soft caps and sinks have no form there, so such layers compute in plain operators and in float32.
No row's bits are promised to be its own: torch chooses its kernels by the shapes of a batch.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from dflash_moe.errors import UnsupportedError
from dflash_moe.operators.attention_interface import AttentionTerms, on_interface
from dflash_moe.operators.paged_attention import as_latents
from dflash_moe.operators.row_groups import RowGroup
from dflash_moe.operators.step_context import StepContext, running_step

# This function has this name on the attention interface.
IMPLEMENTATION = "dflash_moe_gathered"
# This attribute of an attention module holds the pages of its layer.
_PAGES = "dflash_moe_gathered"
# A call's mask, and the scores of plain operators, have at most so many numbers: 64 MiB in float32.
# A chunk of a prefill is cut into pieces of rows where it would have more.
_MAX_SCORES = 1 << 24


class GatheredPages(Protocol):
    """What an attention module reads of a step."""

    def groups(self, step: StepContext, window: int) -> Sequence[RowGroup]:
        """Returns the groups of a step, for attention with a window, 0 for none."""
        ...

    def gather(self, index: int, group: RowGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what layer `index` stored as keys and values of a group, each [num_sequences,
        num_keys, num_kv_heads, size]. They are valid until the next call.
        """
        ...

    def token_bytes(self, index: int) -> int:
        """Returns the bytes that a token takes in a layer."""
        ...


@dataclass(frozen=True, slots=True)
class GatheredLayer:
    """Where one attention module finds its pages. Latents (MLA) are expanded by the module itself
    after they were gathered.
    """

    pages: GatheredPages
    index: int
    value_size: int
    # How many keys a query sees up to its own, 0 for all.
    window: int
    is_latent: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> GatheredLayer:
        # A copy of a module reads the same pages.
        return self

    def read(self, module: nn.Module, group: RowGroup, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what the queries of a group meet: keys and values, each [num_sequences,
        num_kv_heads, num_keys, size].
        """
        keys, values = (part.transpose(1, 2).to(dtype) for part in self.pages.gather(self.index, group))
        return expand(module, keys, values) if self.is_latent else (keys, values)


def attach(module: nn.Module, layer: GatheredLayer) -> None:
    """Gives an attention module the pages of its layer."""
    module.__dict__[_PAGES] = layer
    if layer.is_latent:
        module.__dict__["expand_kv"] = as_latents


def layer_of(module: nn.Module) -> GatheredLayer | None:
    """Returns what `attach` gave a module, None for any other module."""
    found: GatheredLayer | None = module.__dict__.get(_PAGES)
    return found


def expand(module: Any, latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the keys and values [num_sequences, num_heads, num_keys, size] of latents
    [num_sequences, 1, num_keys, size] and their rotated parts, by the module's own method.
    """
    keys, values = type(module).expand_kv(module, latents, rotated)
    return keys, values


def _attention(
    module: nn.Module, query: torch.Tensor, _key: torch.Tensor, _value: torch.Tensor, terms: AttentionTerms
) -> torch.Tensor:
    """Computes attention over pages, to which the cache has appended the rows' keys and values
    already. The window is that of the pages: a module may leave it to a mask.
    """
    layer = layer_of(module)
    if layer is None:
        raise UnsupportedError(f"{type(module).__name__}: has no pages; only an engine's model uses {IMPLEMENTATION}")
    num_heads, num_rows = query.shape[1:3]
    rows = query[0].transpose(0, 1)
    out = query.new_empty((num_rows, num_heads, layer.value_size))
    for group in layer.pages.groups(running_step(), layer.window):
        keys, values = layer.read(module, group, query.dtype)
        batch = rows[group.rows].unflatten(0, (group.num_sequences, group.num_rows))
        out[group.rows] = _attend(batch, keys, values, group, terms).flatten(0, 1)
    return out.unsqueeze(0)


def _is_plain(terms: AttentionTerms) -> bool:
    """Says whether scaled_dot_product_attention has a form for it."""
    return terms.softcap == 0.0 and terms.sinks is None


def _attend(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: RowGroup, terms: AttentionTerms
) -> torch.Tensor:
    """Returns [num_sequences, num_rows, num_heads, value_size] for rows [num_sequences, num_rows,
    num_heads, head_dim].
    """
    num_sequences, num_rows, num_heads, _ = rows.shape
    is_grouped = num_heads != keys.shape[1]
    if _is_plain(terms) and group.is_causal:
        # torch's kernels for cards have a form for this one with heads that share keys.
        found = scaled_dot_product_attention(
            rows.transpose(1, 2), keys, values, is_causal=True, scale=terms.scale, enable_gqa=is_grouped
        )
        return found.transpose(1, 2)
    heads = num_heads if not _is_plain(terms) else num_heads // keys.shape[1]
    most = max(1, _MAX_SCORES // (num_sequences * heads * group.num_keys))
    parts = []
    for begin in range(0, num_rows, most):
        mask = group.mask(begin, min(begin + most, num_rows))
        parts.append(_attend_piece(rows[:, begin : begin + most], keys, values, mask, terms))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _attend_piece(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, terms: AttentionTerms
) -> torch.Tensor:
    """Computes rows as `_attend` does. Heads that share a key are rows of one head: so no key is
    repeated, and kernels without a form for shared keys take them.
    """
    num_sequences, num_rows, num_heads, _ = rows.shape
    num_kv_heads = keys.shape[1]
    repeats = num_heads // num_kv_heads
    queries = rows.unflatten(2, (num_kv_heads, repeats)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if mask is not None:
        mask = mask[:, None] if num_rows == 1 else mask[:, None].repeat(1, 1, repeats, 1)
    if _is_plain(terms):
        found = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=terms.scale)
    else:
        found = _plain(queries, keys, values, mask, terms)
    return found.unflatten(2, (repeats, num_rows)).permute(0, 3, 1, 2, 4).reshape(num_sequences, num_rows, num_heads, -1)


def _plain(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, terms: AttentionTerms
) -> torch.Tensor:
    """Computes in float32 what scaled_dot_product_attention has no form for."""
    weights = queries.float() @ keys.float().transpose(2, 3)
    weights *= terms.scale
    if terms.softcap:
        weights = terms.softcap * torch.tanh(weights / terms.softcap)
    if mask is not None:
        weights.masked_fill_(~mask, -torch.inf)
    if terms.sinks is not None:
        num_sequences, num_kv_heads, num_rows, _ = queries.shape
        # Rows are in the order of the heads that share a key, as `_attend_piece` has them.
        sinks = terms.sinks.float().view(1, num_kv_heads, -1, 1)
        sinks = sinks.repeat_interleave(num_rows // sinks.shape[2], dim=2).expand(num_sequences, -1, -1, -1)
        weights = torch.cat((weights, sinks), dim=3)
    weights = torch.softmax(weights, dim=3)[..., : keys.shape[2]]
    return (weights @ values.float()).to(queries.dtype)


attention_forward = on_interface(IMPLEMENTATION, _attention)
