"""Opens a model for the engine: host operators in place of torch's where they are proven, and pages
for its keys and values. A model whose attention cannot be paged keeps transformers' own cache and
one sequence at a time.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflash_moe.forward.blocks import MAX_BLOCKS, BlockPool
from dflash_moe.forward.forward import Forward, PackedForward, refuse_length
from dflash_moe.forward.halves.micro_batches import MicroBatches
from dflash_moe.forward.independence import find_dependence, find_far_dependence
from dflash_moe.forward.kept_proofs import KeptProofs, circumstances
from dflash_moe.forward.kv_budget import KvShape, block_bytes, kv_blocks, most_blocks
from dflash_moe.forward.one_sequence import OneSequenceForward
from dflash_moe.forward.paged_cache import PagedCache
from dflash_moe.forward.rotary_tables import find_rotary_modules
from dflash_moe.forward.sequence_run import CachedRun, PagedRun, SequenceRun
from dflash_moe.forward.take_layers import take_layers
from dflash_moe.forward.torch_model import page_torch_model
from dflash_moe.integrations.transformers import load_model, without_experts
from dflash_moe.model.architecture import find_experts, load_architecture, load_config
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.dense_tensors import StoredMatrix, is_plain, stored_latents, stored_matrices
from dflash_moe.operators.addresses import DTYPE_NAMES
from dflash_moe.operators.attention_interface import set_implementation
from dflash_moe.operators.attention_probe import AttentionLayer, AttentionProbe, probe_attention
from dflash_moe.operators.latent_proof import take_latent_heads
from dflash_moe.operators.paged_attention import IMPLEMENTATION, LatentHeads, LayerPages, StoredHeads, attach
from dflash_moe.operators.report import Finding, TakeoverReport
from dflash_moe.operators.stored_weights import place_stored
from dflash_moe.operators.takeover import take_over

if TYPE_CHECKING:
    from dflash_moe import _core
    from dflash_moe.config import CacheSettings, MemoryBudget
    from dflash_moe.experts.expert_runtime import ExpertRuntime

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostModel:
    """A model that the engine runs. `packed` is None where it keeps the one-sequence path."""

    model: Any
    report: TakeoverReport
    packed: PackedForward | None

    def sequence(self, max_tokens: int) -> SequenceRun:
        """Begins a sequence of at most `max_tokens` tokens. Raises ConfigError where that is beyond
        the model's positions or the KV cache.
        """
        return CachedRun(self.model) if self.packed is None else PagedRun(self.packed, max_tokens)

    def engine_forward(self, kv_memory: MemoryBudget, most: int = MAX_BLOCKS) -> Forward:
        """Returns what an engine computes steps with. A model whose attention is not paged keeps a
        cache for each sequence, all within `kv_memory` and `most` blocks. Errors are those of
        `kv_blocks`.
        """
        if self.packed is not None:
            return self.packed
        with without_experts(self.model):
            return OneSequenceForward(self.model, kv_memory, most=most)


def check_length(path: str | Path, max_tokens: int) -> None:
    """Raises ConfigError where the model of `path` has no positions for a sequence of `max_tokens`
    tokens. Nothing is loaded.
    """
    refuse_length(load_config(Checkpoint.open(path)), max_tokens)


def open_host(
    path: str | Path, runtime: ExpertRuntime, *, micro_batches: str | None = None, cache: CacheSettings | None = None,
    **options: Any,
) -> HostModel:  # fmt: skip
    """Loads the model of `path` without its routed experts, which `runtime` computes, and takes it
    over as the runtime's settings say: host.operators, host.activations and those of the engine.
    Where torch's operators stay, as they do on a card, attention reads pages all the same.
    `micro_batches` is auto, 1 or 2 (forward/halves/micro_batches.py), by default the setting's.
    With a `cache` what an earlier start proved is not proven again (forward/kept_proofs.py).
    Without one, and with `options`, all of it is.

    Errors are those of `load_model` and `open_host_model`.
    """
    kept, settings = _why_torch(runtime), runtime.settings
    most = most_blocks(settings.max_context, settings.max_requests)
    if kept:
        model = load_model(path, runtime, **options)
        with without_experts(model):
            packed, report = page_torch_model(model, kept, kv_memory=settings.kv_memory, kv_dtype=settings.kv_dtype, most=most)
        return HostModel(model, report, packed)
    proofs = None if cache is None or options else KeptProofs(Path(path), runtime.spec.fingerprint, cache)
    checkpoint = Checkpoint.open(path)
    stored, stored_heads = _stored(checkpoint, runtime)
    model = load_model(path, runtime, without=stored, **options)
    placed = place_stored(model, runtime.host_pool, runtime.host_numerics_of, stored, model.dtype)
    numerics = runtime.host_numerics_of(DTYPE_NAMES[model.dtype])
    host = open_host_model(
        model, runtime.host_pool, numerics=numerics, kv_memory=settings.kv_memory, kv_dtype=settings.kv_dtype, placed=placed,
        most=most, stored_heads=stored_heads, proofs=proofs,
    )  # fmt: skip
    if host.packed is None and stored:
        # torch computes it after all, with weights of its own.
        return HostModel(load_model(path, runtime, **options), host.report, None)
    if host.packed is not None:
        host.packed.micro_batches = MicroBatches(micro_batches or settings.micro_batches, runtime, len(find_experts(model)))
    return host


def _stored(checkpoint: Checkpoint, runtime: ExpertRuntime) -> tuple[dict[str, StoredMatrix], dict[str, StoredHeads]]:
    """Returns what is packed as the checkpoint stores it: matrices by parameter, and what expands
    latents by attention module.
    """
    if is_plain(checkpoint):
        return {}, {}
    model = load_architecture(checkpoint).model
    latents = stored_latents(model, checkpoint)
    heads = {
        name: StoredHeads(found, tuple(runtime.host_numerics_of(stored) for stored in found.formats))
        for name, found in latents.items()
    }
    return stored_matrices(model, checkpoint), heads


def _why_torch(runtime: ExpertRuntime) -> str:
    """Returns why a model keeps torch's operators whatever they are, an empty text where it need
    not.
    """
    if runtime.host_device != "cpu":
        return f"the model lies on {runtime.host_device}"
    if runtime.settings.host_operators == "torch":
        return "host.operators: torch"
    if runtime.host_pool.isa == "reference":
        return "kernel set reference has no host operators"
    return ""


def open_host_model(
    model: Any, pool: _core.HostPool, *, numerics: str, kv_memory: MemoryBudget, kv_dtype: str | None = None,
    placed: Sequence[Finding] = (), most: int = MAX_BLOCKS, stored_heads: Mapping[str, StoredHeads] | None = None,
    proofs: KeptProofs | None = None,
) -> HostModel:  # fmt: skip
    """Takes over a model that `load_model` loaded on the processor; it is the engine's from then
    on. `numerics` is the class of its linear layers, and `kv_dtype` None keeps keys and values in
    the model's dtype, in `most` blocks at most. `placed` says what was packed as the checkpoint
    stores it, and `stored_heads` what expands the latents of an attention module and is to be.
    `proofs` are those of earlier starts; where there are none, what is proven now is kept there.

    Errors: ConfigError where memory for one block of keys and values is missing, CheckpointError
    for damaged weights.
    """
    # Afterwards no parameter may be left that tells it.
    dtype = model.dtype
    with without_experts(model):
        probe = probe_attention(model)
        latent = {} if probe.refusal else _take_latent_heads(model, pool, probe, numerics, stored_heads or {})
        if probe.refusal:
            report = TakeoverReport(type(model).__name__, not_paged=probe.refusal)
            log.info("%s: attention is not paged: %s", report.class_name, probe.refusal)
            return HostModel(model, report, None)
        report = take_over(model, pool, numerics, placed, probe.read_modules)
        torch.set_num_threads(1)
        packed, pages = _pages(model, dtype, pool, probe, latent, kv_memory, kv_dtype, most)
        classes = {name: heads.numerics for name, heads in (stored_heads or {}).items()}
        under = "" if proofs is None else circumstances(packed, pool, (numerics, kv_dtype, classes), report)
        known = None if proofs is None else proofs.find(under)
        proven = take_layers(packed, probe, pages, report, known)
        if known is not None and proven.layers != known.layers:
            known = None
        for line in report.lines():
            log.info("%s", line)
        proven.not_independent = _dependence(packed, probe) if known is None else known.not_independent
        report.not_independent = proven.not_independent
        if proofs is not None and known is None:
            proofs.keep(under, proven)
    if report.not_independent:
        log.warning("%s: rows depend on their batch: %s", report.class_name, report.not_independent)
    return HostModel(model, report, packed)


def _dependence(packed: PackedForward, probe: AttentionProbe) -> str:
    """Returns the first module that computes a row otherwise in other company, an empty text where
    none does.
    """
    found = find_dependence(packed)
    if not found and packed.loop is None and _has_readers(packed, probe):
        return find_far_dependence(packed)
    return found


def _has_readers(packed: PackedForward, probe: AttentionProbe) -> bool:
    """Says whether something but cosines and sines is computed of positions."""
    return not probe.position_readers <= set(find_rotary_modules(packed.model))


def _take_latent_heads(
    model: Any, pool: _core.HostPool, probe: AttentionProbe, numerics: str, stored: Mapping[str, StoredHeads]
) -> dict[str, LatentHeads]:
    """Packs the matrices that expand latents, and takes the modules that had them off the model.
    Where one is not proven, all stay and the probe's refusal names it.
    """
    found = {}
    for layer in probe.layers:
        if layer.is_latent:
            module = model.get_submodule(layer.module)
            heads, reason = take_latent_heads(pool, module, numerics, stored.get(layer.module))
            if heads is None:
                probe.refusal = f"{type(module).__name__} ({layer.module}): {reason}"
                return {}
            found[layer.module] = heads
    for name in found:
        model.get_submodule(name).kv_b_proj = None
    return found


def _pages(
    model: Any,
    dtype: torch.dtype,
    pool: _core.HostPool,
    probe: AttentionProbe,
    latent: dict[str, LatentHeads],
    kv_memory: MemoryBudget,
    kv_dtype: str | None,
    most: int,
) -> tuple[PackedForward, dict[str, LayerPages]]:
    stored_as = DTYPE_NAMES[dtype] if kv_dtype is None else kv_dtype
    shapes = [_shape(layer) for layer in sorted(probe.layers, key=lambda layer: layer.index)]
    num_blocks = kv_blocks(kv_memory, block_bytes(shapes, stored_as), most=most)
    cache = PagedCache(pool, shapes, num_blocks, stored_as)
    pages = {
        layer.module: LayerPages(cache, layer.index, _shape(layer).value_size, layer.call.window, latent.get(layer.module))
        for layer in probe.layers
    }
    for name, found in pages.items():
        attach(model.get_submodule(name), found)
    set_implementation(model, IMPLEMENTATION)
    return PackedForward(model, cache, BlockPool(num_blocks), dtype), pages


def _shape(layer: AttentionLayer) -> KvShape:
    if layer.is_latent:
        return KvShape(1, layer.key_size + layer.value_size, layer.key_size)
    return KvShape(layer.num_kv_heads, layer.key_size, layer.value_size)
