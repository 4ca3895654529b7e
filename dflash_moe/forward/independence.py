"""Proves that what stays in torch computes each row by itself: the same tokens alone, cut, and
beside others must give equal bits in every layer.

The routed experts compute zeros meanwhile; their own promise is tested elsewhere.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch

from dflash_moe.forward.forward import PackedForward, StepRows
from dflash_moe.model.architecture import find_experts
from dflash_moe.operators.layers.blocks import HostLayer
from dflash_moe.operators.layers.reads import kernels_of

_SEED = 21
# The probed sequence has so many tokens, an odd number that no vector length divides, and is cut
# here: one token alone at the end, and two uneven parts.
_TOKENS = 37
_CUTS = ((_TOKENS,), (_TOKENS - 1, 1), (5, _TOKENS - 5))
# The numbers of tokens of the sequences before and behind it: batches of 2, 17 and 64 sequences, in
# which it is the first, in the middle and the last.
_Company = tuple[tuple[int, ...], tuple[int, ...]]
_COMPANY: tuple[_Company, ...] = (
    ((), (1,)),
    ((16, 3, 1, 1, 2, 40, 1, 1), (23, 1, 1, 5, 1, 1, 1, 2)),
    ((1,) * 63, ()),
)
# What is tried at the positions of each part of the notable ones.
_FAR_CUTS, _FAR_COMPANY = ((_TOKENS,), (5, _TOKENS - 5)), ((16, 1, 2), (40, 1))


def find_dependence(packed: PackedForward) -> str:
    """Returns the first module whose output for a row depended on the row's company or on how its
    sequence was cut, with class and dtype; an empty text where none did. Where a loop over host
    layers computes the model, one layer of each kind is run: no row's company reaches the others by
    other code.
    """
    loop = packed.loop
    if loop is None:
        return _dependence(packed, _CUTS, (((), ()), *_COMPANY))
    kinds: dict[Any, HostLayer] = {}
    for layer in loop.layers:
        kinds.setdefault(kernels_of(layer), layer)
    packed.loop = loop.over(list(kinds.values()))
    try:
        return _dependence(packed, _CUTS, (((), ()), *_COMPANY))
    finally:
        packed.loop = loop


def _dependence(packed: PackedForward, cuts: Sequence[tuple[int, ...]], company: Sequence[_Company]) -> str:
    """Looks for a dependence in these cuts and this company."""
    generator = torch.Generator().manual_seed(_SEED)
    vocab_size = packed.vocab_size

    def tokens(count: int) -> list[int]:
        ids: list[int] = torch.randint(0, vocab_size, (count,), generator=generator).tolist()
        return ids

    room = packed.blocks.num_free
    if room < _blocks(packed, _TOKENS) or 0 < packed.max_positions < _TOKENS:
        return f"no {_TOKENS} tokens fit the KV cache or the model's positions, so that nothing was proven"
    probe = tokens(_TOKENS)
    alone = _outputs(packed, [probe])
    for cut, (before, behind) in product(cuts, company):
        parts = [probe[sum(cut[:place]) : sum(cut[: place + 1])] for place in range(len(cut))]
        others = [tokens(count) for count in _that_fit(packed, (*before, *behind))]
        found = _outputs(packed, parts, others[: len(before)], others[len(before) :])
        different = _compare(packed, alone, found)
        if different:
            return f"{different} {'cut at ' + str(cut[0]) if len(cut) > 1 else 'whole'}, beside {len(others)} other sequences"
    return ""


def find_far_dependence(packed: PackedForward) -> str:
    """As `find_dependence`, with rows at all notable positions: for a model that reads positions
    otherwise than by cosines and sines.
    """
    others = [count for companions in _FAR_COMPANY for count in companions]
    size = max(_TOKENS, *others)
    for begin in range(0, len(packed.notable_positions), _TOKENS):
        positions = packed.notable_positions[begin:][:size]
        # A sequence may be longer than there are positions left.
        positions += [packed.notable_positions[-1]] * (size - len(positions))
        with packed.standing_at(positions):
            different = _dependence(packed, _FAR_CUTS, (_FAR_COMPANY,))
        if different:
            return f"{different}, at positions {positions[0]} to {positions[-1]}"
    return ""


def _blocks(packed: PackedForward, num_tokens: int) -> int:
    return -(-num_tokens // packed.blocks.block_tokens)


def _that_fit(packed: PackedForward, counts: Sequence[int]) -> list[int]:
    """Returns the first of `counts` tokens that the pages hold beside the probed sequence."""
    room, found = packed.blocks.num_free - _blocks(packed, _TOKENS), []
    for count in counts:
        room -= _blocks(packed, count)
        if room < 0 or 0 < packed.max_positions < count:
            break
        found.append(count)
    return found


def _outputs(
    packed: PackedForward, parts: Sequence[list[int]], before: Sequence[list[int]] = (), behind: Sequence[list[int]] = ()
) -> dict[str, torch.Tensor]:
    """Returns what every module with rows gave for the probed sequence, by module name, and the
    logits of its last row. It has the company of the others in the step of its last part.
    """
    probed = packed.admit(_TOKENS)
    first, last = [packed.admit(len(tokens)) for tokens in before], [packed.admit(len(tokens)) for tokens in behind]
    kept: dict[str, list[torch.Tensor]] = {}
    try:
        for place, part in enumerate(parts):
            is_last, begin = place == len(parts) - 1, 0
            rows = [StepRows(probed, part, num_logits=int(is_last))]
            if is_last:
                begin = sum(len(tokens) for tokens in before)
                companions = [
                    [StepRows(sequence, tokens) for sequence, tokens in zip(sequences, given, strict=True)]
                    for sequences, given in ((first, before), (last, behind))
                ]
                rows = [*companions[0], *rows, *companions[1]]
            num_rows = sum(len(entry.token_ids) for entry in rows)
            with _recorded(packed, kept, begin, len(part), num_rows):
                logits = packed.forward(rows)
        kept["logits"] = [logits[len(before)][None].clone()]
    finally:
        for sequence in (*first, probed, *last):
            sequence.release()
    return {name: torch.cat(values) for name, values in kept.items()}


@contextmanager
def _recorded(
    packed: PackedForward, kept: dict[str, list[torch.Tensor]], begin: int, count: int, num_rows: int
) -> Iterator[None]:
    """Keeps the rows begin..begin + count - 1 of every module's outputs, and of what the routed
    experts are given: tensors [1, num_rows, ...] or [num_rows, ...]. Of a loop over host layers it
    keeps them between the layers.
    """
    if packed.loop is not None:
        packed.residuals = _BetweenLayers(kept, begin, count)
        try:
            yield
        finally:
            packed.residuals = None
        return
    model, calls = packed.model, Counter[str]()

    def keep(name: str, values: Any) -> None:
        # A module may be called several times in one forward; equal calls of two parts belong
        # together.
        calls[name] += 1
        for place, value in enumerate(values if isinstance(values, tuple) else (values,)):
            if not isinstance(value, torch.Tensor) or value.ndim < 2:
                continue
            if value.ndim >= 3 and value.shape[:2] == (1, num_rows):
                value = value[0]
            if value.shape[0] == num_rows:
                rows = value[begin : begin + count].reshape(count, -1).clone()
                key = f"{name}[{place}]" if isinstance(values, tuple) else name
                kept.setdefault(key if calls[name] == 1 else f"{key} (call {calls[name]})", []).append(rows)

    def output_hook(name: str) -> Any:
        return lambda _module, _inputs, output: keep(name, output)

    def input_hook(name: str) -> Any:
        return lambda _module, arguments, named: keep(f"{name} (inputs)", (*arguments, *named.values()))

    handles = [module.register_forward_hook(output_hook(name)) for name, module in model.named_modules() if name]
    handles += [
        module.register_forward_pre_hook(input_hook(name), with_kwargs=True) for name, module in find_experts(model).items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _BetweenLayers:
    """A `StreamReader` that keeps the rows begin..begin + count - 1 of a step."""

    def __init__(self, kept: dict[str, list[torch.Tensor]], begin: int, count: int) -> None:
        self._kept, self._rows = kept, slice(begin, begin + count)

    def begin(self, first: int) -> None:
        """Says where a step begins, which does not matter."""

    def see(self, layer: int, _positions: Any, hidden_states: torch.Tensor) -> None:
        """Keeps rows as they leave a layer."""
        self._kept.setdefault(f"layers.{layer}", []).append(hidden_states[self._rows].clone())


def _compare(packed: PackedForward, alone: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> str:
    modules = dict(packed.model.named_modules())
    for name, expected in alone.items():
        found = other.get(name)
        if found is not None and found.shape == expected.shape and not _has_same_bits(found, expected):
            plain = name.partition("[")[0].partition(" ")[0]
            kind = type(modules[plain]).__name__ if plain in modules else "output"
            return f"{name} ({kind}, {expected.dtype}): other bits"
    return ""


def _has_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)))
