"""A scheduler over blocks and no model: what an engine does with a plan, for tests that look at
plans. The tokens that are "sampled" follow from the request and the position alone.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dflash_moe.engine.request import LENGTH, Request
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.engine.sampling.sampling_state import SamplingState
from dflash_moe.engine.schedule import Limits, Scheduler, StepPlan
from dflash_moe.forward.block_hashes import BlockHashes
from dflash_moe.forward.blocks import BlockPool
from dflash_moe.forward.forward import TokenSequence
from dflash_moe.forward.sequence import SequenceBlocks
from dflash_moe.forward.step_blocks import StepBlocks

BLOCK_TOKENS = 4


class BlocksOnly:
    """A `Forward` as far as a scheduler sees it."""

    vocab_size = 1 << 20

    def __init__(self, num_blocks: int, *, cuts_prompts: bool = True, max_sequences: int = 1 << 20) -> None:
        self.blocks = BlockPool(num_blocks, BLOCK_TOKENS)
        self.cuts_prompts = cuts_prompts
        self.max_sequences = max_sequences

    def check_length(self, max_tokens: int) -> None:
        assert max_tokens <= self.blocks.num_blocks * BLOCK_TOKENS

    def admit(self, max_tokens: int) -> TokenSequence:
        return TokenSequence(SequenceBlocks(self.blocks), max_tokens)

    def begin(self, rows: Sequence[Any]) -> Any:
        raise NotImplementedError

    def block_hashes(self, max_tokens: int) -> BlockHashes:
        raise NotImplementedError

    def is_rotated_alike(self, length: int, max_tokens: int) -> bool:
        raise NotImplementedError


class Steps:
    """A scheduler and the requests that it was given. `step` is one step of an engine, which checks
    what holds of every plan.
    """

    def __init__(
        self, num_blocks: int = 64, max_batch_tokens: int = 16, max_requests: int = 8, *, packing: bool = False,
        prefix_cache: bool = True, cuts_prompts: bool = True, max_sequences: int = 1 << 20,
    ) -> None:  # fmt: skip
        self.forward = BlocksOnly(num_blocks, cuts_prompts=cuts_prompts, max_sequences=max_sequences)
        self.pool = self.forward.blocks
        self.limits = Limits(max_batch_tokens, min(max_requests, max_batch_tokens), packing, prefix_cache)
        self.scheduler = Scheduler(self.forward, self.limits)
        self.requests: list[Request] = []
        self.num_steps = 0
        # What is guessed behind a request's tokens, and how much of it turns out right.
        self.drafts: Callable[[Request], Sequence[int]] = lambda _request: ()
        self.num_right: Callable[[Request, int], int] = lambda _request, _count: 0
        self._num_submitted = 0

    # -- requests --------------------------------------------------------------------------------
    def submit(self, prompt: int | Sequence[int], max_tokens: int = 4, n: int = 1) -> list[Request]:
        """Adds a submission of a prompt, or of a prompt of so many tokens that no other has."""
        self._num_submitted += 1
        number = self._num_submitted
        tokens = list(range(number << 10, (number << 10) + prompt)) if isinstance(prompt, int) else list(prompt)
        params = SamplingParams(max_tokens=max_tokens, n=n, seed=number)
        first = len(self.requests)
        made = [
            Request(
                number, choice, first + choice, list(tokens), len(tokens), params,
                SamplingState(params, seed=number, choice=choice), BlockHashes(b"", BLOCK_TOKENS), None,
            )
            for choice in range(n)
        ]  # fmt: skip
        self.requests += made
        leader, *followers = made
        if self.forward.cuts_prompts:
            leader.followers = followers
            followers = []
        for request in (leader, *followers):
            self.scheduler.add(request)
        return made

    @property
    def open(self) -> list[Request]:
        """The requests that have not ended."""
        return [request for request in self.requests if request.finish_reason is None]

    def end(self, request: Request, reason: str = "cancelled") -> None:
        """Ends a request as an engine does."""
        self.scheduler.end(request, reason)
        for other in self.requests:
            if request in other.followers:
                other.followers.remove(request)

    # -- steps -----------------------------------------------------------------------------------
    def step(self, plan: StepPlan | None = None, *, meanwhile: Callable[[StepPlan], None] = lambda _plan: None) -> StepPlan:
        """Plans, where no plan is given, and does one step; `meanwhile` is called with its plan
        while it is under way.
        """
        if plan is None:
            before = self.state()
            guesses = {one: self.drafts(one) for one in self.scheduler.running if len(one.tokens) - one.num_computed == 1}
            plan = self.scheduler.plan({one: drafts for one, drafts in guesses.items() if drafts})
            assert self.state() == before, "plan() has changed something"
        self.check_plan(plan)
        self.scheduler.apply(plan)
        self._compute(plan, meanwhile)
        self.num_steps += 1
        self.check_books()
        return plan

    def _compute(self, plan: StepPlan, meanwhile: Callable[[StepPlan], None]) -> None:
        blocks = StepBlocks()
        for rows in plan.rows:
            request = rows.request
            assert request.sequence is not None, f"{request.name} was planned and has no sequence"
            assert request.num_computed == rows.first, "rows follow what is stored"
            assert blocks.append(request.sequence.blocks, rows.count + len(rows.drafts)), "a plan has its blocks"
        blocks.pack()
        meanwhile(plan)
        right = {rows.request: self.num_right(rows.request, len(rows.drafts)) for rows in plan.rows if rows.drafts}
        blocks.commit([rows.count + right.get(rows.request, 0) for rows in plan.rows])
        for rows in plan.rows:
            if rows.sampled:
                self.scheduler.begin_followers(rows.request, rows.sampled[1:])
                self.scheduler.release_followers(rows.request)
            if self.limits.prefix_cache and self.forward.cuts_prompts and rows.request.sequence is not None:
                rows.request.extend_hashes()
                rows.request.sequence.blocks.publish(rows.request.hashes.hashes)
        for rows in plan.rows:
            for request in rows.sampled:
                for _ in range(1 + (right.get(request, 0) if request is rows.request else 0)):
                    request.tokens.append(token_of(request, len(request.tokens)))
                if request.num_generated >= request.params.max_tokens:
                    self.end(request, LENGTH)

    def run(self, most_steps: int) -> int:
        """Does steps until all requests have ended, and returns how many it took."""
        before = self.num_steps
        while self.scheduler.has_work:
            assert self.num_steps - before < most_steps, f"{len(self.open)} requests are open after {most_steps} steps"
            self.step()
        assert not self.open
        assert self.pool.num_free == self.pool.num_blocks
        return self.num_steps - before

    @property
    def most_steps(self) -> int:
        """How many steps can be left: the oldest request that runs has at least one row in each."""
        return sum(request.max_length for request in self.open)

    # -- checks ----------------------------------------------------------------------------------
    def state(self) -> Any:
        """All that a plan could change, but for hashes, which only remember what follows from
        tokens.
        """
        scheduler, pool, cache = self.scheduler, self.pool, self.pool._cache
        requests = [
            (
                one.key, tuple(one.tokens), one.epoch, one.finish_reason, tuple(other.key for other in one.followers),
                None if one.sequence is None else (tuple(one.sequence.blocks.block_table.tolist()), one.num_computed),
            )
            for one in self.requests
        ]  # fmt: skip
        queues = [[one.key for one in queue] for queue in (scheduler.waiting, scheduler.running)]
        books = (list(pool._references), list(pool._free), list(cache._idle), dict(cache._hash_of), pool.num_adopted)
        return requests, queues, books, scheduler._passed_over, scheduler.num_preempted

    def check_plan(self, plan: StepPlan) -> None:
        """Checks what holds of every plan."""
        limits, running = self.limits, self.scheduler.running
        assert plan.rows, "there is always something to compute"
        assert not running or running[0] not in plan.preempted, "the oldest comes to its end"
        planned = [rows.request for rows in plan.rows]
        admitted = [admission.request for admission in plan.admitted]
        assert len(set(planned)) == len(planned)
        assert set(admitted) <= set(planned)
        assert not set(planned) & set(plan.preempted)
        assert not (plan.admitted and plan.preempted), "nobody gives up blocks for one that waits"
        if self.forward.cuts_prompts:
            assert plan.num_rows <= limits.max_batch_tokens
        beginning = sum(len(rows.sampled) - 1 for rows in plan.rows if rows.sampled)
        num_running = len(running) - len(plan.preempted) + len(admitted) + beginning
        assert num_running <= min(limits.max_requests, self.forward.max_sequences)
        # The youngest give up their blocks, and whoever decodes does in every step.
        stay = len(running) - len(plan.preempted)
        assert list(plan.preempted) == running[stay:][::-1]
        for request in running[:stay]:
            if len(request.tokens) - request.num_computed == 1:
                assert request in planned, f"{request.name} could decode and does not"
        for rows in plan.rows:
            assert rows.count >= 1
            assert rows.epoch == rows.request.epoch
            assert bool(rows.sampled) == (rows.first + rows.count == len(rows.request.tokens))
            assert not rows.sampled or rows.sampled[0] is rows.request

    def check_books(self) -> None:
        """Checks the pool's books, and that every request that is open is somewhere, once."""
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        self.pool.check_integrity([one.sequence.blocks.block_table for one in running if one.sequence is not None])
        assert all((one.sequence is not None) == (one in running) for one in self.requests)
        behind = [follower for one in (*running, *waiting) for follower in one.followers]
        places = sorted(one.order for one in (*running, *waiting, *behind))
        assert places == [one.order for one in self.open]
        assert [one.order for one in running] == sorted(one.order for one in running)


def token_of(request: Request, position: int) -> int:
    """Returns the token of a request at a position."""
    return (request.request_id << 12) + (request.choice << 8) + position + (1 << 18)
