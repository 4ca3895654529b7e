"""How two passes over one model's tokens are compared: `verify` compares the workers with eager,
`diff` two checkpoints, classes or sets of workers, `replay` a run with its receipt.

Bits are compared where whatever decides them is the same on both sides; elsewhere differences, as
fractions of the deviation of the side that is compared with, by the bounds of docs/numerics.md.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dflash_moe.proofs.receipt import HostFacts
    from dflash_moe.topology.spec import ShardMap

# The content checksums of all shards: [num_layers][num_shards].
Contents = Sequence[Sequence[int]]
# What of a shard's terms decides its bits beside experts and weights.
_CLASS_TERMS = ("numerics", "architecture")


@dataclass(frozen=True, slots=True)
class PassFacts:
    """What decides the bits of a pass."""

    fingerprint: str
    wire_dtypes: tuple[str, str]
    shards: ShardMap
    host: HostFacts
    contents: Contents

    def why_not_bits(self, other: PassFacts) -> str:
        """Returns why this pass, B, need not have the bits of the other, A; an empty text where it
        must.
        """
        for what, ours, theirs in (
            ("the checkpoints have other fingerprints", self.fingerprint, other.fingerprint),
            ("the shard maps differ", self._terms("experts"), other._terms("experts")),
            ("the numerics classes differ", self._terms(*_CLASS_TERMS), other._terms(*_CLASS_TERMS)),
            ("the weights are kept in other formats", self._terms("weights"), other._terms("weights")),
            ("the wire dtypes differ", self.wire_dtypes, other.wire_dtypes),
        ):
            if ours != theirs:
                return what
        claim = other.host.no_claim or self.host.no_claim
        differs = host_difference(self.host, other.host, ("in B", "in A"))
        return differs or (f"equal bits are not promised: {claim}" if claim else "")

    def other_contents(self, other: PassFacts) -> list[OtherContent]:
        """Returns the shards whose weights are other bytes, none where the files are of two models
        or shards of other experts.
        """
        if self.fingerprint != other.fingerprint or self._terms("experts") != other._terms("experts"):
            return []
        return other_contents(self.contents, other.contents)

    def _terms(self, *names: str) -> list[list[tuple[Any, ...]]]:
        return [[tuple(getattr(terms, name) for name in names) for terms in layer] for layer in self.shards]


def host_difference(ours: HostFacts, theirs: HostFacts, sides: tuple[str, str]) -> str:
    """Returns in what the host's own part is computed by other means, or nothing. `sides` say where
    each of the two is.
    """
    here, there = sides
    for name in ("numerics", "kv_dtype"):
        found, wanted = getattr(ours, name), getattr(theirs, name)
        if found != wanted:
            return f"the host's {name} is {found} {here}, and {wanted} {there}"
    odd = sorted(set(ours.operators) ^ set(theirs.operators))
    if not odd:
        return ""
    who = f"{here} and not {there}" if odd[0] in ours.operators else f"{there} and not {here}"
    return f"{len(odd)} host operators differ; {odd[0]} was taken over {who}"


@dataclass(frozen=True, slots=True)
class OtherContent:
    """A shard with other bytes: the layer's place in the spec, the shard, and both checksums."""

    place: int
    shard: int
    found: int
    wanted: int


def other_contents(found: Contents, wanted: Contents) -> list[OtherContent]:
    """Returns the shards whose checksums differ. Both have the same shards."""
    return [
        OtherContent(place, shard, one, other)
        for place, (ours, theirs) in enumerate(zip(found, wanted, strict=True))
        for shard, (one, other) in enumerate(zip(ours, theirs, strict=True))
        if one != other
    ]


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

    @property
    def tie(self) -> float | None:
        """The largest gap of two logits that may be of either order: each may move by the bound."""
        return None if self.logits_max is None else 2 * self.logits_max

    def after_layers(self, num_layers: int) -> tuple[float, float]:
        """The rms and the largest difference that rows may have after `num_layers` layers that were
        computed one after the other. In f32 they are those of the logits, which were chosen for all
        layers of the model. In 16 bits each layer rounds the stream anew.
        """
        if self.logits_rms is not None and self.logits_max is not None:
            return self.logits_rms, self.logits_max
        assert self.difference_rms is not None
        assert self.difference_max is not None
        depth = max(1.0, num_layers / 12)
        return self.difference_rms * depth, self.difference_max * depth


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a tensor is from another one of rows [num_rows, size]: rms and largest difference
    over the deviation of the other. `first_row` is the first one that parts, None where none does.
    """

    rms: float
    largest: float
    first_row: int | None


def compare(found: torch.Tensor, wanted: torch.Tensor, tolerance: float | None) -> Difference:
    """Compares rows [num_rows, size]: they part where a bit differs, or with a `tolerance` where
    the rms of all rows exceeds it.
    """
    same = _same_rows(found, wanted)
    if bool(same.all()):
        return Difference(0.0, 0.0, None)
    exact = wanted.double()
    deviation = float(exact.std(correction=0)) or 1.0
    differences = (found.double() - exact) / deviation
    by_row = differences.square().mean(dim=1).sqrt()
    rms, largest = float(by_row.square().mean().sqrt()), float(differences.abs().max())
    if tolerance is not None and rms <= tolerance:
        return Difference(rms, largest, None)
    parted = ~same if tolerance is None else ~(by_row <= tolerance)
    return Difference(rms, largest, int(torch.nonzero(parted)[0, 0]))


def _same_rows(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns bool [num_rows]: which rows have the same bits. Values of two dtypes are widened."""
    if one.dtype != other.dtype:
        one, other = one.double(), other.double()
    pairs = (tensor.contiguous().view(torch.uint8) for tensor in (one, other))
    first, second = pairs
    return (first == second).all(dim=1)


def compare_logits(found: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    """Returns the mean divergence KL(wanted || found) of the distributions at each position, in
    nats, and the share of positions with the same best token. Both are [num_tokens, vocab_size].
    """
    divergence, num_same = 0.0, 0
    for ours, theirs in zip(found, wanted, strict=True):
        one, other = torch.log_softmax(ours.double(), 0), torch.log_softmax(theirs.double(), 0)
        divergence += float(torch.nn.functional.kl_div(one, other, reduction="sum", log_target=True))
        num_same += int(int(ours.argmax()) == int(theirs.argmax()))
    return divergence / len(found), num_same / len(found)


def rms(values: Any) -> float:
    """Returns the root of the mean square, computed in float64."""
    return float(values.double().square().mean().sqrt())


def logits_difference(found: Any, wanted: Any) -> tuple[float, float, float]:
    """Returns how far logits [num_rows, vocab_size] are from `wanted`, over the deviation of these:
    the rms, the largest difference, and the rms that a quarter of the rows exceed. Where an expert
    is chosen otherwise, which is chance, a few rows are far off.
    """
    difference = (found - wanted) / wanted.std()
    by_row = difference.square().mean(-1).sqrt()
    return rms(difference), float(difference.abs().max()), float(by_row.quantile(0.75))
