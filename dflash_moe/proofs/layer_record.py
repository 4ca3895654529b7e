"""Records what a forward pass computes layer by layer, and feeds one model what another one had in
the same places, so that each layer can be compared by itself.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from dflash_moe.forward.residuals import EMBEDDING, residuals_shown
from dflash_moe.integrations.transformers import routes_replaced
from dflash_moe.proofs.one_pass import sequence_logits

if TYPE_CHECKING:
    import numpy as np

    from dflash_moe.forward.forward import Forward
    from dflash_moe.integrations.expert_route import ExpertRoute


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of routed experts: rows [num_tokens, in_size], ids and weights [num_tokens, top_k],
    what came of it, and the decoder layer that made it.
    """

    decoder_layer: int
    rows: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    out: torch.Tensor


@dataclass(slots=True)
class Recorded:
    """A forward pass. `stream` has the hidden states [num_tokens, hidden_size] that leave each
    decoder layer, and under EMBEDDING those that enter the first; `calls` are by the layer's index
    in the layer table. All tensors are on the processor and belong to this object.
    """

    stream: dict[int, torch.Tensor] = field(default_factory=dict)
    calls: dict[int, RecordedCall] = field(default_factory=dict)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def num_layers(self) -> int:
        """The number of decoder layers."""
        return len(self.stream) - 1


def record(forward: Forward, token_ids: Sequence[int], fed: Recorded | None = None) -> Recorded:
    """Computes the tokens as one sequence and records them. With `fed` every layer gets the hidden
    states that entered it there, and the experts are called as they were there: what is recorded
    of a layer depends on that layer alone. The routing that is recorded is the model's own.

    Errors are those of `sequence_logits`.
    """
    found = Recorded()
    reader = _Reader(found, fed)
    with residuals_shown(forward, reader), routes_replaced(forward.model, lambda route: _Route(route, reader)):
        found.logits = sequence_logits(forward, token_ids)
    return found


class _Reader:
    """A `StreamReader` that keeps the stream, and replaces it by what is fed."""

    def __init__(self, found: Recorded, fed: Recorded | None) -> None:
        self.found, self.fed = found, fed
        self.latest = EMBEDDING

    def begin(self, first: int) -> None:
        """As `StreamReader.begin`; there is one step."""

    def see(self, layer: int, positions: np.ndarray[Any, Any], hidden_states: torch.Tensor) -> None:
        """As `StreamReader.see`."""
        del positions
        self.latest = layer
        self.found.stream[layer] = _kept(hidden_states)
        if self.fed is not None:
            hidden_states.copy_(self.fed.stream[layer])


class _Route:
    """Stands in for an `ExpertRoute`, and calls it."""

    def __init__(self, route: ExpertRoute, reader: _Reader) -> None:
        self._route, self._reader = route, reader

    def call(self, hidden_states: Any, topk_ids: Any, topk_weights: Any) -> Any:
        """Returns what the experts make of the model's rows, by the routing that is fed."""
        found, fed = self._reader.found, self._reader.fed
        if fed is None:
            out = self._route.call(hidden_states, topk_ids, topk_weights)
            self._keep(found, hidden_states, topk_ids, topk_weights, out)
            return out
        given = fed.calls[self._route.layer]
        rows = given.rows.to(hidden_states.device, hidden_states.dtype)
        ids, weights = given.topk_ids.to(topk_ids), given.topk_weights.to(topk_weights)
        out = self._route.call(rows, ids, weights)
        self._keep(found, rows, topk_ids, topk_weights, out)
        return out if torch.equal(rows, hidden_states) else self._route.call(hidden_states, ids, weights)

    def _keep(self, found: Recorded, *tensors: Any) -> None:
        found.calls[self._route.layer] = RecordedCall(self._reader.latest + 1, *(_kept(tensor) for tensor in tensors))


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
