"""The attention blocks of host layers, each behind its norm and added to its input: grouped queries
over keys and values, and multi-head latent attention (MLA) over the latents themselves.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from dflash_moe import _core
from dflash_moe.operators.attention_probe import AttentionCall
from dflash_moe.operators.layer_buffers import BufferPool, LayerBuffers, part
from dflash_moe.operators.layers.bound_calls import (
    Rotary,
    append,
    attend,
    copy,
    multiply,
    multiply_together,
    normalise,
    rotate,
)
from dflash_moe.operators.layers.step_program import StepProgram
from dflash_moe.operators.linear import HostLinear
from dflash_moe.operators.norms import HostNorm
from dflash_moe.operators.paged_attention import LatentHeads, LayerPages


class AttentionBlock(Protocol):
    """What a host layer has of its attention block."""

    @property
    def norm(self) -> HostNorm:
        """The norm before it."""
        ...

    @property
    def rotary(self) -> Rotary:
        """How its heads turn."""
        ...

    @property
    def output(self) -> HostLinear:
        """The layer behind attention."""
        ...

    def grow(self, buffers: BufferPool) -> None:
        """Makes room for its rows in all buffers."""
        ...

    def bind(self, pool: _core.HostPool, buffers: LayerBuffers, program: StepProgram) -> None:
        """Appends the calls that take `buffers.hidden_states` to their sum with attention, which is
        in `buffers.middle` afterwards.
        """
        ...


@dataclass(frozen=True)
class GroupedAttention:
    """Queries, keys and values by one matrix each, and groups of query heads that share a key
    head. The operators are in the order in which they compute, but for norms that
    `norms_follow_rotary`.
    """

    norm: HostNorm
    query: HostLinear
    key: HostLinear
    value: HostLinear
    query_norm: HostNorm | None
    key_norm: HostNorm | None
    rotary: Rotary
    call: AttentionCall
    pages: LayerPages
    num_kv_heads: int
    output: HostLinear
    norms_follow_rotary: bool = False

    def grow(self, buffers: BufferPool) -> None:
        """Makes room for its rows in all buffers."""
        buffers.grow(
            hidden_size=self.output.out_features, query=self.query.out_features, key=self.key.out_features,
            value=self.value.out_features, attended=self.output.in_features, table=self.rotary.table_width,
        )  # fmt: skip

    def bind(self, pool: _core.HostPool, buffers: LayerBuffers, program: StepProgram) -> None:
        """Appends the calls of the block over these buffers."""
        b = buffers
        query, key = part(b.query, self.query.out_features), part(b.key, self.key.out_features)
        value, attended = part(b.value, self.value.out_features), part(b.attended, self.output.in_features)
        normed, middle = part(b.normed, self.query.in_features), part(b.middle, self.output.out_features)
        normalise(program, self.norm, b.hidden_states, normed)
        multiply_together(program, (self.query, self.key, self.value), normed, (query, key, value))
        if not self.norms_follow_rotary:
            self._norm_heads(program, query, key)
        rotate(program, pool, self.rotary, b, query, self.call.num_heads)
        rotate(program, pool, self.rotary, b, key, self.num_kv_heads)
        if self.norms_follow_rotary:
            self._norm_heads(program, query, key)
        append(program, self.pages, key, value)
        attend(program, self.pages, self.call, query, attended)
        multiply(program, self.output.packed, attended, middle, residual=b.hidden_states)

    def _norm_heads(self, program: StepProgram, query: torch.Tensor, key: torch.Tensor) -> None:
        for norm, out in ((self.query_norm, query), (self.key_norm, key)):
            if norm is not None:
                # A norm over each head sees heads as rows, and one over all heads sees tokens.
                shaped = out.view(-1, norm.scale.numel())
                normalise(program, norm, shaped, shaped)


@dataclass(frozen=True)
class LatentAttention:
    """MLA: pages hold a latent of each token and a rotated key that all heads share, and heads read
    latents by the matrices in `heads`. Queries may go through a low rank: `query_down`, a norm, and
    `query`; otherwise `query` reads the rows (arXiv:2405.04434, section 2.1).
    """

    norm: HostNorm
    query_down: HostLinear | None
    query_norm: HostNorm | None
    query: HostLinear
    latent: HostLinear
    latent_norm: HostNorm
    rotary: Rotary
    call: AttentionCall
    pages: LayerPages
    heads: LatentHeads
    output: HostLinear

    def grow(self, buffers: BufferPool) -> None:
        """Makes room for its rows in all buffers."""
        heads = self.heads
        buffers.grow(
            hidden_size=self.output.out_features, query=self.query.out_features, key=self.latent.out_features,
            low_rank=self.query.in_features, attended=self.output.in_features, table=self.rotary.table_width,
            absorbed=heads.num_heads * heads.latent, latent_query=heads.num_heads * self.latent.out_features,
        )  # fmt: skip

    def bind(self, pool: _core.HostPool, buffers: LayerBuffers, program: StepProgram) -> None:
        """Appends the calls of the block over these buffers."""
        b, heads = buffers, self.heads
        normed, middle = part(b.normed, self.latent.in_features), part(b.middle, self.output.out_features)
        query, attended = part(b.query, self.query.out_features), part(b.attended, self.output.in_features)
        # What a token stores: its latent, and behind it the key that turns.
        stored = part(b.key, self.latent.out_features)
        latent, turning = stored[:, : heads.latent], stored[:, heads.latent :]
        normalise(program, self.norm, b.hidden_states, normed)
        if self.query_down is None or self.query_norm is None:
            multiply_together(program, (self.query, self.latent), normed, (query, stored))
        else:
            low_rank = part(b.low_rank, self.query.in_features)
            multiply_together(program, (self.query_down, self.latent), normed, (low_rank, stored))
            normalise(program, self.query_norm, low_rank, low_rank)
            multiply(program, self.query.packed, low_rank, query)
        normalise(program, self.latent_norm, latent, latent)
        rotate(program, pool, self.rotary, b, turning, 1)
        rotate(program, pool, self.rotary, b, query, heads.num_heads, offset=heads.nope)
        append(program, self.pages, stored, latent)
        # A head's query for the pages is its product with the head's matrix, and behind it the part
        # that turns.
        absorbed = part(b.absorbed, heads.num_heads * heads.latent)
        latent_query = part(b.latent_query, heads.num_heads * stored.shape[1])
        per_head, products = latent_query.view(-1, stored.shape[1]), absorbed.view(-1, heads.latent)
        turned = query.view(-1, heads.nope + self.rotary.dim)[:, heads.nope :]
        multiply(program, heads.keys, query, absorbed)
        copy(program, products, per_head[:, : heads.latent])
        copy(program, turned, per_head[:, heads.latent :])
        # What attention finds takes the place of the products.
        attend(program, self.pages, self.call, latent_query, absorbed)
        multiply(program, heads.values, absorbed, attended)
        multiply(program, self.output.packed, attended, middle, residual=b.hidden_states)
