"""Looks through the operators of a host's own model: which kernels they are computed by, and the
bytes that one more token reads: dense weights as they are stored, one row of each embedding, and
the keys and values that its attention sees.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from dflash_moe import _core
from dflash_moe.config import BLOCK_TOKENS
from dflash_moe.operators.attention_probe import AttentionCall
from dflash_moe.operators.gathered_attention import layer_of
from dflash_moe.operators.layers.attention_block import GroupedAttention, LatentAttention
from dflash_moe.operators.layers.blocks import MlpParts
from dflash_moe.operators.linear import HostEmbedding, HostLinear
from dflash_moe.operators.paged_attention import LatentHeads, LayerPages, pages_of
from dflash_moe.operators.routers import HostRouter

# The package of all that the core computes of a host layer.
_OPERATORS = "dflash_moe.operators."
# Products that are computed together with others go by the first one's matrix.
_TOGETHER = {
    (GroupedAttention, "query"): "query, key, value",
    (LatentAttention, "query_down"): "query down, latent",
    (MlpParts, "gate"): "mlp gate, up",
    (MlpParts, "down"): "mlp down",
    (LatentHeads, "keys"): "latent keys",
    (LatentHeads, "values"): "latent values",
}


def packed_linears(model: nn.Module) -> list[_core.PackedLinear]:
    """Returns the packed matrices of a model that was taken over, each once."""
    found: dict[int, _core.PackedLinear] = {}
    for part in _parts(model):
        found.update({id(value): value for value in _values(part) if isinstance(value, _core.PackedLinear)})
    return list(found.values())


def linear_names(model: nn.Module) -> dict[int, str]:
    """Returns what the packed matrices of a model are, by their addresses: `output`, `router`,
    `lm_head`; matrices of all layers that are the same part have one name.
    """
    found: dict[int, str] = {}
    for part in _parts(model):
        named = {**vars(part), **part._modules} if isinstance(part, nn.Module) else _fields(part)
        for name, value in named.items():
            packed = value.packed if isinstance(value, HostLinear | HostRouter) else value
            if isinstance(packed, _core.PackedLinear) and name != "packed":
                found[packed.address] = _TOGETHER.get((type(part), name), name)
    return found


def dense_bytes(model: nn.Module) -> int:
    """Returns the bytes of weights that a token reads: everything but routed experts and the rows
    of embeddings that are not its own.
    """
    total = sum(packed.resident_bytes for packed in packed_linears(model))
    seen: set[int] = set()
    for part in _parts(model):
        if isinstance(part, HostEmbedding | nn.Embedding):
            total += _row_bytes(part)
        # What linear layers have beside their packed matrices are copies that no pass reads.
        elif isinstance(part, nn.Module | AttentionCall) and not isinstance(part, HostLinear):
            for value in [part.correction] if isinstance(part, HostRouter) else _values(part):
                if isinstance(value, torch.Tensor) and value.data_ptr() not in seen:
                    seen.add(value.data_ptr())
                    total += value.nbytes
    return total


def kv_bytes(model: nn.Module, context: int) -> int:
    """Returns the bytes of keys and values that the attention of a model over pages reads for one
    row that sees the last of `context` tokens and those before it.
    """
    total = 0
    for part in _parts(model):
        if isinstance(part, GroupedAttention | LatentAttention):
            total += _layer_bytes(part.pages, context, part.call.window)
        elif isinstance(part, nn.Module) and (pages := pages_of(part)) is not None:
            total += _layer_bytes(pages, context, pages.window)
        elif isinstance(part, nn.Module) and (layer := layer_of(part)) is not None:
            total += min(context, layer.window or context) * layer.pages.token_bytes(layer.index)
    return total


def kernels_of(layer: nn.Module) -> tuple[Any, ...]:
    """Returns what decides by which code, over which sizes, the core computes a host layer: forms,
    formats, classes and shapes of its operators. Layers for which it is equal differ in values.
    """
    found: list[Any] = []
    for part in _parts(layer):
        if not type(part).__module__.startswith(_OPERATORS):
            continue  # such as the routed experts, which others compute
        found.append(type(part).__name__)
        named = vars(part) if isinstance(part, nn.Module) else _fields(part)
        for name, value in sorted(named.items()):
            if isinstance(value, _core.PackedLinear):
                found.append((name, value.inputs, value.outputs, *value.formats, *value.numerics))
            elif isinstance(value, torch.Tensor):
                found.append((name, value.shape, value.dtype))
            elif isinstance(value, bool | int | float | str | None) and name not in ("index", "layer_idx"):
                found.append((name, value))
    return tuple(found)


def _parts(model: nn.Module) -> Iterator[Any]:
    """Yields every module, and the operators that host layers keep in fields, each once."""
    seen: set[int] = set()
    waiting: list[Any] = list(model.modules())
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += [value for value in _values(part) if isinstance(value, nn.Module | LayerPages) or _is_parts(value)]
        if isinstance(part, LayerPages) and part.latent is not None:
            waiting.append(part.latent)


def _values(part: Any) -> list[Any]:
    if isinstance(part, nn.Module):
        return [*vars(part).values(), *part._parameters.values(), *part._buffers.values()]
    return list(_fields(part).values())


def _fields(part: Any) -> dict[str, Any]:
    if _is_parts(part):
        return {field.name: getattr(part, field.name) for field in fields(part)}
    return dict(getattr(part, "__dict__", {}))


def _is_parts(value: Any) -> bool:
    """Says whether a value is a record of operators, such as GroupedAttention."""
    return is_dataclass(value) and not isinstance(value, type)


def _layer_bytes(pages: LayerPages, context: int, window: int) -> int:
    layer = pages.pages.layer(pages.index)
    return min(context, window or context) * (layer.num_bytes // (layer.num_blocks * BLOCK_TOKENS))


def _row_bytes(module: Any) -> int:
    if isinstance(module, HostEmbedding):
        # The packed store keeps the rows in its own format.
        return int(module.packed.resident_bytes // module.num_embeddings)
    return int(module.weight[0].nbytes)
