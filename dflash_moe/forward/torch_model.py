"""Opens a model whose operators stay torch's, on a card or on the processor: its attention reads
pages, so that the engine packs many sequences into one forward pass as it does everywhere.

What torch computes for a row may depend on the rows beside it. So parity with the model's own eager
forward holds here, and equal bits in company are not claimed.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dflash_moe.config import BLOCK_TOKENS
from dflash_moe.errors import ConfigError
from dflash_moe.forward.blocks import MAX_BLOCKS, BlockPool
from dflash_moe.forward.forward import PackedForward
from dflash_moe.forward.kv_budget import KvShape, block_bytes, kv_blocks
from dflash_moe.forward.torch_cache import TorchCache, gathered_values
from dflash_moe.operators.addresses import DTYPE_NAMES, TORCH_DTYPES
from dflash_moe.operators.attention_interface import set_implementation
from dflash_moe.operators.attention_probe import AttentionLayer, max_positions, probe_attention
from dflash_moe.operators.gathered_attention import IMPLEMENTATION, GatheredLayer, attach, expand
from dflash_moe.operators.report import TakeoverReport
from dflash_moe.telemetry.machine import memory_available

if TYPE_CHECKING:
    from dflash_moe.config import MemoryBudget

log = logging.getLogger(__name__)

# Attention computes in float32 where torch has no kernel for its form.
_FLOAT_BYTES = 4


def page_torch_model(
    model: Any, reason: str, *, kv_memory: MemoryBudget, kv_dtype: str | None = None, most: int = MAX_BLOCKS
) -> tuple[PackedForward | None, TakeoverReport]:
    """Gives a model that `load_model` loaded pages on its device and returns what runs it, None
    where its attention cannot be paged. `reason` says why torch's operators stay. `kv_memory` is of
    the device's memory that is free, and includes the gather buffer; there are `most` blocks at
    most.

    The routed experts are to compute nothing meanwhile. Raises ConfigError where memory for one
    block is missing, or for a `kv_dtype` that could overflow unseen.
    """
    report = TakeoverReport(type(model).__name__, not_taken=reason)
    probe = probe_attention(model)
    layers = sorted(probe.layers, key=lambda layer: layer.index)
    if not probe.refusal:
        probe.refusal = _latent_refusal(model, layers)
    if probe.refusal:
        report.not_paged = probe.refusal
        log.info("%s: attention is not paged: %s", report.class_name, probe.refusal)
        return None, report
    cache = _allocate(model, layers, kv_memory, kv_dtype, most)
    for layer in layers:
        module = model.get_submodule(layer.module)
        attach(module, GatheredLayer(cache, layer.index, _expanded(module, layer)[1], layer.call.window, layer.is_latent))
    set_implementation(model, IMPLEMENTATION)
    report.gather_bytes = cache.gather_bytes
    report.not_independent = "torch's operators compute, of which bit equality in company is not claimed"
    blocks = BlockPool(cache.layer(0).num_blocks)
    return PackedForward(model, cache, blocks, model.dtype, device=model.device), report


def _latent_refusal(model: Any, layers: Sequence[AttentionLayer]) -> str:
    """Returns why latents cannot be expanded after they were gathered, an empty text where they
    can.
    """
    for layer in layers:
        if layer.is_latent:
            module = model.get_submodule(layer.module)
            try:
                _expanded(module, layer)
            except (RuntimeError, TypeError, ValueError, AttributeError) as error:
                return f"{type(module).__name__} ({layer.module}): its expand_kv takes no gathered latents: {error}"
    return ""


def _expanded(module: Any, layer: AttentionLayer) -> tuple[int, int]:
    """Returns how many numbers a token's expanded keys and values have, 0 where they are no
    latents, and how wide a value is.
    """
    if not layer.is_latent:
        return 0, layer.value_size
    like = next(module.parameters())
    with torch.no_grad():
        keys, values = expand(module, like.new_zeros((1, 1, 1, layer.key_size)), like.new_zeros((1, 1, 1, layer.value_size)))
    return keys.numel() + values.numel(), int(values.shape[-1])


def _allocate(
    model: Any, layers: Sequence[AttentionLayer], kv_memory: MemoryBudget, kv_dtype: str | None, most: int
) -> TorchCache:
    stored_as = DTYPE_NAMES[model.dtype] if kv_dtype is None else kv_dtype
    if stored_as == "f16" != DTYPE_NAMES[model.dtype]:
        raise ConfigError(
            f"engine.kv_dtype: f16 is not allowed for a model in {DTYPE_NAMES[model.dtype]} with torch's operators, which do "
            f"not tell when a key is too large for it; allowed: bf16, f32, and f16 for a model in f16"
        )
    shapes = [KvShape(layer.num_kv_heads, layer.key_size, layer.value_size) for layer in layers]
    per_token = max(_temporary_bytes(model, layer, stored_as) for layer in layers)
    per_token += sum(gathered_values(shapes)) * TORCH_DTYPES[stored_as].itemsize
    num_blocks, max_keys = split_budget(
        kv_memory, _free_bytes(model.device), block_bytes(shapes, stored_as), per_token, max_positions(model.config), most
    )
    return TorchCache(shapes, num_blocks, max_keys, TORCH_DTYPES[stored_as], model.device)


def _temporary_bytes(model: Any, layer: AttentionLayer, stored_as: str) -> int:
    """Returns the bytes that a gathered token takes beside the buffer while a layer computes:
    copies in another dtype, and expanded latents.
    """
    module = model.get_submodule(layer.module)
    stored = layer.num_kv_heads * (layer.key_size + layer.value_size)
    read = _expanded(module, layer)[0] or stored
    size: int = model.dtype.itemsize
    found = 0 if TORCH_DTYPES[stored_as] == model.dtype else stored * size
    found += read * size if layer.is_latent else 0
    is_plain = layer.call.softcap == 0.0 and layer.call.sinks is None
    return found + (0 if is_plain or size == _FLOAT_BYTES else read * _FLOAT_BYTES)


def split_budget(
    kv_memory: MemoryBudget,
    free_bytes: int,
    bytes_per_block: int,
    gathered_token_bytes: int,
    max_tokens: int,
    most: int = MAX_BLOCKS,
) -> tuple[int, int]:
    """Returns the number of blocks and of tokens that can be gathered at once, which together take
    no more than `kv_memory`, and of the former no more than `most`. The longest sequence that the
    blocks hold can be gathered; it has at most `max_tokens` tokens, 0 meaning any number. Errors
    are those of `kv_blocks`.
    """
    num_blocks = kv_blocks(kv_memory, bytes_per_block + BLOCK_TOKENS * gathered_token_bytes, free_bytes=free_bytes, most=most)
    longest = -(-max_tokens // BLOCK_TOKENS)
    if not 0 < longest < num_blocks:
        return num_blocks, num_blocks * BLOCK_TOKENS
    left = kv_memory.resolve(free_bytes) - longest * BLOCK_TOKENS * gathered_token_bytes
    return min(most, left // bytes_per_block), longest * BLOCK_TOKENS


def _free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else memory_available()
