"""Compares remote experts with the model's own eager experts, by the bounds of docs/numerics.md
(numerics).

Every layer gets the hidden states and routing of the eager model, so that a flip of the router
cannot spread. A float64 run of the same experts module is the truth that both are measured against.
Logits and greedy tokens of the whole model are compared through `load_model`.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflash_moe.errors import DflashError
from dflash_moe.integrations.host_weights import load_weights
from dflash_moe.integrations.rounded_inputs import inputs_rounded, rounds_below, rounds_inputs
from dflash_moe.integrations.transformers import TORCH_DTYPES, expert_calls, load_model
from dflash_moe.model.architecture import find_model_class, load_config
from dflash_moe.model.capture import ExpertsCall, capture_calls
from dflash_moe.model.checkpoint import Checkpoint
from dflash_moe.model.dequantize import requantized
from dflash_moe.model.spec import LayerSpec, model_spec
from dflash_moe.model.weight_formats import is_requantised, split_formats
from dflash_moe.placement import Shard
from dflash_moe.runtime.expert_runtime import ExpertRuntime
from dflash_moe.topology.numerics import DEFAULT_NUMERICS

if TYPE_CHECKING:
    from dflash_moe.runtime.contents import ContentsReport
    from dflash_moe.runtime.fleet import LoadingReport
    from dflash_moe.topology import Topology

# The prefill that is compared has so many tokens. That is longer than any window of a few tokens,
# and takes one core little time.
NUM_TOKENS = 96
# So many tokens are generated after the first GREEDY_PROMPT tokens of the prefill.
NUM_GREEDY = 16
GREEDY_PROMPT = 24
# The reply of every shard is rounded, and then their sum. With independent errors of equal size
# that is the root of two, and the rest is for chance.
ROUNDING_FACTOR = 1.5
# This is half a unit of float32, for a class that computes in float32 whatever it is given.
MIN_ROUNDING = 2.0**-24
# Some intermediate values are so near the edge of a step that float32 crosses it. They add at most
# this share of what rounding inputs moves (0012).
FLIPPED_STEPS = 0.1


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may differ. Differences are fractions of the standard deviation of the output, and
    what is None is reported but not judged.
    """

    # The rms error against float64 may be so many times that of eager.
    error_ratio: float
    # The differences are those from eager.
    difference_rms: float | None
    difference_max: float | None
    logits_rms: float | None
    logits_max: float | None

    @classmethod
    def of(cls, dtype: str, num_layers: int) -> Bounds:
        """Returns the bounds for a model of `num_layers` layers that runs in `dtype`."""
        if dtype == "f32":
            return cls(4.0, None, None, 2e-6 * max(1.0, num_layers / 12), 1e-5 * max(1.0, num_layers / 6))
        if dtype == "f16":
            return cls(0.5, 1.2e-3, 1.2e-2, None, None)
        return cls(0.5, 1e-2, 1e-1, None, None)


@dataclass(frozen=True, slots=True)
class LayerParity:
    """What was measured of one layer. Errors are rms against float64 and differences are from
    eager, both divided by the standard deviation of the float64 output.

    Where a worker requantised, the remote error is against float64 with the weights that it holds,
    and `requantisation_error` is how far these move the output. Differences from eager then show
    that too and are not judged (docs/decisions/0009). It is the same where a class rounds inputs:
    the remote error is against float64 with inputs so rounded, which moves the output by
    `activation_error`, and `class_error` is against float64 with exact inputs (0012).
    """

    index: int
    name: str
    tokens: int
    eager_error: float
    remote_error: float
    # The float64 output itself has this error when it is rounded once to the model's dtype.
    rounding_error: float
    difference_rms: float
    difference_max: float
    equal_in_stream: bool
    calls: int
    expected_calls: int | None
    is_requantised: bool = False
    requantisation_error: float = 0.0
    # These are the classes of its holders.
    numerics: tuple[str, ...] = (DEFAULT_NUMERICS,)
    activation_error: float = 0.0
    class_error: float = 0.0

    @property
    def is_rounded(self) -> bool:
        """Whether the class of some holder rounds inputs."""
        return any(rounds_inputs(numerics) for numerics in self.numerics)


@dataclass(slots=True)
class VerifyReport:
    """Everything that was measured. `excesses` has one sentence for whatever is beyond its bound,
    and is empty where there is parity.
    """

    directory: str
    class_name: str
    dtype: str
    request_dtype: str
    reply_dtype: str
    # Policy, class by holder and layers of several classes are those of `ExpertRuntime.stats`.
    numerics: dict[str, Any]
    seed: int
    bounds: Bounds
    layers: list[LayerParity] = field(default_factory=list)
    # Both are divided by the standard deviation of the eager logits.
    logits_rms: float = math.nan
    logits_max: float = math.nan
    greedy_tokens: int = 0
    # So many greedy tokens are equal before the first difference.
    greedy_compared: int = 0
    # Where tokens first differ, this is the gap between the two largest logits of eager, divided by
    # their standard deviation.
    greedy_flip_gap: float | None = None
    remote_calls: int = 0
    # Each holder keeps weights in these formats, that of most experts first.
    formats: dict[str, list[str]] = field(default_factory=dict)
    excesses: list[str] = field(default_factory=list)
    # So many shards have the content checksums of the host's own copy; None where nobody asked.
    compared_shards: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns all fields, and the schema and case that result files have."""
        return {"schema": 1, "case": "verify", **asdict(self)}


def verify(
    path: Path,
    topology: Topology,
    *,
    dtype: str | None = None,
    seed: int = 0,
    num_tokens: int = NUM_TOKENS,
    progress: Callable[[str], None] = lambda _line: None,
    on_loading: LoadingReport | None = None,
    on_comparing: ContentsReport | None = None,
    overrides: dict[str, Any] | None = None,
) -> VerifyReport:
    """Compares remote experts with eager ones on seeded random token ids. The model runs in
    `dtype`, by default the checkpoint's, and so does the wire. With `on_comparing` the weights of
    every holder are first compared with the checkpoint here, and `on_comparing` is called now and
    then meanwhile. `overrides` are settings of the runtime.

    It returns a report also when bounds are exceeded. Errors: CheckpointError naming layer, shard,
    holder and both checksums where weights differ, UnsupportedError naming class and field before
    any worker starts, DflashError when the experts of the model did not reach the workers, and
    those of `ExpertRuntime.start`.
    """
    progress("deriving layers from the model")
    spec = model_spec(path, dtype)
    settings = {"dtype": spec.dtype, **(overrides or {})}
    progress(f"loading the eager model in {spec.dtype}")
    eager = _load_eager(path, spec.dtype)
    text_config = eager.config.get_text_config()
    bounds = Bounds.of(spec.dtype, int(getattr(text_config, "num_hidden_layers", len(spec.layers))))
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, int(text_config.vocab_size), (1, num_tokens), generator=generator)
    progress("starting workers")
    with ExpertRuntime.start(topology, model=spec, on_loading=on_loading, **settings) as runtime, torch.inference_mode():
        request_dtype, reply_dtype = runtime.wire_dtypes
        report = VerifyReport(
            str(path), type(eager).__name__, spec.dtype, request_dtype, reply_dtype, runtime.stats()["numerics"], seed, bounds
        )
        if on_comparing is not None:
            progress("comparing weights with this host's own copy")
            report.compared_shards = runtime.check_weights(on_comparing)
        progress(f"comparing {len(spec.layers)} layers")
        calls: list[ExpertsCall] = []
        with capture_calls(eager, calls.append):
            eager_logits = _logits(eager, input_ids)
        layers = {layer.name: layer for layer in spec.layers}
        # Workers keep the weights as they are stored. Where the eager model had to round its own,
        # the truth must not.
        is_exact = all(_holds(spec.dtype, layer.weight_dtype) for layer in spec.layers)
        stored = eager if is_exact else _load_eager(path, "f32")
        report.formats = held_formats(runtime)
        for call in calls:
            report.layers.append(_compare_layer(stored.get_submodule(call.name), layers[call.name], call, runtime))
        del stored
        progress("comparing logits and greedy tokens")
        _compare_model(report, path, runtime, eager, input_ids, eager_logits)
    _judge(report, spec.layers)
    return report


def _holds(dtype: str, stored: str) -> bool:
    """Says whether every number of format `stored` is also one of `dtype`."""
    return dtype in ("f32", stored)


def _shards(runtime: ExpertRuntime, layer: LayerSpec) -> tuple[Shard, ...]:
    position = [item.index for item in runtime.spec.layers].index(layer.index)
    return runtime.placement.layers[position]


def held_formats(runtime: ExpertRuntime) -> dict[str, list[str]]:
    """Returns the formats in which each holder keeps weights, that of most experts first."""
    counts: dict[str, Counter[str]] = {}
    for layer in runtime.spec.layers:
        for shard in _shards(runtime, layer):
            counts.setdefault(shard.holder, Counter())[layer.resident_dtype(shard.weights)] += len(shard.experts)
    return {holder: [name for name, _ in count.most_common()] for holder, count in counts.items()}


def _load_eager(path: Path, dtype: str) -> Any:
    checkpoint = Checkpoint.open(path)
    model_class = find_model_class(load_config(checkpoint))
    model, _ = load_weights(
        model_class, checkpoint, has_experts=True, dtype=TORCH_DTYPES[dtype], experts_implementation="eager"
    )
    return model.eval()


def _compare_layer(module: Any, layer: LayerSpec, call: ExpertsCall, runtime: ExpertRuntime) -> LayerParity:
    arguments = (layer.index, call.hidden_states, call.topk_ids, call.topk_weights)
    runtime.set_mode("batched")
    before = _count_calls(runtime)
    remote = runtime.experts(*arguments)
    calls = _count_calls(runtime) - before
    runtime.set_mode("stream")
    streamed = runtime.experts(*arguments)
    truth = _in_float64(module, call)
    deviation = float(truth.std())
    held = _as_held(module, layer, _shards(runtime, layer))
    held_truth = truth if held is None else _in_float64(held, call)
    class_truth = _as_computed(module if held is None else held, call, layer, _shards(runtime, layer), held_truth)
    difference = (remote.double() - call.output.double()) / deviation
    return LayerParity(
        index=layer.index,
        name=layer.name,
        tokens=call.hidden_states.shape[0],
        eager_error=_rms(call.output.double() - truth) / deviation,
        remote_error=_rms(remote.double() - class_truth) / deviation,
        rounding_error=_rms(truth.to(remote.dtype).double() - truth) / deviation,
        difference_rms=_rms(difference),
        difference_max=float(difference.abs().max()),
        equal_in_stream=torch.equal(remote, streamed),
        calls=calls,
        expected_calls=_expected_calls(runtime, layer, call.topk_ids),
        is_requantised=held is not None,
        requantisation_error=_rms(held_truth - truth) / deviation,
        numerics=tuple(sorted({shard.numerics for shard in _shards(runtime, layer)})),
        activation_error=_rms(class_truth - held_truth) / deviation,
        class_error=_rms(remote.double() - held_truth) / deviation,
    )


def _as_computed(module: Any, call: ExpertsCall, layer: LayerSpec, shards: Sequence[Shard], exact: Any) -> Any:
    """Computes the output in float64 with inputs rounded as the class of each holder does. Returns
    `exact` where no class rounds.

    An output is the sum of the outputs of its experts. So the experts of one class are taken alone
    by giving all others the weight zero.
    """
    kept = {shard: (shard.numerics, layer.resident_dtype(shard.weights)) for shard in shards}
    if not any(rounds_inputs(shard.numerics) for shard in shards):
        return exact
    total = torch.zeros_like(exact)
    for numerics, weight_dtype in sorted(set(kept.values())):
        experts = [expert for shard in shards if kept[shard] == (numerics, weight_dtype) for expert in shard.experts]
        is_theirs = torch.isin(call.topk_ids, torch.tensor(experts))
        alone = replace(call, topk_weights=call.topk_weights.where(is_theirs, torch.zeros_like(call.topk_weights)))
        with inputs_rounded(numerics, split_formats(weight_dtype)):
            part = _in_float64(module, alone)
        total += part
    return total


def _as_held(module: Any, layer: LayerSpec, shards: Sequence[Shard]) -> Any:
    """Returns a copy of the experts module with the weights that the holders compute with, or None
    where those are the checkpoint's.

    NumPy code of its own (`model/dequantize.py`) quantises them, so that the quantiser of a worker
    is measured against another.
    """
    changed = {shard: layer.resident_dtype(shard.weights) for shard in shards}
    changed = {shard: kept for shard, kept in changed.items() if is_requantised(kept)}
    if not changed:
        return None
    held = copy.deepcopy(module).float()
    for shard, kept in changed.items():
        first, down = split_formats(kept)
        for name, kept_format in (("gate_up_proj" if held.has_gate else "up_proj", first), ("down_proj", down)):
            weights = held._parameters[name].data
            for expert in shard.experts if is_requantised(kept_format) else ():
                matrix = weights[expert].T if held.is_transposed else weights[expert]
                matrix.copy_(torch.from_numpy(requantized(matrix.contiguous().numpy(), kept_format)))
    return held


def _in_float64(module: Any, call: ExpertsCall) -> Any:
    """Returns what the experts module itself computes in float64. Its weights are widened, and
    dropped again, one layer at a time, so that memory holds one wide layer at most.
    """
    wide = copy.deepcopy(module).double()
    ids = call.topk_ids
    return wide(call.hidden_states.double(), ids, call.topk_weights.double()).double()


def _rms(values: Any) -> float:
    return float(values.double().square().mean().sqrt())


def _count_calls(runtime: ExpertRuntime) -> int:
    return int(runtime.stats()["totals"]["calls"])


def _expected_calls(runtime: ExpertRuntime, layer: LayerSpec, topk_ids: Any) -> int | None:
    """Returns the number of calls that a batch makes: one to each holder with an expert that some
    row chose. It is None where the batch is cut into slices.
    """
    if topk_ids.shape[0] > runtime.settings.batch_capacity:
        return None
    chosen = set(topk_ids.unique().tolist())
    return len({shard.holder for shard in _shards(runtime, layer) if chosen & set(shard.experts)})


def _logits(model: Any, input_ids: Any) -> Any:
    """Returns the logits [num_tokens, vocab_size] in float32 on the CPU, or the last hidden states
    of a model without a head. Any noise that the model draws is the same in every call.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output = model(input_ids=input_ids.to(model.device), use_cache=False)
    return (output.logits if hasattr(output, "logits") else output.last_hidden_state)[0].float().cpu()


def _greedy(model: Any, prompt: Any) -> list[int]:
    """Returns NUM_GREEDY tokens after `prompt`, each the most likely one. No cache is used, because
    families keep caches of many kinds.
    """
    seen = prompt
    for _ in range(NUM_GREEDY):
        seen = torch.cat([seen, _logits(model, seen)[-1].argmax().reshape(1, 1)], dim=1)
    return [int(token) for token in seen[0, prompt.shape[1] :]]


def _compare_model(
    report: VerifyReport, path: Path, runtime: ExpertRuntime, eager: Any, input_ids: Any, eager_logits: Any
) -> None:
    runtime.set_mode("batched")
    host = load_model(path, runtime)
    before = _count_calls(runtime)
    logits = _logits(host, input_ids)
    difference = (logits - eager_logits) / eager_logits.std()
    report.logits_rms, report.logits_max = _rms(difference), float(difference.abs().max())
    prompt = input_ids[:, :GREEDY_PROMPT]
    ours, theirs = _greedy(host, prompt), _greedy(eager, prompt)
    report.greedy_tokens = len(theirs)
    differing = (place for place, (our, their) in enumerate(zip(ours, theirs, strict=True)) if our != their)
    report.greedy_compared = next(differing, len(theirs))
    if report.greedy_compared < len(theirs):
        seen = torch.cat([prompt, torch.tensor([theirs[: report.greedy_compared]], dtype=torch.int64)], dim=1)
        last = _logits(eager, seen)[-1]
        top = last.topk(2).values
        report.greedy_flip_gap = float((top[0] - top[1]) / last.std())
    report.remote_calls = _count_calls(runtime) - before
    forwards = 1 + NUM_GREEDY
    made = expert_calls(host)
    if report.remote_calls == 0 or any(count != forwards for count in made.values()):
        raise DflashError(
            f"the model's experts did not all go through the runtime: {report.remote_calls} remote calls; layers were called "
            f"{min(made.values())} to {max(made.values())} times in {forwards} forward passes"
        )


def _judge(report: VerifyReport, layers: tuple[LayerSpec, ...]) -> None:
    bounds = report.bounds
    if len(report.layers) != len(layers):
        report.excesses.append(f"the forward pass called {len(report.layers)} of {len(layers)} layers with experts")
    for layer in report.layers:
        where = f"layer {layer.index} ({layer.name})"
        # Half of eager's error is out of reach where a class computes in float32 and rounds once.
        # Such a class is measured by its rounding.
        limit = max(bounds.error_ratio * layer.eager_error, ROUNDING_FACTOR * layer.rounding_error, MIN_ROUNDING,
                    FLIPPED_STEPS * layer.activation_error)  # fmt: skip
        _check(report, f"{where}: error against float64", layer.remote_error, limit)
        is_coarser = layer.is_requantised or any(rounds_below(numerics, report.dtype) for numerics in layer.numerics)
        # A class whose rounding is no coarser than that of the model must be no further from the
        # truth than eager is.
        if not is_coarser and layer.is_rounded:
            _check(report, f"{where}: error against float64 with exact inputs", layer.class_error, layer.eager_error)
        if not is_coarser:
            _check(report, f"{where}: rms difference from eager", layer.difference_rms, bounds.difference_rms)
            _check(report, f"{where}: largest difference from eager", layer.difference_max, bounds.difference_max)
        if not layer.equal_in_stream:
            report.excesses.append(f"{where}: stream mode gave other bits than batched mode")
        if layer.calls == 0 or layer.expected_calls not in (None, layer.calls):
            report.excesses.append(f"{where}: made {layer.calls} calls to workers, expected {layer.expected_calls}")
    if any(layer.is_requantised or layer.is_rounded for layer in report.layers):
        # The whole model then differs from eager by the requantised weights or rounded inputs. That
        # is reported but not judged.
        return
    _check(report, "rms difference of the logits", report.logits_rms, bounds.logits_rms)
    _check(report, "largest difference of the logits", report.logits_max, bounds.logits_max)
    if report.greedy_flip_gap is not None and bounds.logits_max is not None:
        # Two logits may each move by the bound before their order may change.
        _check(report, f"gap of the top two logits where greedy token {report.greedy_compared} differs", report.greedy_flip_gap,
               2 * bounds.logits_max)  # fmt: skip


def _check(report: VerifyReport, what: str, found: float, limit: float | None) -> None:
    if limit is not None and not found <= limit:
        report.excesses.append(f"{what}: {found:.3g}, allowed {limit:.3g}")
