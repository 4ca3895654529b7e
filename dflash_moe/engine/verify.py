"""Compares a model over its workers with the same model in transformers, by the bounds of
docs/numerics.md (numerics): the experts layer by layer, and then the logits and greedy tokens of
the whole model as the engine computes them.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflash_moe.engine.forward import StepRows
from dflash_moe.engine.host_model import HostModel, open_host
from dflash_moe.engine.verify_report import Bounds, GreedyParity, VerifyReport, judge
from dflash_moe.errors import DflashError
from dflash_moe.integrations.layer_parity import compare_layer, count_calls, held_formats, load_eager, rms
from dflash_moe.integrations.transformers import expert_calls
from dflash_moe.model.capture import ExpertsCall, capture_calls
from dflash_moe.model.spec import model_spec
from dflash_moe.operators.addresses import DTYPE_NAMES
from dflash_moe.operators.reads import packed_linears
from dflash_moe.runtime.expert_runtime import ExpertRuntime

if TYPE_CHECKING:
    from dflash_moe.runtime.contents import ContentsReport
    from dflash_moe.runtime.fleet import LoadingReport
    from dflash_moe.topology import Topology

log = logging.getLogger(__name__)

# The prefill that is compared has so many tokens. That is longer than any window of a few tokens,
# and takes one core little time.
NUM_TOKENS = 96
# So many tokens are generated after the first GREEDY_PROMPT tokens of the prefill.
NUM_GREEDY = 16
GREEDY_PROMPT = 24


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
    those of `ExpertRuntime.start` and `open_host`.
    """
    progress("deriving layers from the model")
    spec = model_spec(path, dtype)
    settings = {"dtype": spec.dtype, **(overrides or {})}
    progress(f"loading the eager model in {spec.dtype}")
    eager = load_eager(path, spec.dtype)
    text_config = eager.config.get_text_config()
    bounds = Bounds.of(spec.dtype, int(getattr(text_config, "num_hidden_layers", len(spec.layers))))
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, int(text_config.vocab_size), (1, num_tokens), generator=generator)
    progress("starting workers")
    with (
        _torch_threads_kept(),
        ExpertRuntime.start(topology, model=spec, on_loading=on_loading, **settings) as runtime,
        torch.inference_mode(),
    ):
        request_dtype, reply_dtype = runtime.wire_dtypes
        report = VerifyReport(
            str(path), type(eager).__name__, spec.dtype, request_dtype, reply_dtype, runtime.stats()["numerics"], seed, bounds
        )
        if on_comparing is not None:
            progress("comparing weights with this host's own copy")
            report.compared_shards = runtime.check_weights(on_comparing)
        progress(f"comparing {len(spec.layers)} layers")
        eager_logits = _compare_layers(report, path, runtime, eager, input_ids)
        progress("comparing logits and greedy tokens")
        _compare_model(report, path, runtime, eager, input_ids, eager_logits)
    judge(report, spec.layers)
    return report


@contextmanager
def _torch_threads_kept() -> Iterator[None]:
    """Gives torch its threads back after the block: an engine leaves it one."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compare_layers(report: VerifyReport, path: Path, runtime: ExpertRuntime, eager: Any, input_ids: torch.Tensor) -> Any:
    """Compares every layer with what the eager model asks of its experts, and returns its
    logits.
    """
    calls: list[ExpertsCall] = []
    with capture_calls(eager, calls.append):
        eager_logits = _logits(eager, input_ids)
    layers = {layer.name: layer for layer in runtime.spec.layers}
    # Workers keep the weights as they are stored. Where the eager model had to round its own, the
    # truth must not.
    is_exact = all(report.dtype in ("f32", layer.weight_dtype) for layer in runtime.spec.layers)
    stored = eager if is_exact else load_eager(path, "f32")
    report.formats = held_formats(runtime)
    for call in calls:
        report.layers.append(compare_layer(stored.get_submodule(call.name), layers[call.name], call, runtime))
    return eager_logits


@contextmanager
def _same_noise() -> Iterator[None]:
    """Has a model that draws noise draw the same in every such block."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _logits(model: Any, input_ids: torch.Tensor) -> Any:
    """Returns the logits [num_tokens, vocab_size] in float32 on the CPU, or the last hidden states
    of a model without a head.
    """
    with _same_noise():
        output = model(input_ids=input_ids.to(model.device), use_cache=False)
    return (output.logits if hasattr(output, "logits") else output.last_hidden_state)[0].float().cpu()


def _host_logits(host: HostModel, input_ids: torch.Tensor) -> Any:
    """Returns what `_logits` returns, over pages where the model's attention reads them."""
    if host.packed is None:
        return _logits(host.model, input_ids)
    token_ids = input_ids[0].tolist()
    sequence = host.packed.admit(len(token_ids))
    try:
        with _same_noise():
            return host.packed.forward([StepRows(sequence, token_ids, num_logits=len(token_ids))]).cpu()
    finally:
        sequence.release()


def _compare_model(
    report: VerifyReport, path: Path, runtime: ExpertRuntime, eager: Any, input_ids: torch.Tensor, eager_logits: Any
) -> None:
    runtime.set_mode("batched")
    host = open_host(path, runtime)
    report.host = host.report
    if host.packed is not None:
        report.host_numerics = tuple(sorted({name for packed in packed_linears(host.model) for name in packed.numerics}))
        report.kv_dtype = runtime.settings.kv_dtype or DTYPE_NAMES[host.model.dtype]
    before = count_calls(runtime)
    difference = (_host_logits(host, input_ids) - eager_logits) / eager_logits.std()
    report.logits_rms, report.logits_max = rms(difference), float(difference.abs().max())
    report.greedy = _compare_greedy(host, eager, input_ids[:, :GREEDY_PROMPT], report.bounds.tie)
    report.remote_calls = count_calls(runtime) - before
    _check_calls(host.model, report.remote_calls)


def _compare_greedy(host: HostModel, eager: Any, prompt: torch.Tensor, tie: float | None) -> GreedyParity:
    """Generates tokens as the engine does, and asks eager in one pass what it would have taken at
    each of their places.
    """
    is_cached = True
    try:
        ours = _generate(host, prompt[0].tolist())
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        if host.packed is not None or isinstance(error, DflashError):
            raise
        log.info("%s: tokens are generated without a cache: %s", type(host.model).__name__, error)
        is_cached, ours = False, _generate_without_cache(host.model, prompt[0].tolist())
    seen = torch.cat([prompt, torch.tensor([ours[:-1]], dtype=torch.int64)], dim=1)
    logits = _logits(eager, seen)
    if is_cached and len(logits) == seen.shape[1]:
        logits = logits[-len(ours) :]
    else:
        # A model may look at later tokens, or give logits of a canvas of noise: one pass each.
        ends = range(prompt.shape[1], seen.shape[1] + 1)
        logits = torch.stack([_logits(eager, seen[:, :end])[-1] for end in ends])
    best = logits.topk(2).values
    gaps = (best[:, 0] - best[:, 1]) / logits.std()
    return GreedyParity.of(ours, logits.argmax(dim=-1).tolist(), gaps.tolist(), tie)


def _generate(host: HostModel, prompt: list[int]) -> list[int]:
    """Returns the NUM_GREEDY most likely tokens after `prompt`. It is `generate_tokens`, but that
    noise is the same in every pass.
    """
    token_ids = list(prompt)
    with closing(host.sequence(len(prompt) + NUM_GREEDY)) as run:
        for step in range(NUM_GREEDY):
            with _same_noise():
                token_ids.append(int(torch.argmax(run.forward(token_ids[-1:] if step else prompt))))
    return token_ids[len(prompt) :]


def _generate_without_cache(model: Any, prompt: list[int]) -> list[int]:
    """Returns what `_generate` returns, for families whose caches no engine here fills."""
    seen = torch.tensor([prompt], dtype=torch.int64)
    for _ in range(NUM_GREEDY):
        seen = torch.cat([seen, _logits(model, seen)[-1].argmax().reshape(1, 1)], dim=1)
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
