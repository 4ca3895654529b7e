"""Repeats the run of a receipt where equal bits are not promised: the receipt's own tokens are fed,
so that one that flips does not spread, and residual stream and logits are compared by tolerance.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dflash_moe.errors import ConfigError
from dflash_moe.experts.expert_runtime import ExpertRuntime
from dflash_moe.forward.forward import Forward, StepRows
from dflash_moe.forward.host_model import open_host
from dflash_moe.forward.residuals import SAMPLED_VALUES, ResidualDigests, residuals_shown
from dflash_moe.placement.imposed import impose
from dflash_moe.proofs.two_passes import Bounds

if TYPE_CHECKING:
    from dflash_moe.holders.fleet import LoadingReport
    from dflash_moe.model.spec import ModelSpec
    from dflash_moe.proofs.receipt import Receipt
    from dflash_moe.topology import Topology


@dataclass(slots=True)
class CloseResult:
    """Differences are fractions of the receipt's deviation: `rms` by layer, that of the median
    row, because a tie in a router moves a row or two and a wrong operator moves all.
    """

    num_holders: int
    classes: tuple[str, ...]
    tolerance: float
    rms: list[float]
    num_equal: int
    # Whether tokens were judged: those that were drawn by chance are not.
    is_greedy: bool
    excesses: list[str] = field(default_factory=list)


def replay_close(
    receipt: Receipt, spec: ModelSpec, topology: Topology, on_loading: LoadingReport | None, overrides: Mapping[str, Any]
) -> CloseResult:
    """Computes prompt and tokens of a receipt on the holders of `topology`, in their own classes.
    Errors are those of `ExpertRuntime.start` and `open_host`.
    """
    own = tuple(tuple(replace(terms, numerics="", architecture="") for terms in layer) for layer in receipt.shard_map)
    where = impose(topology, own)
    digests = ResidualDigests(0, receipt.residuals.positions)
    with ExpertRuntime.start(where, spec, on_loading=on_loading, **overrides) as runtime:
        host = open_host(spec.path, runtime)
        with closing(host.engine_forward(runtime.settings.kv_memory)) as forward, residuals_shown(forward, digests):
            logits = _logits(receipt, forward, runtime.settings.max_batch_tokens)
        holders = {shard.holder: shard.numerics for shards in runtime.placement.layers for shard in shards}
    return _judged(receipt, digests, logits, CloseResult(len(holders), tuple(sorted(set(holders.values()))), 0.0, [], 0, False))


def _logits(receipt: Receipt, forward: Forward, max_rows: int) -> torch.Tensor:
    """Returns logits [num_tokens, vocab_size] from which the receipt's tokens were chosen."""
    if max(receipt.tokens) >= forward.vocab_size:
        raise ConfigError(f"replay: token {max(receipt.tokens)} of the receipt is beyond the model's {forward.vocab_size}")
    token_ids = [*receipt.prompt_ids, *receipt.tokens[:-1]]
    size = max_rows if forward.cuts_prompts else len(token_ids)
    first_wanted = len(receipt.prompt_ids) - 1
    sequence = forward.admit(len(receipt.prompt_ids) + receipt.sampling.max_tokens)
    found = []
    try:
        for begin in range(0, len(token_ids), size):
            part = token_ids[begin : begin + size]
            num_logits = min(len(part), max(0, begin + len(part) - first_wanted))
            with forward.begin([StepRows(sequence, part, num_logits=num_logits)]) as step:
                found.append(step.run().cpu())
    finally:
        sequence.release()
    return torch.cat(found)


def _judged(receipt: Receipt, digests: ResidualDigests, logits: torch.Tensor, found: CloseResult) -> CloseResult:
    stored = receipt.residuals
    found.tolerance, most = Bounds.of(receipt.dtype, stored.num_layers).after_layers(stored.num_layers)
    shape = (len(stored.positions), stored.num_layers, 1 + SAMPLED_VALUES)
    wanted = np.frombuffer(b"".join(stored.values), np.float32).reshape(shape).astype(np.float64)
    ours = np.stack([digests.values(position) for position in stored.positions]).astype(np.float64)
    # One deviation for all rows of a layer: a first token's can be a thousand times another's.
    deviation = np.median(wanted[:, :, :1], axis=0, keepdims=True)
    differences = (ours - wanted)[:, :, 1:] / np.where(deviation > 0, deviation, 1.0)
    by_row = np.sqrt(np.mean(differences**2, axis=2))
    found.rms = np.median(by_row, axis=0).tolist()
    for layer, value in enumerate(found.rms):
        if not value <= found.tolerance:
            position = stored.positions[int(np.argmax(by_row[:, layer]))]
            found.excesses.append(
                f"the residual stream parts after layer {layer}, most at position {position}: the median row by "
                f"{value:.3g} of the deviation, allowed {found.tolerance:.3g}"
            )
            break
    _judge_tokens(receipt, logits, 2 * most, found)
    return found


def _judge_tokens(receipt: Receipt, logits: torch.Tensor, tie: float, found: CloseResult) -> None:
    """Judges greedy tokens that are not the best ones here: the best logit may be larger by `tie`,
    in the deviation of all logits.
    """
    asked = receipt.sampling
    has_bias = asked.presence_penalty or asked.frequency_penalty or asked.repetition_penalty != 1 or asked.logit_bias
    found.is_greedy = asked.temperature == 0 and not has_bias
    tokens = torch.tensor(receipt.tokens)
    gaps = (logits.max(dim=1).values - logits.gather(1, tokens[:, None])[:, 0]) / logits.std()
    found.num_equal = int((gaps == 0).sum())
    if found.is_greedy and not float(gaps.max()) <= tie:
        place = int(torch.nonzero(~(gaps <= tie))[0, 0])
        found.excesses.append(
            f"token {place} at position {len(receipt.prompt_ids) + place} is {receipt.tokens[place]} in the receipt; the best "
            f"here is {int(logits[place].argmax())}, by {float(gaps[place]):.3g} of the logits' deviation, allowed "
            f"{tie:.3g}"
        )
