"""Computes one planned step: the forward pass, the sampling where the logits are, and the judgement
which drafts were right. Nothing of a request is changed here but what the forward pass stored.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dflash_moe.engine.logprobs import TokenLogprobs
from dflash_moe.engine.request import Request
from dflash_moe.engine.sample import Sampled, Sampler, SampleRow
from dflash_moe.engine.schedule import PlannedRows, StepPlan
from dflash_moe.engine.token_masks import MaskThread
from dflash_moe.errors import DflashError
from dflash_moe.forward.forward import Forward, RunStep, StepRows


@dataclass(frozen=True, slots=True)
class Outcome:
    """The tokens that a request got in a step, or why it got none."""

    request: Request
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    num_drafts: int = 0
    num_accepted: int = 0
    error: DflashError | None = None


@dataclass(slots=True)
class StepTimes:
    """The seconds of a step's parts. The forward pass is the model's, experts included."""

    forward_s: float = 0.0
    sample_s: float = 0.0


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
    """Runs plans over a forward pass."""

    def __init__(self, forward: Forward, masks: MaskThread) -> None:
        self._forward = forward
        self._sampler = Sampler()
        self._masks = masks

    @property
    def read_back_bytes(self) -> int:
        """The bytes that sampling has brought from the device so far."""
        return self._sampler.read_back_bytes

    def run(self, plan: StepPlan, launched: Callable[[], None] | None = None) -> tuple[list[Outcome], bool, StepTimes]:
        """Computes the rows of a plan that was applied. Returns what was sampled, and whether every
        sequence has all tokens that were planned, drafts aside. `launched` is called once all work
        is with the device, before token ids are read back.

        After an error all sequences are as before.
        """
        times = StepTimes()
        began = time.perf_counter()
        with self._forward.step([_step_rows(rows) for rows in plan.rows]) as step:
            times.forward_s = time.perf_counter() - began
            picks, sampled = self._launch(plan, step)
            if launched is not None:
                launched()
            outcomes = [] if sampled is None else _judge(picks, sampled)
            kept = _kept(plan, outcomes)
            step.keep(kept)
        times.sample_s = time.perf_counter() - began - times.forward_s
        return outcomes, all(count >= rows.count for rows, count in zip(plan.rows, kept, strict=True)), times

    def _launch(self, plan: StepPlan, step: RunStep) -> tuple[list[_Pick], Sampled | None]:
        """Starts sampling what is ready, and returns it in the order of the rows that are sampled.
        What waits for its mask is left out.
        """
        picks = _picks(plan)
        masked = [pick.request.key for pick in picks if pick.request.params.token_mask is not None]
        answers = self._masks.take_all(masked) if masked else {}
        ready = [pick for pick in picks if pick.request.params.token_mask is None or pick.request.key in answers]
        if not ready:
            return [], None
        places = [pick.place for pick in ready]
        logits = step.logits if places == list(range(len(step.logits))) else step.logits[places]
        rows = []
        for pick in ready:
            answer = answers.get(pick.request.key)
            if answer is not None and answer.error is not None:
                pick.refused.append(answer.error)
            mask = None if answer is None else answer.allowed
            rows.append(SampleRow(pick.request.sampling, len(pick.request.tokens) + len(pick.before), pick.before, mask))
        return ready, self._sampler.launch(logits, rows)


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


def _judge(picks: Sequence[_Pick], sampled: Sampled) -> list[Outcome]:
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
