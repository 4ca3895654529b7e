"""Steps in two micro-batches on two threads: while the experts of one half are under way, the host
computes the other half. The bits are those of one batch, because a row's are its own.

It is done where a forecast says that it pays. What is forecast, measured and chosen is logged to
`dflash_moe.auto`, which --explain-auto shows.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch

from dflash_moe.errors import ConfigError, shown
from dflash_moe.experts.auto import log
from dflash_moe.forward.halves.half_steps import Cut, choose_cut, half_of
from dflash_moe.forward.halves.split_forecast import (
    LEAST_ROWS,
    PREDICTED,
    TRIED,
    SizeKey,
    SplitChoice,
    SplitForecast,
    StepTimes,
    size_key,
)
from dflash_moe.forward.halves.two_halves import Half, TwoHalves
from dflash_moe.operators.step_context import StepContext

ASKED = ("auto", "1", "2")
# What is asked, and the rows of the smallest step that is cut.
_LEAST = {"auto": LEAST_ROWS, "1": math.inf, "2": 2}


class Rows(Protocol):
    """The forward pass of a model over packed rows (`PackedForward`)."""

    def run_rows(self, token_ids: torch.Tensor, step: StepContext, wanted: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the rows `wanted` of a step, or of a half of one."""
        ...


class Waits(Protocol):
    """What two micro-batches ask of a runtime (`ExpertRuntime`)."""

    @property
    def call_limit_s(self) -> float:
        """The seconds after which every call has ended."""
        ...

    @property
    def has_remote_experts(self) -> bool:
        """Whether some experts are computed by others than the thread that waits for them."""
        ...

    def set_spinning(self, is_allowed: bool) -> None:
        """Says whether a thread that waits for replies may spin."""
        ...


@dataclass(slots=True)
class _Counted:
    """The steps since start, and the seconds of those in two halves (`HalvesDone`)."""

    steps: int = 0
    split_steps: int = 0
    awaited_s: float = 0.0
    hidden_s: float = 0.0
    choices: dict[SizeKey, bool] = field(default_factory=dict)


class MicroBatches:
    """Computes the steps of one model, in one batch or in two. The engine's thread calls it;
    `close` ends the second thread, as does dropping the object.
    """

    def __init__(self, asked: str, runtime: Waits, num_layers: int) -> None:
        """`asked` is auto, 1 or 2, and so many layers of the model have routed experts. With 2,
        every step of more than one row that can be cut is.

        Raises ConfigError for another word.
        """
        if asked not in ASKED:
            raise ConfigError(f"engine.micro_batches is {shown(asked)}; allowed: {', '.join(ASKED)}")
        self.asked = asked
        self._runtime, self._has_remote_experts = runtime, runtime.has_remote_experts
        self._halves = TwoHalves(lambda: runtime.call_limit_s)
        self._forecast = SplitForecast(num_layers)
        self._counted = _Counted()

    def run(self, packed: Rows, token_ids: torch.Tensor, step: StepContext, wanted: torch.Tensor) -> torch.Tensor:
        """Does what `run_rows` does for a whole step. Where a half fails, the other one
        has ended before its error is raised; errors are those of `run_rows`, and EngineError where
        a half does not end within the limit of calls.
        """
        self._counted.steps += 1
        if self.asked == "auto" and not self._has_remote_experts:
            # Nothing is awaited that could be hidden, so that nothing is worth learning either.
            return packed.run_rows(token_ids, step, wanted)
        cut, context = self._cut(step)
        begun = perf_counter()
        if cut is None:
            logits = packed.run_rows(token_ids, step, wanted)
            times = StepTimes(step.num_rows, perf_counter() - begun, step.clock.awaited_s, step.clock.remote_s)
            if step.num_rows > 0:
                self._forecast.learn_whole(times, context)
            return logits
        logits = self._run_halves(packed, token_ids, step, wanted, cut)
        self._forecast.learn_split(step.num_rows, context, perf_counter() - begun)
        return logits

    def takes_whole(self, num_rows: int) -> bool:
        """Says whether a step of so many rows is computed in one batch, whatever is forecast."""
        return num_rows < _LEAST[self.asked] or (self.asked == "auto" and not self._has_remote_experts)

    def count_whole(self, times: StepTimes, context: float) -> None:
        """Books a step that somebody else has computed in one batch, whose rows have on average
        `context` tokens before them.
        """
        self._counted.steps += 1
        if self.asked != "auto" or self._has_remote_experts:
            self._forecast.learn_whole(times, context)

    def stats(self) -> dict[str, Any]:
        """Returns `asked`, the number of `steps` and of `split_steps`, the seconds `awaited_s` in
        which a half awaited its experts and `hidden_s` of them in which the other half computed,
        and `overlap_share`, which is their share, None before there is any.
        """
        counted = self._counted
        return {
            "asked": self.asked,
            "steps": counted.steps,
            "split_steps": counted.split_steps,
            "awaited_s": counted.awaited_s,
            "hidden_s": counted.hidden_s,
            "overlap_share": counted.hidden_s / counted.awaited_s if counted.awaited_s > 0 else None,
        }

    def close(self) -> None:
        """Ends the second thread, for which it waits as long as for a call."""
        self._halves.close()

    def _cut(self, step: StepContext) -> tuple[Cut | None, float]:
        """Returns where to cut a step, None where it is computed in one batch, and the average
        number of tokens before its rows.
        """
        context = float(step.positions.mean()) if step.num_rows else 0.0
        if step.num_rows < _LEAST[self.asked]:
            return None, context
        cut = choose_cut(step)
        if cut is None or self.asked == "2":
            return cut, context
        choice = self._forecast.choose(step.num_rows, context, cut.row)
        self._report(size_key(step.num_rows, context), step.num_rows, choice)
        return (cut if choice.is_split else None), context

    def _report(self, key: SizeKey, num_rows: int, choice: SplitChoice) -> None:
        """Logs a choice for steps of a size that is another than before. A single step that only
        measures the other choice is none.
        """
        is_known = choice.whole_s is not None and choice.split_s is not None and choice.reason != TRIED
        if not is_known or self._counted.choices.get(key) == choice.is_split:
            return
        self._counted.choices[key] = choice.is_split
        taken = "two micro-batches" if choice.is_split else "one batch"
        log.info(
            "auto, steps of about %d rows: %s; two %s %.4g ms, one %.4g ms; %.0f%% of waiting was hidden so far",
            num_rows, taken, "are predicted to take" if choice.reason == PREDICTED else "took", 1e3 * (choice.split_s or 0.0),
            1e3 * (choice.whole_s or 0.0), 100 * (self.stats()["overlap_share"] or 0.0),
        )  # fmt: skip

    def _run_halves(
        self, packed: Rows, token_ids: torch.Tensor, step: StepContext, wanted: torch.Tensor, cut: Cut
    ) -> torch.Tensor:
        def half(number: int, begin: int, end: int) -> Half:
            mine = wanted[(wanted >= begin) & (wanted < end)] - begin
            return lambda turns: packed.run_rows(token_ids[begin:end], half_of(step, cut, number, turns), mine)

        self._runtime.set_spinning(False)
        try:
            done = self._halves.run(half(0, 0, cut.row), half(1, cut.row, step.num_rows))
        finally:
            self._runtime.set_spinning(True)
        self._counted.split_steps += 1
        self._counted.awaited_s += done.awaited_s
        self._counted.hidden_s += done.hidden_s
        return torch.cat((done.first, done.second))
