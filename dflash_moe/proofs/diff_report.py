"""What `diff` found between two runs.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dflash_moe.proofs.two_passes import Difference


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
