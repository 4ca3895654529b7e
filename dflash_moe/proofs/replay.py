"""Proves a receipt again: with its shard map on the holders that are there, its tokens and digests
come out bit by bit, or the first layer and position are named where they do not.

Where equal bits are not promised, by the receipt or by this machine, residual stream and logits are
compared by tolerance, if that is allowed. The receipt's own tokens are fed, so that one that flips
does not spread.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dflash_moe import _core
from dflash_moe.config import resolve_settings
from dflash_moe.engine.llm import LLM
from dflash_moe.errors import ConfigError, UnsupportedError
from dflash_moe.forward.residuals import SAMPLED_VALUES, ResidualDigests, residuals_shown
from dflash_moe.model.spec import ModelSpec, model_spec
from dflash_moe.placement.imposed import check_map, impose
from dflash_moe.proofs.one_pass import opened_pass, sequence_logits
from dflash_moe.proofs.receipt_record import digests_kept, host_facts
from dflash_moe.proofs.two_passes import Bounds, Contents, host_difference, other_contents
from dflash_moe.protocol.devices import DeviceChoice

if TYPE_CHECKING:
    from dflash_moe.experts.expert_runtime import ExpertRuntime
    from dflash_moe.holders.fleet import LoadingReport
    from dflash_moe.proofs.receipt import Receipt
    from dflash_moe.topology import Topology

CLOSE_HINT = "--close compares by tolerance instead"


@dataclass(frozen=True, slots=True)
class CloseResult:
    """What a comparison by tolerance measured. Differences are fractions of the receipt's
    deviation: `rms` by layer, that of the median row, because a tie in a router moves a row or two
    and a wrong operator moves all.
    """

    tolerance: float
    rms: list[float]
    # So many of the receipt's tokens are the best ones here too.
    num_equal: int
    # Whether tokens were judged: those that were drawn by chance are not.
    is_greedy: bool


@dataclass(slots=True)
class Replay:
    """What came of a replay. `differences` are sentences, the first one the most telling; none
    where it is proven. `close` is None where bits were compared.
    """

    num_holders: int
    classes: tuple[str, ...]
    num_tokens: int
    num_digests: int
    differences: list[str]
    # Why bits were not compared, where they were not.
    reason: str = ""
    close: CloseResult | None = None


def replay(
    receipt: Receipt, path: Path, topology: Topology, *, is_close: bool = False, on_loading: LoadingReport | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Replay:  # fmt: skip
    """Runs a receipt again. `overrides` are settings, of which those that decide bits are the
    receipt's.

    Errors, before any weight is loaded: ConfigError for another checkpoint, UnsupportedError where
    bits are not promised and `is_close` does not allow less. Later: UnsupportedError where the
    host's own part is computed by other operators than the receipt's, and those of `LLM`.
    """
    spec = model_spec(path)
    _check_model(receipt, spec)
    settings = {**(overrides or {}), **_settings(receipt)}
    try:
        _check_claims(receipt, topology, settings)
        where = impose(topology, receipt.shard_map, receipt.host.numerics)
        return _replay_bits(receipt, path, where, on_loading, settings)
    except UnsupportedError as error:
        if not is_close:
            raise error.reworded(f"{error}; {CLOSE_HINT}") from None
        reason = str(error)
    found = _replay_close(receipt, spec, topology, on_loading, {**(overrides or {}), "dtype": receipt.request_dtype})
    found.reason = reason
    return found


def _check_model(receipt: Receipt, spec: ModelSpec) -> None:
    if spec.fingerprint != receipt.fingerprint:
        raise ConfigError(
            f"replay: {spec.path} has fingerprint {spec.fingerprint[:12]}, the receipt is of {receipt.fingerprint[:12]}; give "
            "the same checkpoint with --model"
        )
    if spec.dtype != receipt.dtype:
        raise ConfigError(f"replay: the model runs in {spec.dtype}, the receipt says {receipt.dtype}; it is damaged")
    check_map(spec.layers, receipt.shard_map)
    for layer, listed in zip(spec.layers, receipt.layers, strict=True):
        for shard in listed.shards:
            here = layer.weight_dtype if shard.terms.weights == "auto" else layer.resident_dtype(shard.terms.weights)
            if layer.index != listed.index or here != shard.weight_dtype:
                raise ConfigError(
                    f"replay: layer {layer.index} is kept in {here} here, the receipt has layer {listed.index} in "
                    f"{shard.weight_dtype}; it is damaged"
                )


def _settings(receipt: Receipt) -> dict[str, Any]:
    """Returns the settings that decide bits."""
    found: dict[str, Any] = {"dtype": receipt.request_dtype, "reply_dtype": receipt.reply_dtype, "preset": "exact"}
    if receipt.host.kv_dtype:
        found["kv_dtype"] = receipt.host.kv_dtype
    if any(len({terms.numerics for terms in layer}) > 1 for layer in receipt.shard_map):
        found["numerics"] = "close"
    return found


def _check_claims(receipt: Receipt, topology: Topology, overrides: Mapping[str, Any]) -> None:
    """Raises UnsupportedError where receipt or machine promise no equal bits, as far as that is
    known before anything is started.
    """
    if receipt.host.no_claim:
        raise UnsupportedError(f"replay: the receipt promises parity and not bits: {receipt.host.no_claim}")
    settings = resolve_settings(topology.stated_settings, **overrides)
    if not DeviceChoice.of_host(topology.host).is_processor:
        raise UnsupportedError(f"replay: the model lies on {topology.host.device} here, where bits are not promised")
    if settings.host_operators == "torch":
        raise UnsupportedError("replay: host.operators is torch here, where bits are not promised")
    isa = _core.parse_isa(settings.cpu_isa or _core.best_isa())
    offered = tuple(_core.numerics_classes(isa))
    if isa == "reference":
        raise UnsupportedError("replay: kernel set reference has no host operators, and bits are not promised")
    for kept, numerics in receipt.host.numerics.items():
        if numerics not in offered:
            raise UnsupportedError(
                f"replay: the receipt's host computes its matrices in {kept} in numerics class {numerics}, which kernel set "
                f"{isa} here does not; it offers {', '.join(offered)}"
            )


def _replay_bits(
    receipt: Receipt, path: Path, topology: Topology, on_loading: LoadingReport | None, settings: Mapping[str, Any]
) -> Replay:
    tokens: list[int] = []
    with LLM(path, topology, on_loading=on_loading, **settings) as llm:
        _check_host(receipt, llm)
        with digests_kept(llm, 0, receipt.residuals.positions) as digests:
            stream = llm.submit(receipt.prompt_ids, receipt.sampling)
            for delta in stream:
                if delta.error is not None:
                    raise delta.error
                tokens += delta.token_ids
                if len(tokens) >= len(receipt.tokens):
                    stream.cancel()
                    break
        contents = llm.runtime.content_checksums()
        holders = _holders(llm.runtime)
    stored = receipt.residuals
    # Whatever comes first in the sequence is the cause of what comes later.
    parted = sorted([*_differing_digests(receipt, digests), *_differing_tokens(receipt, tokens)])
    differences = [sentence for _, sentence in parted] + _differing_contents(receipt, contents)
    return Replay(*holders, len(receipt.tokens), len(stored.positions) * stored.num_layers, differences)


def _holders(runtime: ExpertRuntime) -> tuple[int, tuple[str, ...]]:
    """Returns how many holders of experts there are, and their numerics classes."""
    found = {shard.holder: shard.numerics for shards in runtime.placement.layers for shard in shards}
    return len(found), tuple(sorted(set(found.values())))


def _check_host(receipt: Receipt, llm: LLM) -> None:
    """Raises UnsupportedError where the host's own part is computed by other means."""
    ours, theirs = host_facts(llm.host, llm.runtime), receipt.host
    if ours.no_claim:
        raise UnsupportedError(f"replay: bits are not promised here: {ours.no_claim}")
    if differs := host_difference(ours, theirs, ("here", "in the receipt")):
        raise UnsupportedError(f"replay: {differs}")


def _differing_digests(receipt: Receipt, digests: ResidualDigests) -> list[tuple[int, str]]:
    """Returns the first position that differs with a sentence about it, nothing where none does."""
    stored = receipt.residuals
    parts = [
        (position, layer)
        for position, wanted in zip(stored.positions, stored.digests, strict=True)
        for layer, (one, other) in enumerate(_paired(wanted, digests.digests(position)))
        if one != other
    ]
    if not parts:
        return []
    position, layer = parts[0]
    count = f"{len(parts)} of {len(stored.positions) * stored.num_layers} digests differ"
    return [(position, f"the residual stream parts at position {position} after layer {layer}; {count}")]


def _paired(wanted: tuple[str, ...], found: tuple[str, ...]) -> list[tuple[str, str]]:
    return list(zip(wanted, found or ("",) * len(wanted), strict=True))


def _differing_tokens(receipt: Receipt, tokens: list[int]) -> list[tuple[int, str]]:
    """As `_differing_digests`, of tokens."""
    for place, token in enumerate(receipt.tokens):
        found = tokens[place] if place < len(tokens) else None
        if found != token:
            position = len(receipt.prompt_ids) + place
            return [(position, f"token {place} at position {position} is {found} here, and {token} in the receipt")]
    return []


def _differing_contents(receipt: Receipt, contents: Contents) -> list[str]:
    odd = other_contents(contents, [[shard.content for shard in layer.shards] for layer in receipt.layers])
    if not odd:
        return []
    first = odd[0]
    return [
        f"weights of {len(odd)} shards are not those of the receipt, "
        f"first layer {receipt.layers[first.place].index}, shard {first.shard}: "
        f"content checksum {first.found:#018x} here, {first.wanted:#018x} in the receipt"
    ]


def _replay_close(
    receipt: Receipt,
    spec: ModelSpec,
    topology: Topology,
    on_loading: LoadingReport | None,
    overrides: Mapping[str, Any],
) -> Replay:
    """Computes what a receipt says on the holders of `topology`, in their own classes."""
    own = tuple(tuple(replace(terms, numerics="", architecture="") for terms in layer) for layer in receipt.shard_map)
    digests = ResidualDigests(0, receipt.residuals.positions)
    with opened_pass(spec.path, spec, impose(topology, own), overrides, on_loading=on_loading) as opened:
        forward = opened.forward
        highest = max(receipt.tokens)
        if highest >= forward.vocab_size:
            raise ConfigError(f"replay: token {highest} of the receipt is beyond the model's {forward.vocab_size}")
        with residuals_shown(forward, digests):
            # Those from which the receipt's tokens were chosen.
            logits = sequence_logits(
                forward, [*receipt.prompt_ids, *receipt.tokens[:-1]], num_logits=len(receipt.tokens),
                max_tokens=len(receipt.prompt_ids) + receipt.sampling.max_tokens,
                max_rows=opened.runtime.settings.max_batch_tokens if forward.cuts_prompts else 0,
            )  # fmt: skip
        holders = _holders(opened.runtime)
    num_layers = receipt.residuals.num_layers
    tolerance, most = Bounds.of(receipt.dtype, num_layers).after_layers(num_layers)
    rms, differences = _judge_stream(receipt, digests, tolerance)
    num_equal, is_greedy, flipped = _judge_tokens(receipt, logits, 2 * most)
    close = CloseResult(tolerance, rms, num_equal, is_greedy)
    return Replay(*holders, len(receipt.tokens), 0, differences + flipped, close=close)


def _judge_stream(receipt: Receipt, digests: ResidualDigests, tolerance: float) -> tuple[list[float], list[str]]:
    """Returns `CloseResult.rms`, and a sentence on the first layer that exceeds the tolerance."""
    stored = receipt.residuals
    shape = (len(stored.positions), stored.num_layers, 1 + SAMPLED_VALUES)
    wanted = np.frombuffer(b"".join(stored.values), np.float32).reshape(shape).astype(np.float64)
    ours = np.stack([digests.values(position) for position in stored.positions]).astype(np.float64)
    # One deviation for all rows of a layer: a first token's can be a thousand times another's.
    deviation = np.median(wanted[:, :, :1], axis=0, keepdims=True)
    differences = (ours - wanted)[:, :, 1:] / np.where(deviation > 0, deviation, 1.0)
    by_row = np.sqrt(np.mean(differences**2, axis=2))
    rms: list[float] = np.median(by_row, axis=0).tolist()
    for layer, value in enumerate(rms):
        if not value <= tolerance:
            position = stored.positions[int(np.argmax(by_row[:, layer]))]
            return rms, [
                f"the residual stream parts after layer {layer}, most at position {position}: the median row by "
                f"{value:.3g} of the deviation, allowed {tolerance:.3g}"
            ]
    return rms, []


def _judge_tokens(receipt: Receipt, logits: torch.Tensor, tie: float) -> tuple[int, bool, list[str]]:
    """Returns how many tokens are the best ones here, whether they are judged, and a sentence on
    the first greedy one that is none: the best logit may be larger by `tie`, in the deviation of
    all logits.
    """
    asked = receipt.sampling
    has_bias = asked.presence_penalty or asked.frequency_penalty or asked.repetition_penalty != 1 or asked.logit_bias
    is_greedy = asked.temperature == 0 and not has_bias
    tokens = torch.tensor(receipt.tokens)
    gaps = (logits.max(dim=1).values - logits.gather(1, tokens[:, None])[:, 0]) / logits.std()
    num_equal = int((gaps == 0).sum())
    flipped = []
    if is_greedy and not float(gaps.max()) <= tie:
        place = int(torch.nonzero(~(gaps <= tie))[0, 0])
        flipped.append(
            f"token {place} at position {len(receipt.prompt_ids) + place} is {receipt.tokens[place]} in the "
            f"receipt; the best here is {int(logits[place].argmax())}, by {float(gaps[place]):.3g} of the "
            f"logits' deviation, allowed {tie:.3g}"
        )
    return num_equal, is_greedy, flipped
