"""What `diff` found between two runs, and how two tensors are compared: bit by bit, or by the rms
of their difference.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a tensor is from another one of rows [num_rows, size]: rms and largest difference
    over the deviation of the other. `first_row` is the first one that parts, None where none does.
    """

    rms: float
    largest: float
    first_row: int | None


@dataclass(slots=True)
class LayerDiff:
    """A decoder layer. `free` compares it as the models ran, `fed` where both have A's inputs and
    routing. `experts` are the routed ones with A's rows, None in a layer without; `rerouted` are
    the rows for which B's router chose other experts.
    """

    layer: int
    free: Difference
    fed: Difference
    expert_layer: int | None = None
    experts: Difference | None = None
    rerouted: int = 0
    # The first row of which ids or weights part.
    routing_row: int | None = None


@dataclass(frozen=True, slots=True)
class ExpertDiff:
    """An expert that was asked alone, or whose weights are other bytes."""

    expert: int
    rms: float
    largest: float
    has_other_bytes: bool = False


@dataclass(slots=True)
class DiffReport:
    """Everything that was compared. `not_bits` says why bits are not compared but `tolerance` is,
    and is empty where they are.
    """

    a: str
    b: str
    num_tokens: int
    not_bits: str
    tolerance: float
    embedding: Difference
    layers: list[LayerDiff]
    logits: Difference
    fed_logits: Difference
    # Of B's distributions from A's, in nats, and the share of positions with the same best token.
    kl: float = 0.0
    top1: float = 1.0
    # (index of the layer, shard) whose content checksums differ.
    contents: list[tuple[int, int]] = field(default_factory=list)
    # The experts of `asked_layer` that part, the worst one first.
    asked_layer: int | None = None
    experts: list[ExpertDiff] = field(default_factory=list)

    @property
    def parts(self) -> bool:
        """Whether the runs part anywhere."""
        differences = [self.embedding, self.logits, self.fed_logits]
        for layer in self.layers:
            differences += [layer.free, layer.fed] + ([layer.experts] if layer.experts is not None else [])
        has_rerouted = not self.not_bits and any(layer.routing_row is not None for layer in self.layers)
        return has_rerouted or bool(self.contents) or any(one.first_row is not None for one in differences)

    def fault(self) -> str:
        """Returns where the runs part first, as a sentence; an empty text where they do not."""
        if not self.parts:
            return ""
        if self.embedding.first_row is not None:
            return f"they part at the embedding, first at token {self.embedding.first_row}"
        for layer in self.layers:
            found = self._fault_of(layer)
            if found:
                return found
        if self.fed_logits.first_row is not None:
            return f"they part behind the last layer, in norm or head, first at token {self.fed_logits.first_row}"
        if self.contents:
            index, shard = self.contents[0]
            return f"weights of layer {index}, shard {shard} are other bytes{self._named(index)}, and no token shows it"
        parted = [layer for layer in self.layers if layer.free.first_row is not None]
        where = f"after layer {parted[0].layer}, first at token {parted[0].free.first_row}" if parted else "in the logits"
        return f"they part {where}, where differences of all layers have added up; no layer parts by itself"

    def _fault_of(self, layer: LayerDiff) -> str:
        if layer.experts is not None and layer.experts.first_row is not None and layer.expert_layer is not None:
            return (
                f"they part at layer {layer.layer} in the routed experts{self._named(layer.expert_layer)}, first at token "
                f"{layer.experts.first_row}, by rms {layer.experts.rms:.3g} of the experts' deviation"
            )
        if not self.not_bits and layer.routing_row is not None:
            return (
                f"they part at layer {layer.layer} in what its router is given or chooses, first at token {layer.routing_row}"
            )
        if layer.fed.first_row is not None:
            return (
                f"they part at layer {layer.layer} beside its routed experts, first at token {layer.fed.first_row}, by rms "
                f"{layer.fed.rms:.3g} of the stream's deviation"
            )
        return ""

    def _named(self, index: int) -> str:
        if index != self.asked_layer or not self.experts:
            return ""
        names = ", ".join(str(one.expert) for one in self.experts[:8])
        more = len(self.experts) - 8
        return f", expert{'s' * (len(self.experts) > 1)} {names}{f' and {more} more' if more > 0 else ''}"

    def to_json(self) -> dict[str, Any]:
        """Returns all fields, and the schema and case that result files have."""
        return {"schema": 1, "case": "diff", **asdict(self), "parts": self.parts, "fault": self.fault()}


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
