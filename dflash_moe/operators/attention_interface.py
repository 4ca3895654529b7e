"""transformers' attention interface: a module's own forward makes queries, keys and values, and
calls the function that its configuration names.

Attention is not recognised but enters by its interface. So whatever the interface may be told that
our functions do not compute is refused by name, and such a family keeps one sequence at a time.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash_moe.errors import UnsupportedError

# What the interface may be told beside what our functions compute with: it is about training, about
# masks that the pages make unnecessary, or about what is returned.
_IGNORED = frozenset(
    {"dropout", "position_ids", "position_embeddings", "cache_position", "use_cache", "output_attentions", "is_causal",
     "output_router_logits", "output_hidden_states", "return_dict", "logits_to_keep", "past_key_values", "layer_idx"}
)  # fmt: skip


@dataclass(slots=True)
class AttentionTerms:
    """What a module tells the interface beside its tensors: the scale of products, the window and
    soft cap (0 for none), sinks [num_heads] or None, and its mask where it has one of its own.
    """

    scale: float
    window: int
    softcap: float
    sinks: torch.Tensor | None
    mask: Any = None


# Returns attention [1, num_rows, num_heads, value_size] of a module for queries, keys and values
# [1, num_heads, num_rows, size].
Attention = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, AttentionTerms], torch.Tensor]


def on_interface(name: str, compute: Attention, masks: type | None = None) -> Callable[..., tuple[torch.Tensor, None]]:
    """Puts a function on the interface under this name, and returns it. It takes no mask but those
    of the class `masks`, and raises UnsupportedError naming a keyword that nobody computes with.
    """

    def attention_forward(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        is_ours = masks is not None and isinstance(attention_mask, masks)
        _check(module, None if is_ours else attention_mask, others)
        scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
        terms = AttentionTerms(scale, int(sliding_window or 0), float(softcap or 0.0), s_aux, attention_mask)
        return compute(module, query, key, value, terms), None

    ALL_ATTENTION_FUNCTIONS.register(name, attention_forward)
    return attention_forward


def set_implementation(model: Any, name: str) -> None:
    """Has the attention modules of a model call the function of that name on the interface."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    for config in configs.values():
        config._attn_implementation_internal = name


def _check(module: nn.Module, attention_mask: Any, others: dict[str, Any]) -> None:
    for name, given in others.items():
        if name not in _IGNORED and given is not None:
            raise UnsupportedError(f"{type(module).__name__}: paged attention does not compute with {name}")
    if attention_mask is not None or others.get("is_causal") is False:
        what = "is_causal=False" if attention_mask is None else "an attention mask of the model's own"
        raise UnsupportedError(f"{type(module).__name__}: paged attention does not compute with {what}")
