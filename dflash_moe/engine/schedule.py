"""The scheduler decides what each step computes: which requests run, how many tokens of each, who
gives up blocks, and who is admitted. Steps take what is ready and never wait for company.

`plan` looks and changes nothing; `apply` makes a plan true. Form and words follow vLLM's scheduler,
with one step for prefill and decode.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from dflash_moe.engine.request import Request
from dflash_moe.forward.blocks import BlockPool
from dflash_moe.forward.forward import Forward, TokenSequence
from dflash_moe.forward.sequence import releasable

# Packing looks at so many waiting requests, and takes the oldest whatever its length after so many
# others went before it, so that nobody waits for ever.
LOOKAHEAD = 64
FORCED_FIFO_EVERY = 8


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """The tokens first..first + count - 1 of a request, and drafts behind them. Where they are the
    last that it has, the requests in `sampled` get their next token: itself, and followers that
    begin here.
    """

    request: Request
    epoch: int
    first: int
    count: int
    sampled: tuple[Request, ...] = ()
    drafts: tuple[int, ...] = ()

    @property
    def is_prefill(self) -> bool:
        """Whether these are tokens of a prompt, or of one that is computed again."""
        return self.count > 1 or self.first < self.request.num_prompt


@dataclass(frozen=True, slots=True)
class Admission:
    """A waiting request that is to run, and the cached blocks that its prompt begins with."""

    request: Request
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does, in this order: `preempted` give their blocks back, `admitted` get a
    sequence, and `rows` are computed.
    """

    rows: tuple[PlannedRows, ...]
    admitted: tuple[Admission, ...] = ()
    preempted: tuple[Request, ...] = ()

    @property
    def num_rows(self) -> int:
        """The number of packed rows."""
        return sum(rows.count + len(rows.drafts) for rows in self.rows)


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a step: `max_batch_tokens` rows and `max_requests` sequences."""

    max_batch_tokens: int
    max_requests: int
    packing: bool = False
    prefix_cache: bool = True


class Scheduler:
    """The waiting and the running requests of an engine. The engine thread owns it."""

    def __init__(self, forward: Forward, limits: Limits) -> None:
        self._forward = forward
        self._pool: BlockPool = forward.blocks
        self._limits = limits
        self.waiting: deque[Request] = deque()
        # The oldest first.
        self.running: list[Request] = []
        self._passed_over = 0
        self.num_preempted = 0

    def add(self, request: Request) -> None:
        """Has a request wait, behind all others."""
        self.waiting.append(request)

    @property
    def has_work(self) -> bool:
        """Whether a step would have something to compute."""
        return bool(self.running or self.waiting)

    # -- planning ------------------------------------------------------------------------------
    def plan(self, drafts: Mapping[Request, Sequence[int]] | None = None, ahead: StepPlan | None = None) -> StepPlan:
        """Returns what the next step should do. Nothing is changed.

        `drafts` are guesses of the tokens behind those of a request. With `ahead`, the step that is
        under way, the plan is for the state that it leaves behind if no request ends in it. No
        followers may begin in that step, because the blocks that they share then have no table yet.
        """
        assert ahead is None or not begins_followers(ahead)
        planner = _Planner(self._forward, self._limits, self.running, ahead, drafts or {})
        return planner.plan(self._to_pack(), self.waiting)

    def _to_pack(self) -> Sequence[Request]:
        """Returns waiting requests of which those should come first that fit a step whole, the
        longest before the others.
        """
        if not self._limits.packing or self._passed_over >= FORCED_FIFO_EVERY:
            return ()
        return sorted(islice(self.waiting, LOOKAHEAD), key=lambda request: (-len(request.tokens), request.order))

    def apply(self, plan: StepPlan) -> None:
        """Makes a plan true but for its rows, which the caller computes."""
        for request in plan.preempted:
            self._preempt(request)
        oldest = self.waiting[0] if self.waiting else None
        for admission in plan.admitted:
            request = admission.request
            self.waiting.remove(request)
            request.sequence = self._forward.admit(request.max_length)
            if admission.blocks:
                request.sequence.blocks.adopt_prefix(admission.blocks)
            self._run(request)
        if plan.admitted:
            self._passed_over = 0 if plan.admitted[0].request is oldest else self._passed_over + 1

    def revise(self, plan: StepPlan) -> StepPlan:
        """Returns a plan that was made ahead without what has ended since."""
        return StepPlan(
            tuple(_without_ended(rows) for rows in plan.rows if rows.epoch == rows.request.epoch and _is_open(rows.request)),
            tuple(admission for admission in plan.admitted if _is_open(admission.request)),
            tuple(filter(_is_open, plan.preempted)),
        )

    # -- changes -------------------------------------------------------------------------------
    def begin_followers(self, leader: Request, followers: Iterable[Request]) -> None:
        """Gives each follower the prompt that its leader has computed."""
        assert leader.sequence is not None
        for follower in followers:
            leader.followers.remove(follower)
            follower.sequence = leader.sequence.fork(leader.num_prompt)
            self._run(follower)

    def release_followers(self, leader: Request) -> list[Request]:
        """Has the followers for which there was no room wait on their own; returns them."""
        left, leader.followers = leader.followers, []
        self.waiting.extend(left)
        return left

    def end(self, request: Request, reason: str) -> None:
        """Ends a request, waiting or running: its blocks are given back, and what is computed for
        it now counts no more. Its followers go on without it.
        """
        request.finish_reason = reason
        request.epoch += 1
        sequence, request.sequence = request.sequence, None
        if sequence is None:
            if request in self.waiting:
                self._replace(self.waiting, request)
            return
        self.running.remove(request)
        if request.followers and sequence.num_tokens < request.num_prompt:
            heir = _heir(request)
            heir.sequence = sequence
            self._run(heir)
        else:
            sequence.release()

    def _replace(self, waiting: deque[Request], request: Request) -> None:
        at = waiting.index(request)
        del waiting[at]
        if request.followers:
            waiting.insert(at, _heir(request))

    def _preempt(self, request: Request) -> None:
        assert request.sequence is not None
        request.sequence.release()
        request.sequence = None
        request.epoch += 1
        self.num_preempted += 1
        self.running.remove(request)
        # The oldest of them is computed again first.
        at = sum(1 for other in self.waiting if other.order < request.order)
        self.waiting.insert(at, request)

    def _run(self, request: Request) -> None:
        self.running.append(request)
        self.running.sort(key=lambda one: one.order)


def begins_followers(plan: StepPlan) -> bool:
    """Says whether a step ends with requests that begin where their leader's prompt is computed, or
    that have to wait on their own because there was no place.
    """
    return any(rows.sampled and rows.request.followers for rows in plan.rows)


def _is_open(request: Request) -> bool:
    return request.finish_reason is None


def _without_ended(rows: PlannedRows) -> PlannedRows:
    """Returns rows of an open request without the followers that have ended."""
    still = tuple(filter(_is_open, rows.sampled))
    return rows if len(still) == len(rows.sampled) else replace(rows, sampled=still)


def _heir(leader: Request) -> Request:
    """Returns the follower that takes a leader's place, with the other followers behind it."""
    heir, *others = leader.followers
    leader.followers = []
    heir.followers = others
    return heir


class _Planner:
    """One pass of planning: what is left of rows, blocks and places."""

    def __init__(
        self, forward: Forward, limits: Limits, running: Sequence[Request], ahead: StepPlan | None,
        drafts: Mapping[Request, Sequence[int]],
    ) -> None:  # fmt: skip
        self._forward, self._limits, self._drafts = forward, limits, drafts
        self._pool: BlockPool = forward.blocks
        self._running = list(running)
        # What each request will have gained from the step under way when this plan is carried out:
        # how many more of its tokens are computed, and how many new tokens it has, which is 1 where
        # that step samples it and else 0. An engine that drafts makes no plan ahead.
        self._ahead = {} if ahead is None else {rows.request: (rows.count, len(rows.sampled[:1])) for rows in ahead.rows}
        self._places = min(limits.max_requests, forward.max_sequences) - len(running)
        self._free = self._pool.num_free
        self._preempted: list[Request] = []
        self._rows: list[PlannedRows] = []
        self._admitted: list[Admission] = []

    def plan(self, to_pack: Sequence[Request], waiting: Iterable[Request]) -> StepPlan:
        """Returns the plan: running requests from the oldest on, then those of `to_pack` that fit
        whole, and where none does those that wait, in their order.
        """
        # Each running request may have a row; what is left of the budget goes to prompts.
        pending = {request: self._pending(request) for request in self._running}
        budget = self._limits.max_batch_tokens - sum(1 for count in pending.values() if count == 1)
        place = 0
        while place < len(self._running):
            request = self._running[place]
            budget -= self._continue(request, pending[request], budget)
            place += 1
        if not self._preempted:
            for request in to_pack:
                budget -= self._admit(request, budget, whole=True)
            for request in () if self._admitted else waiting:
                taken = self._admit(request, budget)
                if not taken:
                    break
                budget -= taken
        return StepPlan(tuple(self._rows), tuple(self._admitted), tuple(self._preempted))

    def _pending(self, request: Request) -> int:
        computed, sampled = self._ahead.get(request, (0, 0))
        if sampled and request.num_generated + sampled >= request.params.max_tokens:
            return 0
        return len(request.tokens) + sampled - request.num_computed - computed

    def _continue(self, request: Request, pending: int, budget: int) -> int:
        """Plans the next rows of a running request and returns how many of the budget they take.
        Where blocks are missing the youngest give up theirs, itself at last.
        """
        if pending < 1:
            return 0
        count = 1 if pending == 1 else self._chunk(pending, budget)
        if count < 1:
            return 0
        assert request.sequence is not None
        while not self._take_blocks(request.sequence, self._computed(request) - request.num_computed + count):
            youngest = self._running.pop()
            self._preempted.append(youngest)
            if youngest is request:
                return 0
        drafts = self._drafts_of(request, budget) if pending == 1 else ()
        self._add_rows(request, self._computed(request), count, pending, drafts)
        return len(drafts) if pending == 1 else count

    def _chunk(self, pending: int, budget: int) -> int:
        """Returns how many of a prompt's rows a step takes: as many as there is room for, or where
        prompts cannot be cut all of them, if nothing else was planned.
        """
        if self._forward.cuts_prompts or pending <= budget:
            return min(pending, budget)
        is_first = all(not rows.is_prefill for rows in self._rows)
        return pending if is_first else 0

    def _drafts_of(self, request: Request, budget: int) -> tuple[int, ...]:
        drafts = tuple(self._drafts.get(request, ()))[: max(0, budget)]
        sequence = request.sequence
        assert sequence is not None
        # Guesses are not worth that anybody gives up blocks.
        while drafts and sequence.blocks.blocks_needed(1 + len(drafts)) - sequence.blocks.blocks_needed(1) > self._free:
            drafts = drafts[:-1]
        if drafts:
            self._free -= sequence.blocks.blocks_needed(1 + len(drafts)) - sequence.blocks.blocks_needed(1)
        return drafts

    def _take_blocks(self, sequence: TokenSequence, count: int) -> bool:
        """Counts the blocks that a sequence needs for its next `count` tokens as taken."""
        released = [request.sequence.blocks for request in self._preempted if request.sequence is not None]
        needed = sequence.blocks.blocks_needed(count, released)
        if needed > self._free + (releasable(released) if released else 0):
            return False
        self._free -= needed
        return True

    def _computed(self, request: Request) -> int:
        return request.num_computed + self._ahead.get(request, (0, 0))[0]

    def _admit(self, request: Request, budget: int, *, whole: bool = False) -> int:
        """Plans the first rows of a waiting request, or all of them, and returns their number; 0
        where there is no room for it. Its whole prompt must find blocks, so that it does not begin
        only to give up.
        """
        if self._places < 1 or budget < 1:
            return 0
        hit = self._cached_prefix(request)
        computed = len(hit) * self._pool.block_tokens
        pending = len(request.tokens) - computed
        count = self._chunk(pending, budget)
        # Cached blocks that nobody uses count as free until they are taken.
        needed = -(-len(request.tokens) // self._pool.block_tokens) - len(hit)
        needed += sum(1 for block in hit if self._pool.references(block) == 0)
        if count < 1 or needed > self._free or (whole and count < pending):
            return 0
        self._free -= needed
        self._places -= 1
        self._admitted.append(Admission(request, tuple(hit)))
        self._add_rows(request, computed, count, pending, ())
        return count

    def _cached_prefix(self, request: Request) -> Sequence[int]:
        if not self._limits.prefix_cache or not self._forward.cuts_prompts:
            return ()
        request.extend_hashes()
        # At least one token is computed, because its logits are wanted.
        most = (len(request.tokens) - 1) // self._pool.block_tokens
        return self._pool.match(request.hashes.hashes[:most])

    def _add_rows(self, request: Request, first: int, count: int, pending: int, drafts: tuple[int, ...]) -> None:
        sampled: tuple[Request, ...] = ()
        if count == pending:
            followers = request.followers[: max(0, self._places)] if self._forward.cuts_prompts else ()
            self._places -= len(followers)
            sampled = (request, *followers)
        self._rows.append(PlannedRows(request, request.epoch, first, count, sampled, drafts))
