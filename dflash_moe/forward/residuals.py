"""Lets somebody see the residual stream of a forward pass after each decoder layer, whoever
computes the layers: our loop over host layers, or the model's own modules by their hooks. Where
nobody looks it costs a comparison per layer.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from dflash_moe.errors import UnsupportedError
from dflash_moe.model.architecture import find_experts
from dflash_moe.operators.step_context import running_step

# What layer 0 is given has this place in the stream.
EMBEDDING = -1
# A receipt has the first position, the last one, and so many seeded ones between them.
SEEDED_POSITIONS = 14
# More are kept while a request runs, because those behind a stop string go again.
_KEPT_POSITIONS = 32
# Beside its digest a row keeps its deviation and so many of its values, for comparisons by
# tolerance.
SAMPLED_VALUES = 8


class StreamReader(Protocol):
    """What is shown the residual stream of one sequence."""

    def begin(self, first: int) -> None:
        """Says that a step computes positions from `first` on. What was seen of these before is
        void, because a draft was rejected or a step failed.
        """
        ...

    def see(self, layer: int, positions: np.ndarray[Any, Any], hidden_states: torch.Tensor) -> None:
        """Shows rows [num_rows, hidden_size] in the model's dtype as they leave a layer, int64
        positions [num_rows] beside them. The rows are borrowed; what is written to them is what the
        next layer gets. Two threads may call at a time, for different rows.
        """
        ...


class Tapped(Protocol):
    """A forward pass that can be looked into (`forward/forward.py`)."""

    model: Any
    residuals: StreamReader | None


def _hook(reader: StreamReader, layers: Sequence[nn.Module]) -> list[Any]:
    """Has modules show their rows to a reader, and returns the handles that end it."""

    def before(_module: Any, arguments: Any, options: Any) -> None:
        hidden_states = arguments[0] if arguments else options["hidden_states"]
        reader.see(EMBEDDING, running_step().positions, _rows(hidden_states))

    def after(index: int) -> Any:
        def show(_module: Any, _arguments: Any, output: Any) -> None:
            hidden_states = output[0] if isinstance(output, tuple) else output
            reader.see(index, running_step().positions, _rows(hidden_states))

        return show

    handles = [layers[0].register_forward_pre_hook(before, with_kwargs=True)]
    return handles + [layer.register_forward_hook(after(index)) for index, layer in enumerate(layers)]


def _rows(hidden_states: Any) -> torch.Tensor:
    if not isinstance(hidden_states, torch.Tensor) or hidden_states.ndim != 3 or hidden_states.shape[0] != 1:
        shape = list(getattr(hidden_states, "shape", ()))
        raise UnsupportedError(f"a decoder layer's hidden states have shape {shape}; one stream [1, tokens, size] is supported")
    return hidden_states[0]


def decoder_layers(model: Any) -> tuple[nn.Module, ...]:
    """Returns the decoder layers of a model in order: the list of modules that has the experts.
    Raises UnsupportedError where there is none.
    """
    name = next(iter(find_experts(model)))
    parts = name.split(".")
    for place in range(1, len(parts)):
        found = model.get_submodule(".".join(parts[:place]))
        if isinstance(found, nn.ModuleList):
            return tuple(found)
    raise UnsupportedError(f"{type(model).__name__}: {name} is in no list of decoder layers, whose output could be looked at")


@contextmanager
def residuals_shown(forward: Tapped, reader: StreamReader) -> Iterator[None]:
    """Opens a block in which `reader` sees the residual stream of every step of `forward`, which
    has one sequence. No step may run when the block is opened or left.
    """
    handles = _hook(reader, decoder_layers(forward.model)) if getattr(forward, "loop", None) is None else []
    forward.residuals = reader
    try:
        yield
    finally:
        forward.residuals = None
        for handle in handles:
            handle.remove()


class ResidualDigests:
    """A reader that keeps the SHA-256 of rows, over their bytes in little-endian order, and a
    sample of their values.
    """

    def __init__(self, seed: int, positions: Iterable[int] | None = None) -> None:
        """Keeps `positions`, or as many as `chosen` may need where these are not known before."""
        self._seed = seed
        self._positions = None if positions is None else frozenset(positions)
        # By position and layer: the digest, and float32 deviation and values.
        self._rows: dict[int, dict[int, tuple[bytes, bytes]]] = {}

    def begin(self, first: int) -> None:
        """As `StreamReader.begin`."""
        if self._positions is not None:
            return
        before = [position for position in self._rows if position < first]
        kept = {0, *_lowest(self._seed, before, _KEPT_POSITIONS)}
        self._rows = {position: row for position, row in self._rows.items() if position in kept}

    def see(self, layer: int, positions: np.ndarray[Any, Any], hidden_states: torch.Tensor) -> None:
        """As `StreamReader.see`."""
        if layer == EMBEDDING:
            return
        wanted = [
            (place, position)
            for place, position in enumerate(positions.tolist())
            if self._positions is None or position in self._positions
        ]
        if not wanted:
            return
        rows = hidden_states.detach()[[place for place, _ in wanted]].cpu().contiguous()
        stored = rows.view(torch.uint8).numpy()
        sampled = sampled_values(rows)
        for (_, position), data, values in zip(wanted, stored, sampled, strict=True):
            self._rows.setdefault(position, {})[layer] = hashlib.sha256(data).digest(), values.tobytes()

    def chosen(self, num_positions: int) -> tuple[int, ...]:
        """Returns the positions of a receipt for a sequence of which so many were computed."""
        between = [position for position in self._rows if 0 < position < num_positions - 1]
        return tuple(sorted({0, num_positions - 1, *_lowest(self._seed, between, SEEDED_POSITIONS)}))

    def digests(self, position: int) -> tuple[str, ...]:
        """Returns the digests of a position in hexadecimal, by layer; none where it was not
        computed.
        """
        return tuple(digest.hex() for _, (digest, _) in sorted(self._rows.get(position, {}).items()))

    def values(self, position: int) -> np.ndarray[Any, Any]:
        """Returns float32 [num_layers, 1 + SAMPLED_VALUES] of a position: deviations and values."""
        data = b"".join(values for _, (_, values) in sorted(self._rows.get(position, {}).items()))
        return np.frombuffer(data, np.float32).reshape(-1, 1 + SAMPLED_VALUES)


def sampled_values(rows: torch.Tensor) -> np.ndarray[Any, Any]:
    """Returns float32 [num_rows, 1 + SAMPLED_VALUES] of rows [num_rows, hidden_size]: the standard
    deviation of each, and values at equal distances.
    """
    width = rows.shape[1]
    places = [place * width // SAMPLED_VALUES for place in range(SAMPLED_VALUES)]
    wide = rows.float()
    found: np.ndarray[Any, Any] = torch.cat([wide.std(dim=1, correction=0, keepdim=True), wide[:, places]], dim=1).numpy()
    return found


def _lowest(seed: int, positions: Iterable[int], count: int) -> list[int]:
    """Returns the positions but 0 that come first in an order that only the seed decides. A
    position that is among the first of some stays so in any part of them.
    """

    def rank(position: int) -> bytes:
        return hashlib.sha256(b"%d %d" % (seed, position)).digest()

    return sorted((position for position in positions if position), key=rank)[:count]
