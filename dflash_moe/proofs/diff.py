"""Compares two runs of the same tokens: two checkpoints, or one in two classes or on other workers.
It names the first layer, token and expert where they part.

Only one side is in memory at a time: what A computed is kept, and B is compared with it.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.forward.residuals import EMBEDDING
from dflash_moe.holders.audit.contents import expert_checksums
from dflash_moe.model.spec import ModelSpec, model_spec
from dflash_moe.proofs.diff_prompt import check_comparable, common_tokens
from dflash_moe.proofs.diff_report import DiffReport, ExpertDiff, LayerDiff
from dflash_moe.proofs.layer_record import Recorded, RecordedCall, record
from dflash_moe.proofs.one_pass import OpenedPass, opened_pass
from dflash_moe.proofs.receipt_record import host_facts, shard_map
from dflash_moe.proofs.two_passes import Bounds, PassFacts, compare, compare_logits

if TYPE_CHECKING:
    from dflash_moe.holders.fleet import LoadingReport
    from dflash_moe.model.spec import LayerSpec
    from dflash_moe.topology import Topology

# An expert is asked alone with so many rows, those that were routed to it before others.
ROWS_ALONE = 8
# So many rows are asked in one call.
ROWS_PER_CALL = 1024


@dataclass(frozen=True, slots=True)
class Side:
    """One of the runs. `overrides` are settings."""

    path: Path
    topology: Topology
    overrides: Mapping[str, Any] = field(default_factory=dict)


def diff(
    a: Side, b: Side, *, prompt: str | None = None, tolerance: float | None = None, seed: int = 0,
    progress: Callable[[str], None] = lambda _line: None, on_loading: LoadingReport | None = None,
) -> DiffReport:  # fmt: skip
    """Runs both sides on the same tokens, those of `prompt` or seeded ones, and compares them. A
    `tolerance` is used also where bits could be compared; by default it is the bound of `verify`.

    Errors: ConfigError where the models or their tokenizers do not fit together, before anything is
    loaded, and those of `ExpertRuntime.start` and `open_host`.
    """
    specs = model_spec(a.path), model_spec(b.path)
    check_comparable(*specs)
    token_ids = common_tokens(a.path, b.path, prompt, seed)
    progress(f"A: {a.path}")
    with _opened(a, specs[0], on_loading) as opened:
        facts_a, recorded = _facts(opened), record(opened.forward, token_ids)
    del opened
    gc.collect()
    progress(f"B: {b.path}")
    asked: tuple[LayerSpec, torch.Tensor] | None = None
    with _opened(b, specs[1], on_loading) as opened:
        facts_b, forward = _facts(opened), opened.forward
        not_bits = facts_b.why_not_bits(facts_a)
        if tolerance is not None:
            not_bits = not_bits or "a tolerance was given"
        report = _compared(recorded, record(forward, token_ids), record(forward, token_ids, recorded), not_bits, tolerance)
        report.a, report.b = str(a.path), str(b.path)
        report.contents = [(specs[0].layers[one.place].index, one.shard) for one in facts_b.other_contents(facts_a)]
        index = _layer_to_ask(report)
        if index is not None:
            layer = next(layer for layer in specs[1].layers if layer.index == index)
            asked = layer, _ask_alone(opened.runtime, layer, recorded.calls[index])
    del opened, forward
    gc.collect()
    if asked is not None:
        layer, answers = asked
        progress(f"A again: its experts of layer {layer.index}, one by one")
        with ExpertRuntime.start(a.topology, specs[0], on_loading=on_loading, **a.overrides) as runtime:
            theirs = _ask_alone(runtime, layer, recorded.calls[layer.index])
        _name_experts(report, specs, layer, answers, theirs)
    return report


def _opened(side: Side, spec: ModelSpec, on_loading: LoadingReport | None) -> AbstractContextManager[OpenedPass]:
    return opened_pass(side.path, spec, side.topology, side.overrides, on_loading=on_loading, micro_batches="1")


def _facts(opened: OpenedPass) -> PassFacts:
    runtime = opened.runtime
    return PassFacts(
        runtime.spec.fingerprint, runtime.wire_dtypes, shard_map(runtime), host_facts(opened.host, runtime),
        runtime.content_checksums(),
    )  # fmt: skip


def _compared(wanted: Recorded, free: Recorded, fed: Recorded, not_bits: str, tolerance: float | None) -> DiffReport:
    """Compares B as it ran, and B with A's inputs, with A."""
    if tolerance is None:
        dtype = {torch.float32: "f32", torch.float16: "f16"}.get(wanted.stream[0].dtype, "bf16")
        tolerance, _ = Bounds.of(dtype, wanted.num_layers).after_layers(1)
    limit = tolerance if not_bits else None
    by_layer = {call.decoder_layer: index for index, call in wanted.calls.items()}
    layers = []
    for layer in range(wanted.num_layers):
        one = LayerDiff(
            layer,
            compare(free.stream[layer], wanted.stream[layer], limit),
            compare(fed.stream[layer], wanted.stream[layer], limit),
        )
        if layer in by_layer:
            one.expert_layer = by_layer[layer]
            _compare_calls(one, fed.calls[by_layer[layer]], wanted.calls[by_layer[layer]], limit)
        layers.append(one)
    kl, top1 = compare_logits(free.logits, wanted.logits)
    return DiffReport(
        a="", b="", num_tokens=len(wanted.logits), not_bits=not_bits, tolerance=tolerance,
        embedding=compare(fed.stream[EMBEDDING], wanted.stream[EMBEDDING], limit),
        layers=layers,
        logits=compare(free.logits, wanted.logits, limit), fed_logits=compare(fed.logits, wanted.logits, limit),
        kl=kl, top1=top1,
    )  # fmt: skip


def _compare_calls(one: LayerDiff, fed: RecordedCall, wanted: RecordedCall, limit: float | None) -> None:
    one.experts = compare(fed.out, wanted.out, limit)
    ids = fed.topk_ids.sort(dim=1).values != wanted.topk_ids.sort(dim=1).values
    one.rerouted = int(ids.any(dim=1).sum())
    odd = (fed.topk_ids != wanted.topk_ids).any(dim=1) | (fed.topk_weights != wanted.topk_weights).any(dim=1)
    one.routing_row = int(torch.nonzero(odd)[0, 0]) if bool(odd.any()) else None


def _layer_to_ask(report: DiffReport) -> int | None:
    """Returns the index of the first layer whose experts part, or whose weights are other bytes."""
    for layer in report.layers:
        if layer.experts is not None and layer.experts.first_row is not None:
            return layer.expert_layer
    return report.contents[0][0] if report.contents else None


def _ask_alone(runtime: ExpertRuntime, layer: LayerSpec, call: RecordedCall) -> torch.Tensor:
    """Returns [num_experts, rows, out_size]: what each expert alone makes of some of A's rows, with
    weight 1.
    """
    rows = torch.cat([_rows_for(call, expert) for expert in range(layer.num_experts)])
    hidden_states = call.rows[rows]
    ids = torch.arange(layer.num_experts).repeat_interleave(len(rows) // layer.num_experts)[:, None]
    weights = torch.ones(len(rows), 1)
    device = runtime.tensor_device
    found = [
        runtime.experts(
            layer.index, *(part[begin : begin + ROWS_PER_CALL].to(device) for part in (hidden_states, ids, weights))
        )
        for begin in range(0, len(rows), ROWS_PER_CALL)
    ]
    return torch.cat([part.cpu() for part in found]).view(layer.num_experts, -1, layer.ffn.out_size)


def _rows_for(call: RecordedCall, expert: int) -> torch.Tensor:
    """Returns the places of ROWS_ALONE rows, or of all, those that were routed to an expert
    first.
    """
    is_routed = (call.topk_ids == expert).any(dim=1)
    return torch.argsort(is_routed.int(), descending=True, stable=True)[:ROWS_ALONE]


def _name_experts(
    report: DiffReport, specs: Sequence[ModelSpec], layer: LayerSpec, ours: torch.Tensor, theirs: torch.Tensor
) -> None:
    """Notes the experts of a layer that part by themselves, or hold other bytes."""
    limit = report.tolerance if report.not_bits else None
    odd_bytes: set[int] = set()
    if any(index == layer.index for index, _ in report.contents):
        one, other = (expert_checksums(Path(spec.path), layer) for spec in specs)
        odd_bytes = {expert for expert in range(layer.num_experts) if one[expert] != other[expert]}
    deviation = float(theirs.double().std(correction=0)) or 1.0
    found = []
    for expert in range(layer.num_experts):
        parted = compare(ours[expert], theirs[expert], limit)
        if parted.first_row is None and expert not in odd_bytes:
            continue
        difference = (ours[expert].double() - theirs[expert].double()) / deviation
        rms, largest = float(difference.square().mean().sqrt()), float(difference.abs().max())
        found.append(ExpertDiff(expert, rms, largest, expert in odd_bytes))
    report.asked_layer = layer.index
    report.experts = sorted(found, key=lambda one: -one.rms)
