"""The passes of the eager model that `verify` compares with: one over a prompt, which keeps what
every layer's experts were given and gave, and one over tokens that our model generated.

Each opens the model, streams it, and frees it.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_moe.engine.streamed_eager import StreamedEager
from dflash_moe.model.capture import ExpertsCall, capture_calls
from dflash_moe.telemetry.memory import trim_heap

# What is kept of all layers takes at most so many bytes. Where all rows would take more, the first
# ones are kept.
KEPT_BYTES = 200_000_000


@dataclass(frozen=True, slots=True)
class EagerPass:
    """What one pass over a prompt gave: the calls of the experts in the order of the model, and the
    logits of `model_logits`.
    """

    class_name: str
    calls: list[ExpertsCall]
    logits: Any


@contextmanager
def same_noise() -> Iterator[None]:
    """Has a model that draws noise draw the same in every such block."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def model_logits(model: Any, input_ids: Any) -> Any:
    """Returns the logits [num_tokens, vocab_size] in float32 on the CPU, or the last hidden states
    of a model without a head.
    """
    with same_noise():
        output = model(input_ids=input_ids, use_cache=False)
    return (output.logits if hasattr(output, "logits") else output.last_hidden_state)[0].float().cpu()


def run_eager(path: Path, dtype: str, input_ids: Any, num_layers: int, progress: Callable[[str], None]) -> EagerPass:
    """Runs the eager model over `input_ids` [1, num_tokens]. `num_layers` of it have experts.
    `progress` hears of a model that cannot be streamed. Errors are those of `StreamedEager`.
    """

    def compute(model: Any) -> tuple[list[ExpertsCall], Any]:
        calls: list[ExpertsCall] = []
        with torch.inference_mode(), capture_calls(model, lambda call: calls.append(_kept(call, num_layers))):
            return calls, model_logits(model, input_ids)

    with _opened(path, dtype, progress) as eager:
        calls, logits = eager.run(compute)
        return EagerPass(type(eager.model).__name__, calls, logits)


def best_tokens(
    path: Path, dtype: str, prompt: Any, generated: Sequence[int], *, is_causal: bool, progress: Callable[[str], None]
) -> tuple[list[int], list[float]]:
    """Returns for each place of `generated` the token that eager takes best there, after `prompt`
    [1, num_tokens] and the generated ones before it, and the gap of its two largest logits over
    the standard deviation of all.

    One pass gives all places of a model that looks at earlier tokens only. Without `is_causal`, or
    where a pass gives the logits of something else, such as a canvas of noise, each has its own.
    """
    seen = torch.cat([prompt, torch.tensor([[*generated[:-1]]], dtype=torch.int64)], dim=1)

    def compute(model: Any) -> Any:
        with torch.inference_mode():
            if is_causal and len(logits := model_logits(model, seen)) == seen.shape[1]:
                return logits[-len(generated) :]
            ends = range(prompt.shape[1], seen.shape[1] + 1)
            return torch.stack([model_logits(model, seen[:, :end])[-1] for end in ends])

    with _opened(path, dtype, progress) as eager:
        logits = eager.run(compute)
    best = logits.topk(2).values
    gaps = (best[:, 0] - best[:, 1]) / logits.std()
    return logits.argmax(dim=-1).tolist(), gaps.tolist()


@contextmanager
def _opened(path: Path, dtype: str, progress: Callable[[str], None]) -> Iterator[StreamedEager]:
    gc.collect()  # what ran before may be freed by that alone
    trim_heap()
    eager = StreamedEager(path, dtype)
    try:
        yield eager
    finally:
        if eager.whole:
            progress(f"the eager model was loaded whole: {eager.whole}")
        eager.close()


def _kept(call: ExpertsCall, num_layers: int) -> ExpertsCall:
    """Returns a call with as many of its rows as `KEPT_BYTES` allow when every layer keeps as
    many.
    """
    values = (call.hidden_states, call.topk_ids, call.topk_weights, call.output)
    row_bytes = sum(value[:1].numel() * value.element_size() for value in values)
    rows = max(1, KEPT_BYTES // (row_bytes * num_layers))
    if rows >= call.hidden_states.shape[0]:
        return call
    return ExpertsCall(call.name, *(value[:rows].clone() for value in values))
