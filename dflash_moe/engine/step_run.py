"""Computes one planned step: the forward pass, the sampling where the logits are, and the judgement
which drafts were right. Nothing of a request is changed here but what the forward pass stored.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from dflash_moe.engine.request import Request
from dflash_moe.engine.sampling.sample import Chosen, Sampled, Sampler, SampleRow
from dflash_moe.engine.sampling.token_logprobs import TokenLogprobs
from dflash_moe.engine.sampling.token_masks import MaskThread
from dflash_moe.engine.schedule import PlannedRows, StepPlan
from dflash_moe.errors import DflashError
from dflash_moe.forward.forward import Forward, RunStep, StepRows
from dflash_moe.forward.layer_loop import Draw


@dataclass(frozen=True, slots=True)
class Outcome:
    """The tokens that a request got in a step, or why it got none."""

    request: Request
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    num_drafts: int = 0
    num_accepted: int = 0
    error: DflashError | None = None


@dataclass(frozen=True, slots=True)
class _Pick:
    """Row `place` of the logits is sampled for a request, behind `before` drafts of this step."""

    rows: PlannedRows
    request: Request
    place: int
    before: tuple[int, ...]
    # Why it has no token, whatever is sampled.
    refused: list[DflashError] = field(default_factory=list)


class StepRun:
    """A step that has begun: `run`, then `sample`, each once."""

    def __init__(self, plan: StepPlan, step: RunStep, sampler: Sampler, masks: MaskThread, began: float) -> None:
        self.plan = plan
        self._step, self._sampler, self._masks = step, sampler, masks
        # Each row that is sampled, and what came of computing them: tokens, or logits.
        self._picks = _picks(plan)
        self._chosen: Chosen | None = None
        self._logits: torch.Tensor | None = None
        # What was sampled, and the plan of the next step, where one was made meanwhile.
        self.outcomes: list[Outcome] = []
        self.following: StepPlan | None = None
        # The seconds of its parts. The forward pass is the model's, experts included.
        self._began, self.forward_s, self.sample_s = began, 0.0, 0.0

    @property
    def times(self) -> tuple[float, float, float]:
        """When it had begun, was computed and was sampled, in seconds of time.perf_counter."""
        computed = self._began + self.forward_s
        return self._began, computed, computed + self.sample_s

    def run(self) -> None:
        """Computes the rows of the plan, and their tokens too where one call of the core does
        both.
        """
        draws = _draws(self._picks)
        chosen = None if draws is None else self._step.choose(draws)
        if chosen is None:
            self._logits = self._step.run()
        else:
            self._chosen = Chosen(chosen)
        self.forward_s = time.perf_counter() - self._began

    def sample(self, plan_ahead: Callable[[StepPlan], StepPlan | None]) -> None:
        """Samples, and judges drafts. `plan_ahead` is called once all work is with the device,
        before token ids are read back.
        """
        picks, sampled = self._launch()
        following = plan_ahead(self.plan)
        if sampled is not None:
            self.outcomes = _judge(picks, sampled)
        kept = _kept(self.plan, self.outcomes)
        self._step.keep(kept)
        # Planned for sequences that have all tokens of this step, drafts aside.
        if all(count >= rows.count for rows, count in zip(self.plan.rows, kept, strict=True)):
            self.following = following
        self.sample_s = time.perf_counter() - self._began - self.forward_s

    def _launch(self) -> tuple[list[_Pick], Sampled | Chosen | None]:
        """Starts sampling what is ready, and returns it in the order of the rows that are sampled.
        What waits for its mask is left out.
        """
        picks = self._picks
        if self._chosen is not None:
            return picks, self._chosen
        logits, self._logits = self._logits, None
        assert logits is not None
        masked = [pick.request.key for pick in picks if pick.request.params.token_mask is not None]
        answers = self._masks.take_all(masked) if masked else {}
        ready = [pick for pick in picks if pick.request.params.token_mask is None or pick.request.key in answers]
        if not ready:
            return [], None
        places = [pick.place for pick in ready]
        rows = []
        for pick in ready:
            answer = answers.get(pick.request.key)
            if answer is not None and answer.error is not None:
                pick.refused.append(answer.error)
            mask = None if answer is None else answer.allowed
            rows.append(SampleRow(pick.request.sampling, len(pick.request.tokens) + len(pick.before), pick.before, mask))
        return ready, self._sampler.launch(logits if places == list(range(len(logits))) else logits[places], rows)


class StepRuns:
    """Runs plans over a forward pass."""

    def __init__(self, forward: Forward, masks: MaskThread) -> None:
        self._forward = forward
        self._sampler = Sampler()
        self._masks = masks

    @property
    def read_back_bytes(self) -> int:
        """The bytes that sampling has brought from the device so far."""
        return self._sampler.read_back_bytes

    @contextmanager
    def begin(self, plan: StepPlan) -> Iterator[StepRun]:
        """Opens a block for the step of a plan that was applied. Where the block ends by an error
        all sequences are as before.
        """
        began = time.perf_counter()
        with self._forward.begin([_step_rows(rows) for rows in plan.rows]) as step:
            yield StepRun(plan, step, self._sampler, self._masks, began)


def _step_rows(rows: PlannedRows) -> StepRows:
    request = rows.request
    assert request.sequence is not None
    tokens = request.tokens[rows.first : rows.first + rows.count]
    num_logits = 1 + len(rows.drafts) if rows.sampled else 0
    return StepRows(request.sequence, [*tokens, *rows.drafts] if rows.drafts else tokens, num_logits)


def _picks(plan: StepPlan) -> list[_Pick]:
    found, place = [], 0
    for rows in plan.rows:
        if not rows.sampled:
            continue
        found += [_Pick(rows, request, place, ()) for request in rows.sampled]
        for count in range(1, len(rows.drafts) + 1):
            found.append(_Pick(rows, rows.request, place + count, rows.drafts[:count]))
        place += 1 + len(rows.drafts)
    return found


def _draws(picks: Sequence[_Pick]) -> list[Draw] | None:
    """Returns how the core chooses the token of each row, None where it does not for some row, or
    where several requests get a token from one.
    """
    found = []
    for place, pick in enumerate(picks):
        draw = pick.request.sampling.draw(len(pick.request.tokens) + len(pick.before))
        if draw is None or pick.place != place:
            return None
        found.append(draw)
    return found


def _judge(picks: Sequence[_Pick], sampled: Sampled | Chosen) -> list[Outcome]:
    """Returns what each request got: a token, and with drafts one more for each that was right."""
    token_ids = sampled.token_ids()
    outcomes: list[Outcome] = []
    at = 0
    while at < len(picks):
        pick = picks[at]
        # Only a request without followers has drafts.
        drafts = pick.rows.drafts
        tokens, error = [], pick.refused[0] if pick.refused else sampled.errors.get(at)
        accepted = 0
        if error is None:
            tokens.append(token_ids[at])
            while accepted < len(drafts) and tokens[-1] == drafts[accepted] and at + accepted + 1 not in sampled.errors:
                accepted += 1
                tokens.append(token_ids[at + accepted])
        logprobs = None
        if pick.request.params.logprobs is not None and error is None:
            logprobs = tuple(sampled.logprobs[at + place] for place in range(len(tokens)))
        outcomes.append(Outcome(pick.request, tuple(tokens), logprobs, len(drafts), accepted, error))
        at += 1 + len(drafts)
    return outcomes


def _kept(plan: StepPlan, outcomes: Sequence[Outcome]) -> list[int]:
    """Returns how many of its rows each entry keeps. What was to be sampled and was not, because
    its mask is still awaited, computes its last token again.
    """
    by_request = {outcome.request: outcome for outcome in outcomes}
    kept = []
    for rows in plan.rows:
        outcome = by_request.get(rows.request)
        if not rows.sampled:
            kept.append(rows.count)
        elif outcome is None:
            kept.append(rows.count - 1)
        else:
            kept.append(rows.count + outcome.num_accepted)
    return kept
