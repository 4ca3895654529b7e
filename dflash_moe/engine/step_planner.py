"""What the next step computes: what is scheduled of which requests, with which guesses, and which
masks are asked for meanwhile.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence

from dflash_moe.engine.engine_settings import EngineSettings
from dflash_moe.engine.engine_stats import EngineStats
from dflash_moe.engine.request import Request
from dflash_moe.engine.sampling.token_masks import MaskRequest, MaskThread
from dflash_moe.engine.schedule import Limits, Scheduler, StepPlan, begins_followers
from dflash_moe.engine.speculate import Speculator
from dflash_moe.engine.step_run import Outcome
from dflash_moe.errors import ConfigError, DflashError, EngineError
from dflash_moe.forward.forward import Forward


class StepPlanner:
    """Plans an engine's steps. The engine thread alone calls it, and whoever closes the engine."""

    def __init__(self, forward: Forward, settings: EngineSettings, stats: EngineStats) -> None:
        """Adds to `stats` what plans find cached, and the time that they take."""
        limits = Limits(
            settings.max_batch_tokens, min(settings.max_requests, settings.max_batch_tokens), settings.order == "packing",
            settings.prefix_cache,
        )  # fmt: skip
        self._forward = forward
        self._settings = settings
        self._stats = stats
        self.scheduler = Scheduler(forward, limits)
        self.masks = MaskThread(forward.vocab_size)
        self.speculator = Speculator(settings.speculate, expert_share=settings.expert_share)
        self._speculates = settings.speculate != "off" and forward.cuts_prompts
        # Requests whose next mask nobody was asked for yet.
        self.unasked: list[Request] = []
        # Those of requests that have ended since the latest exchange, which are dropped together.
        self._unwanted: list[Hashable] = []
        # The plan of the next step, where it was made while the latest one was computed.
        self._ahead: StepPlan | None = None

    def add(self, requests: Sequence[Request]) -> None:
        """Takes the choices of a submission, which wait from now on. Followers wait with the first
        one where it may compute their prompt for them.
        """
        self.need_masks(requests)
        leader, *followers = requests
        if self._forward.cuts_prompts:
            leader.followers = followers
            followers = []
        for request in (leader, *followers):
            self.scheduler.add(request)

    def need_masks(self, requests: Sequence[Request]) -> None:
        """Notes the requests whose next tokens a mask decides."""
        self.unasked += [request for request in requests if request.params.token_mask is not None]

    def ask_masks(self) -> list[tuple[Request, DflashError]]:
        """Has the masks of the next tokens computed while the next step is. Returns requests that
        end, because theirs cannot be.
        """
        if not self.unasked:
            return []
        asked, self.unasked = self.unasked, []
        try:
            # A mask sees the new tokens of its choice and not the prompt.
            num_queued = self.masks.request_all(
                [MaskRequest(one.key, one.params.token_mask, tuple(one.tokens[one.num_prompt :])) for one in asked]
            )
        except ConfigError as error:
            return [(request, error.reworded(f"{request.name}: {error}")) for request in asked]
        self.unasked = asked[num_queued:]
        return []

    def drop_masks(self) -> None:
        """Forgets the masks of requests that have ended."""
        if self._unwanted:
            self.masks.drop(self._unwanted)
            self._unwanted = []

    def plan(self) -> StepPlan:
        """Decides what the next step computes and makes it true but for its rows. There must be
        work. Raises EngineError where none of it is found.
        """
        began = time.perf_counter()
        ahead, self._ahead = self._ahead, None
        plan = None if ahead is None else self.scheduler.revise(ahead)
        if plan is None or not plan.rows:
            plan = self.scheduler.plan(self._drafts())
        self.scheduler.apply(plan)
        if not plan.rows and not plan.preempted:
            num_running, num_waiting = len(self.scheduler.running), len(self.scheduler.waiting)
            raise EngineError(f"{num_running} requests run and {num_waiting} wait, and the scheduler found nothing to compute")
        self._note_admitted(plan)
        self._stats.plan_s += time.perf_counter() - began
        return plan

    def _note_admitted(self, plan: StepPlan) -> None:
        now = time.monotonic()
        for admission in plan.admitted:
            request = admission.request
            num_cached = len(admission.blocks) * self._forward.blocks.block_tokens
            self._stats.cached_tokens += num_cached
            if not request.times.scheduled:
                self._stats.began(request, now)
                for one in (request, *request.followers):
                    one.num_cached_tokens = num_cached

    def _drafts(self) -> dict[Request, Sequence[int]]:
        """Returns guesses for the requests that decode in the next step."""
        if not self._speculates:
            return {}
        decoding: dict[Hashable, Request] = {
            one.key: one for one in self.scheduler.running if len(one.tokens) - one.num_computed == 1
        }
        # A masked token waits for those before it, so that nothing can be guessed behind it.
        rows = [
            (key, one.tokens, 1 if one.params.token_mask is not None else one.params.max_tokens - one.num_generated)
            for key, one in decoding.items()
        ]
        budget = self._settings.max_batch_tokens - len(decoding)
        found = self.speculator.plan(rows, len(self.scheduler.running), budget)
        return {decoding[key]: drafts for key, drafts in found.items()}

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Plans the step behind one that is under way, where what that one leaves is known before
        its tokens are.
        """
        sampled = [request for rows in plan.rows for request in rows.sampled]
        is_known = (
            self._settings.plans_ahead
            and not self._speculates
            and not begins_followers(plan)
            and all(request.params.token_mask is None for request in sampled)
        )
        return self.scheduler.plan(ahead=plan) if is_known else None

    def follow(self, following: StepPlan | None) -> None:
        """Takes what `plan_ahead` has made of a step that is clean."""
        self._ahead = following

    def observe(self, plan: StepPlan, outcomes: Sequence[Outcome], seconds: float) -> None:
        """Lets the speculator learn from a clean step."""
        if not self._speculates:
            return
        decoding = {rows.request for rows in plan.rows if not rows.is_prefill}
        found: dict[Hashable, tuple[int, int]] = {
            one.request.key: (one.num_drafts, one.num_accepted) for one in outcomes if one.request in decoding
        }
        self.speculator.observe(found, plan.num_rows, seconds)

    def end(self, request: Request, reason: str, others: Sequence[Request]) -> None:
        """Forgets a request that has ended; `others` are the open choices of its submission."""
        self.scheduler.end(request, reason)
        for other in others:
            if request in other.followers:
                other.followers.remove(request)
        self.speculator.forget(request.key)
        if request.params.token_mask is not None:
            self._unwanted.append(request.key)
            self.unasked = [other for other in self.unasked if other is not request]

    def publish(self, request: Request) -> None:
        """Lets other prompts find the full blocks of a request."""
        sequence, hashes = request.sequence, request.hashes
        if self._settings.prefix_cache and self._forward.cuts_prompts and sequence is not None:
            if sequence.num_tokens - len(hashes.hashes) * hashes.block_tokens >= hashes.block_tokens:
                request.extend_hashes()
            sequence.blocks.publish(hashes.hashes)

    def forget_cached(self) -> None:
        """Forgets all cached prefixes."""
        # A plan that was made ahead may adopt what is forgotten now.
        self._ahead = None
        self._forward.blocks.forget_cached()

    def check_blocks(self) -> None:
        """Raises EngineError where the books of blocks differ from the sequences."""
        tables = [one.sequence.blocks.block_table for one in self.scheduler.running if one.sequence is not None]
        self._forward.blocks.check_integrity(tables)
