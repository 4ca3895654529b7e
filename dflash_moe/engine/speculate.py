"""`Speculator` decides which sequences of a step carry drafts, and how many. Every drafted row is
verified by the same sampler with the same counter-based random numbers as without drafts, so that
nothing here can change a token: it only changes how many come from one step.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter, sub
from typing import Protocol

from dflash_moe.engine.prompt_lookup import PromptLookup
from dflash_moe.engine.sampling.acceptance import PROBE_DRAFTS, Acceptance
from dflash_moe.engine.step_price import StepPrice
from dflash_moe.errors import ConfigError

MODES = ("off", "prompt", "auto")
# The drafts of one sequence and step, by default. A step of 8 rows of one sequence took 1.73 times
# as long as one of a single row, and each further draft is less likely to be reached.
MAX_DRAFTS = 8
# Drafts are taken where they are expected to give so many times the tokens per second of none. The
# prices are not known better than that.
_LEAST_GAIN = 1.02
# After so many steps with drafts one goes without, because the price of such a step would otherwise
# be known from long ago only. This costs at most a 64th of what drafts gain.
_STEPS_TO_PLAIN = 64

_FIRST = itemgetter(0)

# One decoding sequence of a step: its key, its token ids (prompt and outputs), and how many tokens
# it may still make. A sequence that must not have drafts says 1.
DecodeRow = tuple[Hashable, Sequence[int], int]


class Drafter(Protocol):
    """Proposes the next tokens of sequences. It never decides: what it proposes is verified.

    What is proposed must depend on the committed tokens of that sequence only. `draft` is called
    on the engine thread between steps, only for sequences that may have drafts in the next step, so
    that calls for a sequence may be any number of tokens apart. `token_ids` holds committed tokens
    only and never a rejected draft; it stays with the request over a preemption.

    A drafter with state of its own counts how much of `token_ids` its state covers, and drops what
    it had computed for drafts that were rejected. A small model catches up from `token_ids` on the
    next call. A head that needs hidden states is given by the engine, at the commit of each step,
    the rows [num_kept, hidden_size] of each sequence, prefill rows included. It may then draft for
    all sequences in one forward pass of its own, and `draft` hands out what is there. The time that
    drafting takes belongs to the seconds of the step that the Speculator observes.
    """

    def draft(self, key: Hashable, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """Returns at most `most` tokens that may follow `token_ids`, possibly none."""
        ...

    def drop(self, key: Hashable) -> None:
        """Frees what is kept for a sequence; one that is not known is no error."""
        ...


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counts since the start. Tokens are those of decode rows: `tokens_sampled` came from a step's
    last row or a rejected draft's place, one each step and sequence, and `accepted` were drafted.
    """

    drafted: int
    accepted: int
    probed: int
    tokens_sampled: int
    switched_off: int
    probability: float


class Speculator:
    """Drafts for the decoding sequences of a step. Owned by the engine thread.

    A step calls `plan`, and `observe` once it is committed. `plan` changes no estimate, so that a
    step that fails or is planned anew has no effect; a second plan may find more than the first
    while a long prompt is still being indexed. `mode` is "off", "prompt" (whatever the drafter
    finds, up to `max_drafts`) or "auto" (as many as pay by the estimates, none where none do).
    """

    def __init__(
        self,
        mode: str = "auto",
        drafter: Drafter | None = None,
        *,
        max_drafts: int = MAX_DRAFTS,
        expert_share: float = 1 / 16,
    ) -> None:
        """`expert_share` is top_k / num_experts of the model. Raises ConfigError."""
        if mode not in MODES:
            raise ConfigError(f"speculate={mode!r} is not allowed; allowed: {', '.join(MODES)}")
        if max_drafts < 1:
            raise ConfigError(f"max_drafts={max_drafts} is not allowed; allowed: at least 1")
        self.mode = mode
        self.max_drafts = max_drafts
        self.price = StepPrice(expert_share)
        self.acceptance = Acceptance()
        self._drafter: Drafter = PromptLookup() if drafter is None else drafter
        # Of the latest plan: the keys that probe, and those whose drafts were not expected to pay.
        self._probing: set[Hashable] = set()
        self._declined: list[Hashable] = []
        self._steps_with_drafts = 0
        self._drafted = self._accepted = self._probed = self._sampled = 0

    def plan(self, requests: Sequence[DecodeRow], base_rows: int, budget_rows: int) -> dict[Hashable, list[int]]:
        """Returns the drafts of the next step by key, without entries for sequences that get none.

        `requests` are all decoding sequences of the step and `base_rows` its rows without drafts,
        those of prefills included; at most `budget_rows` drafts are given together. A request's
        token ids are read and not kept: pass the list that grows, not a copy.
        """
        self._probing, self._declined = set(), []
        if self.mode == "off" or budget_rows < 1 or not requests:
            return {}
        if self.mode == "prompt":
            return self._plan_all(requests, budget_rows)
        if self._steps_with_drafts >= _STEPS_TO_PLAIN:
            return {}
        planned = self._plan_paying(requests, base_rows, budget_rows)
        self._add_probes(planned, requests, budget_rows)
        return planned

    def observe(self, outcomes: Mapping[Hashable, tuple[int, int]], num_rows: int, seconds: float) -> None:
        """Takes note of the step that the latest plan was for, once it is committed.

        `outcomes` has (number of drafts that were verified, number accepted) of every decoding
        sequence, (0, 0) for one without drafts. `num_rows` counts all rows of the step, and
        `seconds` is what it took with drafting and sampling.
        """
        if self.mode == "off":
            return
        self.price.observe(num_rows, seconds)
        for key in self._declined:
            self.acceptance.decline(key)
        num_drafts = 0
        for key, (drafted, accepted) in outcomes.items():
            is_probe = key in self._probing
            self.acceptance.observe(key, drafted, accepted, is_probe=is_probe)
            num_drafts += drafted
            self._accepted += accepted
            self._probed += drafted * is_probe
        self._drafted += num_drafts
        self._sampled += len(outcomes)
        self._steps_with_drafts = self._steps_with_drafts + 1 if num_drafts else 0

    def forget(self, key: Hashable) -> None:
        """Drops everything about a request that has ended; not at a preemption, after which its
        tokens go on.
        """
        self._drafter.drop(key)
        self.acceptance.drop(key)

    def stats(self) -> SpeculationStats:
        """Returns the counts so far."""
        return SpeculationStats(
            self._drafted, self._accepted, self._probed, self._sampled, self.acceptance.switched_off,
            self.acceptance.probability(),
        )  # fmt: skip

    def _draft(self, row: DecodeRow, most: int) -> Sequence[int]:
        # A step makes a token more than it accepts, so that the last one needs no draft.
        key, token_ids, tokens_left = row
        most = min(most, self.max_drafts, tokens_left - 1)
        return self._drafter.draft(key, token_ids, most)[:most] if most > 0 else ()

    def _plan_all(self, requests: Sequence[DecodeRow], budget_rows: int) -> dict[Hashable, list[int]]:
        planned = {}
        for row in requests:
            drafts = self._draft(row, budget_rows)
            if drafts:
                planned[row[0]] = list(drafts)
                budget_rows -= len(drafts)
        return planned

    def _plan_paying(self, requests: Sequence[DecodeRow], base_rows: int, budget_rows: int) -> dict[Hashable, list[int]]:
        """Drafts for the sequences that may pay, and chooses how many of each.

        No draft of a sequence is likelier than its first. Where even that one gives fewer tokens
        per second than the step has without drafts, at the lowest price of a row, it is not looked
        for.
        """
        most_rows = min(budget_rows, self.max_drafts * len(requests))
        extra = self._extra_seconds(base_rows, most_rows)
        plain_seconds = self.price.seconds(len(requests))
        least = _LEAST_GAIN * min(map(sub, extra, (0.0, *extra))) * len(requests) / plain_seconds
        found = []
        for row in requests:
            probability = self.acceptance.probability(row[0])
            if probability <= least:
                self._declined.append(row[0])
                continue
            drafts = self._draft(row, budget_rows)
            if drafts:
                found.append((row[0], drafts, probability))
        counts = choose_counts([(entry[2], len(entry[1])) for entry in found], len(requests), plain_seconds, extra)
        planned = {}
        for (key, drafts, _), count in zip(found, counts, strict=True):
            if count:
                planned[key] = list(drafts[:count])
            else:
                self._declined.append(key)
        return planned

    def _extra_seconds(self, base_rows: int, most_rows: int) -> list[float]:
        """Returns what 1, 2, ... rows more than `base_rows` cost."""
        base = self.price.seconds(base_rows)
        return [self.price.seconds(base_rows + more) - base for more in range(1, most_rows + 1)]

    def _add_probes(self, planned: dict[Hashable, list[int]], requests: Sequence[DecodeRow], budget_rows: int) -> None:
        """Adds probes of those that are due, the longest overdue first, so that none is left out
        for ever where the credit does not reach for all.
        """
        room, credit = budget_rows - sum(map(len, planned.values())), self.acceptance.probe_credit
        if room < 1 or credit < PROBE_DRAFTS:
            return
        waiting = ((self.acceptance.overdue(row[0]), row) for row in requests if row[0] not in planned)
        due = sorted((entry for entry in waiting if entry[0] >= 0), key=_FIRST, reverse=True)
        for _, row in due:
            drafts = self._draft(row, min(PROBE_DRAFTS, room))
            if drafts:
                planned[row[0]] = list(drafts)
                self._probing.add(row[0])
                room -= len(drafts)
                credit -= len(drafts)
            if room < 1 or credit < PROBE_DRAFTS:
                return


def choose_counts(
    found: Sequence[tuple[float, int]], num_sequences: int, plain_seconds: float, extra_seconds: Sequence[float]
) -> list[int]:
    """Returns how many drafts of each sequence give the most tokens per second, all 0 where none
    give clearly more than no drafts.

    `found` has (probability p that a draft is accepted, drafts that there are) of each sequence.
    Draft j of a sequence is worth p^j tokens, the chance that it and all before it are accepted.
    `num_sequences` tokens come without drafts, in `plain_seconds`: those of a step of the decode
    rows alone, since the time of prefill rows buys other things than these tokens. m drafts cost
    `extra_seconds[m - 1]`, whoever they are for. So the best m drafts are the m most valuable ones,
    and trying every m finds the best of all choices. The price may well rise less with later rows
    (their experts are read already), so that the first m that does not pay ends nothing.
    """
    values = [(p**place, i) for i, (p, most) in enumerate(found) for place in range(1, most + 1)]
    values.sort(key=_FIRST, reverse=True)
    tokens, best_count = float(num_sequences), 0
    best = _LEAST_GAIN * num_sequences / plain_seconds
    for count, ((value, _), extra) in enumerate(zip(values, extra_seconds, strict=False), 1):
        tokens += value
        rate = tokens / (plain_seconds + extra)
        if rate > best:
            best, best_count = rate, count
    counts = [0] * len(found)
    for _, i in values[:best_count]:
        counts[i] += 1
    return counts
