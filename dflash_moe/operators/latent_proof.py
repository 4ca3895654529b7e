"""The proof that a layer's packed latent heads compute what its own `expand_kv` and its scores do.

The module expands latents to keys and values; ours take queries to the latents' space and what was
found there to values. So scores and values are compared, on latents that are probe rows.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from dflash_moe import _core
from dflash_moe.operators.addresses import DTYPE_NAMES
from dflash_moe.operators.bounds import excess, linear_bound
from dflash_moe.operators.paged_attention import LatentHeads, StoredHeads
from dflash_moe.operators.probes import FACTOR, probe_rows

# Probe rows are made smaller by these factors: products of large ones would leave the range of f16.
_SCALES = (1.0, 1e-2)
# A projection that is FACTOR times as large must give keys and values FACTOR times as large, in
# float64 to this part of the largest of them.
_AGREEMENT = 1e-5


def take_latent_heads(
    pool: _core.HostPool, module: Any, numerics: str, stored: StoredHeads | None = None
) -> tuple[LatentHeads | None, str]:
    """Packs the matrices by which an attention module expands latents, those that are `stored` as
    they are. Returns None and why where they do not fit its form; the module keeps its own in any
    case.
    """
    sizes = [getattr(module, name, 0) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")]
    projection = getattr(module, "kv_b_proj", None)
    if projection is None or type(projection) is not nn.Linear or not all(type(size) is int and size > 0 for size in sizes):
        return None, "it expands latents otherwise than by one kv_b_proj"
    weight = projection.weight.detach()
    if projection.bias is not None or weight.dtype not in DTYPE_NAMES or weight.shape[0] % (sizes[0] + sizes[2]):
        return None, "its kv_b_proj has a bias, or matrices of no form that heads have"
    try:
        if stored is None:
            heads, truth = LatentHeads(pool, module, weight, numerics), weight
        else:
            heads = LatentHeads(pool, module, weight, numerics, stored)
            truth = torch.from_numpy(stored.latents.joined())
            if truth.shape != weight.shape or not torch.equal(truth.to(weight.dtype), weight):
                return None, "its kv_b_proj is not what the file stores for it"
        found = latent_excess(heads, module, truth)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        return None, f"its expand_kv cannot be compared: {error}"
    if not found <= 1.0:
        return None, f"with latents absorbed, the error is {found:.3g} times what is allowed"
    if not _is_linear(heads, module, truth):
        return None, f"its expand_kv computes something else, such as a limit, where kv_b_proj gives {FACTOR:g} times as much"
    return heads, ""


def _is_linear(heads: LatentHeads, module: Any, truth: torch.Tensor) -> bool:
    """Says whether a module makes keys and values in proportion to what its projection gives."""
    latents = torch.cat((probe_rows(heads.latent, torch.float64, scales=_SCALES), _longest(truth)))
    rotated = latents.new_zeros((len(latents), int(module.qk_rope_head_dim)))
    usual = _expanded(_exact(module, truth), latents, rotated)
    large = _expanded(_exact(module, FACTOR * truth.double()), latents, rotated)
    return all(
        bool(((ours - FACTOR * theirs).abs() <= _AGREEMENT * ours.abs().amax()).all())
        for ours, theirs in zip(large, usual, strict=True)
    )


def _longest(weight: torch.Tensor) -> torch.Tensor:
    """Returns the longest row of some weights as a row [1, width] of values around 1."""
    row = weight[int(weight.double().square().sum(-1).argmax())].double()
    return (row / row.square().mean().sqrt().clamp_min(1e-30))[None]


def latent_excess(heads: LatentHeads, module: Any, truth: torch.Tensor) -> float:
    """Returns how far packed heads are from the attention module whose `kv_b_proj` they hold, in
    scores and in values: at most 1 where they may stand in. `truth` is its weight, where the
    module's dtype rounds what is packed the weight before that.
    """
    dtype, rope = module.kv_b_proj.weight.dtype, int(module.qk_rope_head_dim)
    latents = probe_rows(heads.latent, dtype, scales=_SCALES)
    rotated = probe_rows(rope, dtype, scales=_SCALES)
    query = probe_rows(heads.num_heads * (heads.nope + rope), dtype, scales=_SCALES)
    query = query.view(-1, heads.num_heads, heads.nope + rope)
    own_keys, own_values = _expanded(module, latents, rotated)
    exact_keys, exact_values = _expanded(_exact(module, truth), latents.double(), rotated.double())
    absorbed = heads.of_queries(query)
    values = heads.of_found(_repeated(latents, heads.num_heads), dtype)
    worst = 0.0
    for head in range(heads.num_heads):
        split = truth.double().view(heads.num_heads, -1, heads.latent)[head].split((heads.nope, heads.value))
        stored = torch.cat((latents, rotated), dim=-1).double()
        exact = query[:, head].double() @ exact_keys[head].T
        # The module rounds its keys and multiplies afterwards. Its error here is that of the keys
        # alone, so the product is taken in float64, and ours is held against the same.
        own = query[:, head].double() @ own_keys[head].double().T
        bound = linear_bound(heads.numerics, query[:, head, : heads.nope].double(), split[0].T) @ latents.double().abs().T
        error = excess(absorbed[:, head].double() @ stored.T, own, exact, bound, dtype=dtype)
        rounded = linear_bound(heads.value_numerics, latents.double(), split[1])
        worst = max(worst, error, excess(values[:, head], own_values[head], exact_values[head], rounded))
    return worst


def _expanded(module: Any, latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys and values [num_heads, num_rows, size] by the module's own method."""
    with torch.no_grad():
        keys, values = module.expand_kv(latents[None, None], rotated[None, None])
    return keys[0], values[0]


def _exact(module: Any, truth: torch.Tensor) -> Any:
    """Returns the module with a projection of `truth` in float64; all else of it is shared."""
    exact = copy.copy(module)
    projection = nn.Linear(truth.shape[1], truth.shape[0], bias=False, device="meta")
    projection.weight = nn.Parameter(truth.double(), requires_grad=False)
    exact.__dict__["_modules"] = {"kv_b_proj": projection}
    return exact


def _repeated(latents: torch.Tensor, num_heads: int) -> torch.Tensor:
    return latents.float()[:, None].expand(-1, num_heads, -1)
