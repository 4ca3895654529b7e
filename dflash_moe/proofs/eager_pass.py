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

from dflash_moe.model.capture import ExpertsCall, capture_calls
from dflash_moe.proofs.streamed_eager import StreamedEager
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


@dataclass(frozen=True, slots=True)
class FarRows:
    """Tokens that stand at `positions`, ascending. They follow the tokens of another pass where
    `is_appended`, and are a pass of their own where cosines depend on the last position.
    """

    token_ids: list[int]
    positions: list[int]
    is_appended: bool


@dataclass(frozen=True, slots=True)
class BestTokens:
    """What eager says at each generated place. `tokens` are those with its largest logits. `gaps`
    are the distances from there to the second largest, in standard deviations of the logits of all
    these places: where one is small, another token is nearly as good. `far_logits` are those of far
    rows, None where there were none.
    """

    tokens: list[int]
    gaps: list[float]
    far_logits: Any


def model_logits(model: Any, input_ids: Any, positions: Sequence[int] | None = None) -> Any:
    """Returns the logits [num_tokens, vocab_size] in float32 on the CPU, or the last hidden states
    of a model without a head. Tokens stand at `positions`, by default one after the other.
    """
    # Without a cache transformers takes positions with gaps for several sequences.
    given = {} if positions is None else {"position_ids": torch.tensor([positions], device=input_ids.device)}
    with same_noise():
        output = model(input_ids=input_ids, use_cache=bool(given), **given)
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
    path: Path, dtype: str, prompt: Any, generated: Sequence[int], *, is_causal: bool, progress: Callable[[str], None],
    far: FarRows | None = None,
) -> BestTokens:  # fmt: skip
    """Returns for each place of `generated` what eager says there, after `prompt` [1, num_tokens]
    and the generated ones before it, and the logits of `far` rows.

    One pass gives all places of a model that looks at earlier tokens only. Without `is_causal`, or
    where a pass gives the logits of something else, such as a canvas of noise, each has its own.
    """
    seen = torch.cat([prompt, torch.tensor([[*generated[:-1]]], dtype=torch.int64)], dim=1)
    count = seen.shape[1]

    def compute(model: Any) -> tuple[Any, Any]:
        with torch.inference_mode():
            if far is not None and far.is_appended:
                ids = torch.cat([seen, torch.tensor([far.token_ids])], dim=1)
                logits = model_logits(model, ids, [*range(count), *far.positions])
                return logits[count - len(generated) : count], logits[count:]
            others = None if far is None else model_logits(model, torch.tensor([far.token_ids]), far.positions)
            if is_causal and len(logits := model_logits(model, seen)) == count:
                return logits[-len(generated) :], others
            ends = range(prompt.shape[1], count + 1)
            return torch.stack([model_logits(model, seen[:, :end])[-1] for end in ends]), others

    with _opened(path, dtype, progress) as eager:
        logits, far_logits = eager.run(compute)
    best = logits.topk(2).values
    gaps = (best[:, 0] - best[:, 1]) / logits.std()
    return BestTokens(logits.argmax(dim=-1).tolist(), gaps.tolist(), far_logits)


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
