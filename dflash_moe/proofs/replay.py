"""Proves a receipt again: with its shard map on the holders that are there, its tokens and digests
come out bit by bit, or the first layer and position are named where they do not.

Where equal bits are not promised, by the receipt or by this machine, the run is repeated with the
receipt's tokens and compared by tolerance, if that is allowed (replay_close.py).
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_moe import _core
from dflash_moe.config import resolve_settings
from dflash_moe.engine.llm import LLM
from dflash_moe.errors import ConfigError, UnsupportedError
from dflash_moe.model.spec import ModelSpec, model_spec
from dflash_moe.placement.imposed import check_map, impose
from dflash_moe.proofs.receipt_record import digests_kept, host_facts
from dflash_moe.proofs.replay_close import CloseResult, replay_close
from dflash_moe.proofs.two_passes import Contents, host_difference, other_contents
from dflash_moe.protocol.devices import DeviceChoice

if TYPE_CHECKING:
    from dflash_moe.forward.residuals import ResidualDigests
    from dflash_moe.holders.fleet import LoadingReport
    from dflash_moe.proofs.receipt import Receipt
    from dflash_moe.topology import Topology

CLOSE_HINT = "--close compares by tolerance instead"


@dataclass(slots=True)
class Replay:
    """What came of a replay. `differences` are sentences, the first one the most telling; none
    where it is proven. `close` is None where bits were compared.
    """

    num_holders: int
    classes: tuple[str, ...]
    num_tokens: int
    num_digests: int
    differences: list[str] = field(default_factory=list)
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
    result = replay_close(receipt, spec, topology, on_loading, {**(overrides or {}), "dtype": receipt.request_dtype})
    return Replay(
        result.num_holders, result.classes, len(receipt.tokens), 0, list(result.excesses), reason=reason, close=result
    )


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
        holders = {shard.holder: shard.numerics for shards in llm.runtime.placement.layers for shard in shards}
    stored = receipt.residuals
    found = Replay(
        len(holders), tuple(sorted(set(holders.values()))), len(receipt.tokens), len(stored.positions) * stored.num_layers
    )
    # Whatever comes first in the sequence is the cause of what comes later.
    parted = sorted([*_differing_digests(receipt, digests), *_differing_tokens(receipt, tokens)])
    found.differences = [sentence for _, sentence in parted] + _differing_contents(receipt, contents)
    return found


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
