"""What a host layer computes, by its formulas in float64: the twin of `HostLayer` that is compared
with a layer's own code where float32 would hide what both do (`layer_proof.py`).

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dflash_moe.model.gates import activate
from dflash_moe.operators.layers.attention_block import GroupedAttention, LatentAttention
from dflash_moe.operators.layers.blocks import HostLayer, MlpParts, MoeParts
from dflash_moe.operators.layers.bound_calls import Rotary

# Attention over queries, keys and values [num_heads, num_rows, size], with the scale of products.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


class ExactLayer:
    """A host layer over the float64 modules that stand in for its operators, `exact` by the id of
    each. `expand` is the layer of torch that expands latents, and `experts` are what both use.
    """

    def __init__(
        self, layer: HostLayer, exact: Mapping[int, nn.Module], expand: nn.Module | None, experts: nn.Module | None
    ) -> None:
        self._layer, self._exact, self._expand, self._experts = layer, exact, expand, experts

    def __call__(self, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Returns [num_rows, hidden_size] for rows of these cosines and sines [num_rows, width]."""
        block = self._layer.attention
        normed = self._of(block.norm)(rows)
        if isinstance(block, LatentAttention):
            attended = self._latent(block, normed, cos, sin, attend)
        else:
            assert isinstance(block, GroupedAttention)
            attended = self._grouped(block, normed, cos, sin, attend)
        middle = rows + self._of(block.output)(attended.transpose(0, 1).flatten(1))
        rows, parts = self._of(self._layer.feed_forward_norm)(middle), self._layer.feed_forward
        if isinstance(parts, MlpParts):
            return middle + self._mlp(parts, rows)
        out = middle + self._routed(parts, rows)
        return out if parts.shared is None else out + self._mlp(parts.shared, rows)

    def _of(self, operator: nn.Module | None) -> Any:
        return self._exact[id(operator)]

    def _grouped(
        self, block: GroupedAttention, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        value = _heads(self._of(block.value)(rows), block.num_kv_heads)
        found = []
        for linear, norm, count in (
            (block.query, block.query_norm, block.call.num_heads), (block.key, block.key_norm, block.num_kv_heads),
        ):  # fmt: skip
            out = self._of(linear)(rows)
            if not block.norms_follow_rotary:
                out = self._normed(norm, out)
            out = turned(block.rotary, _heads(out, count), cos, sin).transpose(0, 1).flatten(1)
            if block.norms_follow_rotary:
                out = self._normed(norm, out)
            found.append(_heads(out, count))
        return attend(found[0], found[1], value, block.call.scale)

    def _normed(self, norm: nn.Module | None, out: torch.Tensor) -> torch.Tensor:
        """Applies a norm over each head or over all of them, by its width."""
        if norm is None:
            return out
        normed: torch.Tensor = self._of(norm)(out.reshape(-1, norm.scale.numel()))
        return normed.view_as(out)

    def _latent(
        self, block: LatentAttention, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        heads = block.heads
        stored = self._of(block.latent)(rows)
        latent = self._of(block.latent_norm)(stored[:, : heads.latent])
        turning = turned(block.rotary, _heads(stored[:, heads.latent :], 1), cos, sin)
        if block.query_down is not None:
            rows = self._of(block.query_norm)(self._of(block.query_down)(rows))
        query = _heads(self._of(block.query)(rows), heads.num_heads)
        query = torch.cat((query[..., : heads.nope], turned(block.rotary, query[..., heads.nope :], cos, sin)), dim=-1)
        assert self._expand is not None
        expanded = _heads(self._expand(latent), heads.num_heads)
        key = torch.cat((expanded[..., : heads.nope], turning.expand(heads.num_heads, -1, -1)), dim=-1)
        return attend(query, key, expanded[..., heads.nope :], block.call.scale)

    def _mlp(self, parts: MlpParts, rows: torch.Tensor) -> torch.Tensor:
        gate = activate(parts.activation, self._of(parts.gate)(rows))
        out: torch.Tensor = self._of(parts.down)(gate * self._of(parts.up)(rows))
        return out if parts.row_gate is None else out * torch.sigmoid(self._of(parts.row_gate)(rows))

    def _routed(self, parts: MoeParts, rows: torch.Tensor) -> torch.Tensor:
        assert self._experts is not None
        signature = parts.router.signature
        arguments = (rows,) if parts.correction is None else (rows, parts.correction)
        found = self._of(parts.router)(*arguments)
        out: torch.Tensor = self._experts(rows, found[signature.ids], found[signature.weights])
        return out


def turned(rotary: Rotary, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns heads [num_heads, num_rows, size] whose first values are turned, by the formula of
    csrc/compute/operators/rotary.h.
    """
    rotated, rest = heads[..., : rotary.dim], heads[..., rotary.dim :]
    is_interleaved = rotary.layout == "interleaved"
    first, second = _halves(rotated) if rotary.layout == "halves" else _pairs(rotated)
    tables = []
    for table in (cos, sin):
        if rotary.table_width != rotary.dim:
            tables.append((table, table))
        else:
            tables.append(_pairs(table) if is_interleaved else _halves(table))
    (cos_first, cos_second), (sin_first, sin_second) = tables
    out = (first * cos_first - second * sin_first, second * cos_second + first * sin_second)
    joined = torch.stack(out, dim=-1).flatten(-2) if is_interleaved else torch.cat(out, dim=-1)
    return torch.cat((joined, rest), dim=-1)


def _halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = values.chunk(2, dim=-1)
    return first, second


def _pairs(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return values[..., 0::2], values[..., 1::2]


def _heads(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Returns rows [num_rows, num_heads * size] as [num_heads, num_rows, size]."""
    return rows.unflatten(-1, (count, -1)).transpose(0, 1)
