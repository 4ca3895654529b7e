"""Compares a model over its workers with the same model in transformers, by the bounds of
docs/numerics.md (numerics): the experts layer by layer, and then the logits and greedy tokens of
the whole model as the engine computes them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflash_moe.config import resolve_settings
from dflash_moe.errors import DflashError
from dflash_moe.experts.device_tensors import open_host_device
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.forward.forward import PackedForward
from dflash_moe.forward.host_model import HostModel, open_host
from dflash_moe.holders.placed_experts import PlacedExperts, slices_of
from dflash_moe.integrations.transformers import check_torch_device, expert_calls
from dflash_moe.model.architecture import load_config
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.spec import model_spec
from dflash_moe.operators.layers.reads import packed_linears
from dflash_moe.proofs.eager_pass import EagerPass, FarRows, best_tokens, model_logits, run_eager, same_noise
from dflash_moe.proofs.expert_truths import StoredExperts
from dflash_moe.proofs.layer_parity import compare_layer, count_calls, held_formats
from dflash_moe.proofs.one_pass import drawn_tokens, sequence_logits, torch_threads_kept
from dflash_moe.proofs.two_passes import Bounds, logits_difference
from dflash_moe.proofs.verify_report import GreedyParity, PositionParity, VerifyReport, judge
from dflash_moe.protocol.devices import DeviceChoice
from dflash_moe.protocol.identity import choose_numerics
from dflash_moe.topology import HOST

if TYPE_CHECKING:
    from dflash_moe.holders.audit.contents import ContentsReport
    from dflash_moe.holders.fleet import LoadingReport
    from dflash_moe.model.spec import ModelSpec
    from dflash_moe.topology import Topology

log = logging.getLogger(__name__)

# So many tokens are generated after the first GREEDY_PROMPT tokens of the prefill.
NUM_GREEDY = 16
GREEDY_PROMPT = 24


def verify(
    path: Path,
    topology: Topology,
    *,
    dtype: str | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _line: None,
    on_loading: LoadingReport | None = None,
    on_comparing: ContentsReport | None = None,
    overrides: dict[str, Any] | None = None,
) -> VerifyReport:
    """Compares remote experts with eager ones on seeded random token ids. The model runs in
    `dtype`, by default the checkpoint's, and so does the wire. With `on_comparing` the weights of
    every holder are first compared with the checkpoint here, and `on_comparing` is called now and
    then meanwhile. `overrides` are settings of the runtime.

    The eager model runs first, with one layer in memory at a time, and is freed before workers
    load. No byte of the checkpoint is read more than three times here, sampled rows apart: by that
    pass, for the truths of its experts or by the host's own model, and by the pass over the
    generated tokens.

    It returns a report also when bounds are exceeded. Errors: CheckpointError naming layer, shard,
    holder and both checksums where weights differ, UnsupportedError naming class and field,
    DflashError when the experts of the model did not reach the workers, and those of
    `ExpertRuntime.start` and `open_host`. What the runtime refuses before it loads weights is
    refused before anything is loaded.
    """
    progress("deriving layers from the model")
    spec = model_spec(path, dtype)
    settings = {"dtype": spec.dtype, **(overrides or {})}
    progress("asking workers and cards")
    _check_start(topology, spec, settings)
    check_torch_device(topology.host)
    config = load_config(Checkpoint.open(path)).get_text_config()
    bounds = Bounds.of(spec.dtype, int(getattr(config, "num_hidden_layers", len(spec.layers))))
    input_ids = torch.tensor([drawn_tokens(path, seed)])
    progress(f"running the eager model in {spec.dtype}, layer by layer")
    eager = run_eager(path, spec.dtype, input_ids, len(spec.layers), progress)
    progress("starting workers")
    with (
        torch_threads_kept(),
        ExpertRuntime.start(topology, model=spec, on_loading=on_loading, **settings) as runtime,
        torch.inference_mode(),
    ):
        request_dtype, reply_dtype = runtime.wire_dtypes
        report = VerifyReport(
            str(path), eager.class_name, spec.dtype, request_dtype, reply_dtype, runtime.stats()["numerics"], seed, bounds
        )
        if on_comparing is not None:
            progress("comparing weights with this host's own copy")
            report.compared_shards = runtime.check_weights(on_comparing)
        ours = _compare(report, path, runtime, eager, input_ids, progress)
    del eager  # its logits and captured calls
    progress("asking the eager model for its own tokens")
    prompt = input_ids[:, :GREEDY_PROMPT]
    theirs = best_tokens(
        path, spec.dtype, prompt, ours.generated, is_causal=ours.is_cached, progress=progress, far=ours.far
    )  # fmt: skip
    report.greedy = GreedyParity.of(ours.generated, theirs.tokens, theirs.gaps, bounds.tie)
    if ours.far is not None:
        report.positions = PositionParity.of(ours.far.positions, ours.far_logits, theirs.far_logits)
    judge(report, spec.layers)
    return report


def _check_start(topology: Topology, spec: ModelSpec, overrides: Mapping[str, Any]) -> None:
    """Refuses what `ExpertRuntime.start` with these settings would refuse before it loads weights,
    with the same errors: workers are started or reached, say what they can do with their cards, and
    are let go.
    """
    settings = resolve_settings(topology.stated_settings, **overrides)
    slices_of(settings)
    placed = PlacedExperts(spec, topology, settings)
    try:
        host = DeviceChoice.of_host(topology.host)
        if not host.is_processor:
            open_host_device(host)
        placed.greet()
        if host.is_processor and topology.host.activations is not None:
            choose_numerics(placed.topology.numerics_of(HOST), placed.fleet.host_pool.isa, name=HOST)
    finally:
        placed.fleet.close()


@dataclass(frozen=True, slots=True)
class _Ours:
    """What the host's model gave: tokens, whether it generated them with a cache, and the logits of
    rows at positions behind them, where its attention reads pages.
    """

    generated: list[int]
    is_cached: bool
    far: FarRows | None = None
    far_logits: Any = None


def _compare(
    report: VerifyReport, path: Path, runtime: ExpertRuntime, eager: EagerPass, input_ids: torch.Tensor,
    progress: Callable[[str], None],
) -> _Ours:  # fmt: skip
    """Compares every layer with what the eager model asked of its experts, and then the model.
    Returns what `_compare_model` does.
    """
    progress(f"comparing {len(runtime.spec.layers)} layers")
    layers = {layer.name: layer for layer in runtime.spec.layers}
    stored = StoredExperts(path)
    report.formats = held_formats(runtime)
    for call in eager.calls:
        report.layers.append(compare_layer(stored, layers[call.name], call, runtime))
    progress("comparing logits and generating tokens")
    return _compare_model(report, path, runtime, input_ids, eager.logits)


def _host_logits(host: HostModel, input_ids: torch.Tensor) -> Any:
    """Returns what `model_logits` returns, over pages where the model's attention reads them."""
    if host.packed is None:
        return _model_logits(host.model, input_ids)
    with same_noise():
        return sequence_logits(host.packed, input_ids[0].tolist())


def _model_logits(model: Any, input_ids: torch.Tensor) -> Any:
    return model_logits(model, input_ids.to(model.device))


def _compare_model(
    report: VerifyReport, path: Path, runtime: ExpertRuntime, input_ids: torch.Tensor, eager_logits: Any
) -> _Ours:
    """Compares the logits of the host's model with eager's, and returns what else it gives."""
    runtime.set_mode("batched")
    host = open_host(path, runtime)
    report.host = host.report
    if host.packed is not None:
        report.host_numerics = tuple(sorted({name for packed in packed_linears(host.model) for name in packed.numerics}))
        report.kv_dtype = runtime.settings.kv_dtype or report.dtype
    before = count_calls(runtime)
    found = logits_difference(_host_logits(host, input_ids), eager_logits)
    report.logits_rms, report.logits_max, report.rows_rms = found
    prompt = input_ids[0, :GREEDY_PROMPT].tolist()
    generated, is_cached = _generate_somehow(host, prompt)
    report.remote_calls = count_calls(runtime) - before
    _check_calls(host.model, report.remote_calls)
    if host.packed is None:
        return _Ours(generated, is_cached)
    return _Ours(generated, is_cached, *_far_rows(host.packed, [*prompt, *generated[:-1]]))


def _far_rows(packed: PackedForward, seen: list[int]) -> tuple[FarRows | None, Any]:
    """Returns random tokens at the notable positions behind those of `seen`, as many as pages hold,
    and the logits that our model has of them.
    """
    is_appended = not any(tables.depends_on_length for tables in packed.rotary)
    before = seen if is_appended else []
    room = packed.blocks.num_free * packed.blocks.block_tokens - len(before)
    positions = [position for position in packed.notable_positions if position >= len(seen)][-max(0, room) :]
    if not positions or room <= 0:
        return None, None
    generator = torch.Generator().manual_seed(len(positions))
    token_ids = torch.randint(0, packed.vocab_size, (len(positions),), generator=generator).tolist()
    with packed.standing_at([*range(len(before)), *positions]), same_noise():
        logits = sequence_logits(packed, [*before, *token_ids], num_logits=len(positions))
    return FarRows(token_ids, positions, is_appended), logits


def _generate_somehow(host: HostModel, prompt: list[int]) -> tuple[list[int], bool]:
    """Generates tokens as the engine does, and says whether it could: some families have caches
    that no engine here fills.
    """
    try:
        return _generate(host, prompt), True
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        if host.packed is not None or isinstance(error, DflashError):
            raise
        log.info("%s: tokens are generated without a cache: %s", type(host.model).__name__, error)
    return _generate_without_cache(host.model, prompt), False


def _generate(host: HostModel, prompt: list[int]) -> list[int]:
    """Returns the NUM_GREEDY most likely tokens after `prompt`. It is `generate_tokens`, but that
    noise is the same in every pass.
    """
    token_ids = list(prompt)
    with closing(host.sequence(len(prompt) + NUM_GREEDY)) as run:
        for step in range(NUM_GREEDY):
            with same_noise():
                token_ids.append(int(torch.argmax(run.forward(token_ids[-1:] if step else prompt))))
    return token_ids[len(prompt) :]


def _generate_without_cache(model: Any, prompt: list[int]) -> list[int]:
    """Returns what `_generate` returns, for families whose caches no engine here fills."""
    seen = torch.tensor([prompt], dtype=torch.int64)
    for _ in range(NUM_GREEDY):
        seen = torch.cat([seen, _model_logits(model, seen)[-1].argmax().reshape(1, 1)], dim=1)
    return [int(token) for token in seen[0, len(prompt) :]]


def _check_calls(model: Any, remote_calls: int) -> None:
    """Raises DflashError unless every forward pass of `_compare_model` called every layer's
    experts: a model that computes them itself passes all comparisons.
    """
    forwards = 1 + NUM_GREEDY
    made = expert_calls(model)
    # A pass that failed before tokens were generated without a cache has made calls too.
    if remote_calls == 0 or any(count < forwards for count in made.values()):
        raise DflashError(
            f"the model's experts did not all go through the runtime: {remote_calls} remote calls; layers were called "
            f"{min(made.values())} to {max(made.values())} times in {forwards} forward passes"
        )
