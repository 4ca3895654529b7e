"""The proof that a layer's own code and the form that was found for it are one function beyond what
a few rows at the first positions show: at every position where code may begin to compute something
else, and for values that no random row reaches.

Both run in float64 and over the same modules, so that their difference is no rounding. Attention
gives a mean of earlier values meanwhile, which hides no difference as a saturated softmax would;
the scores that it was asked for are compared.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dflash_moe.errors import DflashError
from dflash_moe.operators.attention_interface import AttentionTerms, on_interface, set_implementation
from dflash_moe.operators.attention_probe import AttentionCall
from dflash_moe.operators.layers.blocks import HostLayer
from dflash_moe.operators.layers.exact_layer import ExactLayer
from dflash_moe.operators.layers.probe_experts import ProbeExperts, Routing, are_alike
from dflash_moe.operators.looks import LookingCache, watched
from dflash_moe.operators.norms import ExactNorm, HostNorm
from dflash_moe.operators.probes import FACTOR, probe_rows

_IMPLEMENTATION = "dflash_moe_scores"
# This attribute of an attention module keeps what attention was asked for.
_ASKED = "dflash_moe_asked"
# Both sides agree to this part of a row's largest value. Code that computes parts in float32 stays
# below it.
_AGREEMENT = 1e-5
# Some probe rows point along a row of a weight matrix, so that its product is as large as it gets.
# This is the root of their mean square; for what comes behind attention it is larger, because
# attention's output is added to them and must not turn them away.
_ALONG, _ALONG_BEHIND = 8.0, 64.0
# At least so many rows must be routed alike for the others to count as near ties.
LEAST_ROUTED_ALIKE = 0.75


@dataclass(frozen=True, slots=True)
class ProbeStep:
    """Rows of one sequence at some positions: the keyword arguments with which the model calls a
    layer, its cosines and sines in float32, [num_rows, width], and in float64 what the model passes
    to a layer of them.
    """

    arguments: dict[str, Any]
    cos: torch.Tensor
    sin: torch.Tensor
    exact_embeddings: Any

    def exact_arguments(self, looks: set[str]) -> dict[str, Any]:
        """Returns the arguments for a copy of a layer in float64, without a mask. What its code
        reads of positions and lengths is added to `looks`.
        """
        given = dict(self.arguments)
        if given["position_embeddings"] is not None:
            given["position_embeddings"] = self.exact_embeddings
        if given["position_ids"] is not None:
            given["position_ids"] = watched(given["position_ids"], lambda: looks.add("position_ids"))
        given["past_key_values"] = LookingCache(0, looks.add)
        return given


@dataclass(frozen=True, slots=True)
class ExactCopy:
    """A copy of a layer in float64, and the modules that stand for host operators in it by the id
    of each. `attention` is its attention module, and `experts` stand in for routed ones.
    """

    layer: nn.Module
    exact: Mapping[int, nn.Module]
    attention: nn.Module
    experts: ProbeExperts | None

    @property
    def expand(self) -> nn.Module | None:
        """The layer of torch that expands latents, where attention has some."""
        found = getattr(self.attention, "kv_b_proj", None)
        return found if isinstance(found, nn.Module) else None

    @property
    def linears(self) -> list[nn.Linear]:
        """The layers of torch for what is packed."""
        return [module for module in (*self.exact.values(), self.expand) if isinstance(module, nn.Linear)]

    @property
    def routing(self) -> Routing | None:
        """The routing of the last call of the experts."""
        return None if self.experts is None else self.experts.seen

    @contextmanager
    def enlarged(self) -> Iterator[None]:
        """Opens a block in which linear layers, norms and experts give `FACTOR` times as much."""
        modules = [*self.linears, *([] if self.experts is None else [self.experts])]
        modules += [module for module in self.exact.values() if isinstance(module, ExactNorm)]
        hooks = [module.register_forward_hook(lambda _module, _inputs, out: out * FACTOR) for module in modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@dataclass(frozen=True, slots=True)
class _Asked:
    """What attention was asked for: its scores [num_heads, num_rows, num_rows], and how large those
    of a query may be, [num_heads, num_rows, 1]; the window among the arguments, soft cap and sinks.
    """

    scores: torch.Tensor
    most: torch.Tensor
    form: tuple[int, float, Any]

    @classmethod
    def of(cls, query: torch.Tensor, key: torch.Tensor, scale: float, form: tuple[int, float, Any]) -> _Asked:
        """`query` and `key` are [num_heads, num_rows, size], of keys perhaps fewer heads."""
        key = key.repeat_interleave(query.shape[0] // key.shape[0], dim=0)
        lengths = query.norm(dim=-1, keepdim=True) * key.norm(dim=-1).amax(dim=-1)[:, None, None]
        return cls(scale * query @ key.transpose(1, 2), abs(scale) * lengths, form)

    def is_off(self, other: _Asked) -> torch.Tensor:
        """Says of each row whether `other` asks for something else, [num_rows]."""
        (window, softcap, sinks), (their_window, their_softcap, theirs) = self.form, other.form
        has_other_form = (window, softcap, sinks is None) != (their_window, their_softcap, theirs is None)
        if has_other_form or (sinks is not None and not torch.equal(sinks.double(), theirs.double())):
            return torch.ones(self.scores.shape[1], dtype=torch.bool)
        return ~((self.scores - other.scores).abs() <= _AGREEMENT * self.most).all(-1).all(0)


class LayerProof:
    """Compares a layer's own code with the form that was found for it."""

    def __init__(self, copied: ExactCopy, found: HostLayer, call: AttentionCall) -> None:
        self._copied, self._call = copied, call
        self._twin = ExactLayer(found, copied.exact, copied.expand, copied.experts)
        usual = probe_rows(found.hidden_size, torch.float64, scales=(1.0, 8.0))
        along = [rows_along(copied.linears, found.attention.norm, _ALONG)]
        along.append(rows_along(copied.linears, found.feed_forward_norm, _ALONG_BEHIND))
        self._rows = torch.cat([usual, *along])

    @property
    def num_rows(self) -> int:
        """The number of different rows."""
        return len(self._rows)

    def at(self, positions: Sequence[int], step: ProbeStep) -> str:
        """Returns how the layer's code differs from the form on rows at these positions, which are
        those of `step`; an empty text where it does not.
        """
        try:
            found = self._places_off(len(positions), step)
        except (RuntimeError, TypeError, ValueError, IndexError, DflashError) as error:
            return f"its own code does not run at positions {positions[0]} to {positions[-1]}: {error}"
        return f"its own code computes something else at position {positions[found[0]]}" if found else ""

    def beyond_limits(self, step: ProbeStep) -> str:
        """As `at`, with linear layers, norms and experts that give `FACTOR` times as much. `step`
        has `num_rows` rows.
        """
        try:
            with self._copied.enlarged():
                found = self._places_off(self.num_rows, step)
        except (RuntimeError, TypeError, ValueError, IndexError, DflashError) as error:
            return f"its own code does not run where linear layers give {FACTOR:g} times as much: {error}"
        if not found:
            return ""
        return f"its own code computes something else, such as a limit, where linear layers give {FACTOR:g} times as much"

    def _places_off(self, num_rows: int, step: ProbeStep) -> list[int]:
        """Returns the places of rows that differ."""
        rows = self._rows.repeat(-(-num_rows // len(self._rows)), 1)[:num_rows]
        own, own_asked = self._own(rows, step)
        own_routing = self._copied.routing
        asked: list[_Asked] = []
        out = self._twin(rows, step.cos.double(), step.sin.double(), lambda *given: self._attend(asked, *given))
        is_off = ~((out - own).abs() <= _AGREEMENT * own.abs().amax(-1, keepdim=True)).all(-1)
        if own_routing is not None and self._copied.routing is not None:
            is_alike = are_alike(self._copied.routing, own_routing)
            if is_alike.double().mean() >= LEAST_ROUTED_ALIKE:
                is_off &= is_alike
        places: list[int] = (is_off | own_asked.is_off(asked[0])).nonzero().flatten().tolist()
        return places

    def _own(self, rows: torch.Tensor, step: ProbeStep) -> tuple[torch.Tensor, _Asked]:
        """Runs the layer's own code."""
        asked: list[_Asked] = []
        self._copied.attention.__dict__[_ASKED] = asked
        set_implementation(self._copied.layer, _IMPLEMENTATION)
        out = self._copied.layer(rows[None], **step.exact_arguments(set()))
        if len(asked) != 1:
            raise ValueError(f"it attends {len(asked)} times")
        return (out[0] if isinstance(out, tuple) else out)[0], asked[0]

    def _attend(
        self, asked: list[_Asked], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        call = self._call
        asked.append(_Asked.of(query, key, scale, (call.told_window, call.softcap, call.sinks)))
        return _means(value, query.shape[0])


def rows_along(linears: Sequence[nn.Linear], norm: HostNorm, length: float) -> torch.Tensor:
    """Returns rows [num_rows, hidden_size] in float64 of this root mean square, which those of
    `linears` that read the norm's width see along the longest row of their weights behind it, and
    the opposites.
    """
    scale = norm.scale.double() + (1.0 if norm.form.adds_one else 0.0)
    least = 1e-3 * scale.abs().max().clamp_min(1e-30)
    scale = torch.where(scale.abs() < least, least, scale)
    longest = [
        linear.weight[int(linear.weight.square().sum(-1).argmax())] for linear in linears if linear.in_features == len(scale)
    ]
    if not longest:
        return scale.new_empty((0, len(scale)))
    rows = torch.stack(longest).double() / scale
    rows *= length / rows.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
    return torch.cat((rows, -rows))


def _means(value: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Returns the mean of the values [num_heads, num_rows, size] of each row and those before."""
    value = value.repeat_interleave(num_heads // value.shape[0], dim=0)
    return value.cumsum(dim=1) / torch.arange(1, value.shape[1] + 1, dtype=value.dtype)[:, None]


def _note(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: AttentionTerms
) -> torch.Tensor:
    """Stands in for attention: notes what it is asked for and gives means of values."""
    form = (terms.window, terms.softcap, terms.sinks)
    module.__dict__[_ASKED].append(_Asked.of(query[0], key[0], terms.scale, form))
    return _means(value[0], query.shape[1]).transpose(0, 1)[None]


on_interface(_IMPLEMENTATION, _note)
