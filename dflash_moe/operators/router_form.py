"""The form of a router: how logits become ids and weights of chosen experts, in float64, and which
rows leave no doubt about the choice.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

# What scores in float32 are off by beside their logits' errors, as a part of the largest.
_ROUNDING = 1e-6
# What modules add to a sum of sigmoids before they divide by it.
_SUM_EPSILON = 1e-20


@dataclass(frozen=True, slots=True)
class RouterForm:
    """How logits become the ids and weights of the chosen experts (csrc/compute/operators/router.h
    has the formula). `has_bias` says that a correction bias is added for the choice only, and a
    `mixer_threshold` that weights are those of a sparse mixer.
    """

    num_experts: int
    top_k: int
    score: str
    normalizes: bool
    has_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    group_score: str = "top_two_sum"
    scale: float = 1.0
    mixer_threshold: float = 0.0

    @property
    def weight(self) -> str:
        """What the weights are before they are normalised and scaled, in the core's words."""
        return "sparse_mixer" if self.mixer_threshold else "score"

    @property
    def function(self) -> tuple[Any, ...]:
        """What forms that are one function have in common. A single chosen expert's weight,
        normalised, is 1 whatever its score, and all scores rise with the logit. (Only its own form
        fits a module with a sigmoid, which rounds to 1 for several experts at once.)
        """
        is_any_score = self.top_k == 1 and self.normalizes and not self.has_bias and self.num_groups == 1
        return astuple(replace(self, score="any") if is_any_score else self)

    @property
    def sum_epsilon(self) -> float:
        """What is added to the sum that weights are divided by."""
        return _SUM_EPSILON if self.score == "sigmoid" and self.normalizes else 0.0

    def __str__(self) -> str:
        score = f"sparse mixer within {self.mixer_threshold:g}" if self.mixer_threshold else self.score
        parts = [score, *(["bias"] if self.has_bias else [])]
        if self.num_groups > 1:
            parts.append(f"{self.topk_groups} of {self.num_groups} groups by {self.group_score}")
        parts += [f"top {self.top_k}", *(["normalised"] if self.normalizes else [])]
        return ", ".join([*parts, *([f"x {self.scale:g}"] if self.scale != 1.0 else [])])

    def choose(self, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns ids and weights [num_rows, top_k] for logits in float64, and by how much the
        values that chose would have to change for another choice, [num_rows, 1].
        """
        scores = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid, "identity": lambda x: x}[self.score](logits)
        choice = scores if bias is None else scores + bias
        margin = torch.full_like(choice[:, :1], torch.inf)
        if self.num_groups > 1:
            grouped = choice.unflatten(-1, (self.num_groups, -1))
            worth = grouped.topk(2, dim=-1).values.sum(-1) if self.group_score == "top_two_sum" else grouped.amax(-1)
            margin = _margin(worth, self.topk_groups)
            is_in = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, worth.topk(self.topk_groups, dim=-1).indices, True)
            choice = grouped.masked_fill(~is_in.unsqueeze(-1), -torch.inf).flatten(-2)
        ids = choice.topk(self.top_k, dim=-1).indices
        margin = torch.minimum(margin, _margin(choice, self.top_k))
        if self.mixer_threshold:
            weights, near = self._mix(logits, ids)
            return ids, weights, torch.minimum(margin, near)
        weights = scores.gather(-1, ids)
        if self.normalizes:
            weights = weights / (weights.sum(-1, keepdim=True) + self.sum_epsilon)
        return ids, weights * self.scale, margin

    def is_clear(self, logits: torch.Tensor, bias: torch.Tensor | None, error: torch.Tensor) -> torch.Tensor:
        """Says of each row [num_rows, 1] whether errors of up to `error` [num_rows, 1] in its
        logits leave the choice as it is.
        """
        # By how much a score changes for each unit of its logit, and by how much float32 rounds.
        slope = torch.ones_like(error)
        if self.score == "sigmoid":
            slope = slope / 4
        if self.score == "softmax":
            slope = (logits.softmax(-1).amax(-1, keepdim=True) * torch.exp(2 * error)).clamp(max=1.0)
        largest = slope if bias is None else slope.clamp_min(float(bias.abs().max()))
        # Two scores are compared, or where groups are chosen two sums of two.
        return self.choose(logits, bias)[2] > 4 * error * slope + _ROUNDING * largest

    def _mix(self, logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the weights of a sparse mixer, and by how much logits would have to change for
        other experts to be mixed in, or for another order of the chosen.
        """
        left, weights = logits.clone(), []
        margin = torch.full_like(logits[:, :1], torch.inf)
        for turn in range(self.top_k):
            chosen = ids[:, turn : turn + 1]
            top = logits.gather(-1, chosen)
            size = torch.maximum(logits.abs(), top)
            distance = (top - logits) / size
            weights.append(left.masked_fill(distance > self.mixer_threshold, -torch.inf).softmax(-1).gather(-1, chosen))
            margin = torch.minimum(margin, ((distance - self.mixer_threshold).abs() * size).amin(-1, keepdim=True))
            margin = torch.minimum(margin, _margin(logits, turn + 1))
            left = left.scatter(-1, chosen, -torch.inf)
        return torch.cat(weights, dim=-1), margin


def _margin(values: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the distance from the `count` largest values of each row to the next one."""
    if count >= values.shape[-1]:
        return torch.full_like(values[:, :1], torch.inf)
    ordered = values.sort(dim=-1, descending=True).values
    return (ordered[:, count - 1 : count] - ordered[:, count : count + 1]).nan_to_num(nan=0.0)
