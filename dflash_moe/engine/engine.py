"""The engine: many requests over one model, and one thread that computes them step by step. The
tokens of a request never depend on its company.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from dflash_moe import _core
from dflash_moe.engine.delivery import Bell, BetweenSteps, Cancel, Command, EngineDoor, Submit, TokenStream
from dflash_moe.engine.engine_settings import EngineSettings
from dflash_moe.engine.engine_stats import EngineStats
from dflash_moe.engine.prompt_check import LengthLimit, LengthWarning, checked_prompt, length_limit
from dflash_moe.engine.request import CANCELLED, ERROR, LENGTH, STOP, Request, RequestTimes, TokenDelta
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.engine.sampling.sampling_state import SamplingState
from dflash_moe.engine.sampling.token_masks import MaskRequest, MaskThread
from dflash_moe.engine.schedule import Limits, Scheduler, StepPlan, begins_followers
from dflash_moe.engine.speculate import Speculator
from dflash_moe.engine.step_run import Outcome, StepRun, StepRuns
from dflash_moe.errors import ConfigError, DflashError, EngineError, RequestCancelled, shown
from dflash_moe.forward.forward import Forward

log = logging.getLogger(__name__)

# The engine thread has so long to end its step when the engine is closed, beside the time that a
# call of experts may take.
CLOSE_S = 10.0


class Engine:
    """Computes requests over a forward pass, which belongs to it until it is closed.

    Any thread may submit and cancel. Every request ends: with its tokens, or with an error that
    names it.
    """

    def __init__(
        self, forward: Forward, settings: EngineSettings | None = None, *, eos_token_ids: frozenset[int] = frozenset(),
        lock: Any = None,
    ) -> None:  # fmt: skip
        """`eos_token_ids` end a request unless it ignores them. `lock` is the one between callers
        and the engine thread, for tests that count; who holds it, an RLock, submits several
        requests at once.
        """
        self.settings = settings = settings or EngineSettings()
        self._forward = forward
        self._eos = eos_token_ids
        limits = Limits(
            settings.max_batch_tokens, min(settings.max_requests, settings.max_batch_tokens), settings.order == "packing",
            settings.prefix_cache,
        )  # fmt: skip
        self._scheduler = Scheduler(forward, limits)
        self._speculates = settings.speculate != "off" and forward.cuts_prompts
        self._speculator = Speculator(settings.speculate, expert_share=settings.expert_share)
        self._masks = MaskThread(forward.vocab_size)
        # Requests whose next mask nobody was asked for yet.
        self._unasked: list[Request] = []
        # Those of requests that have ended since the latest exchange, which are dropped together.
        self._unwanted: list[Hashable] = []
        self._steps = StepRuns(forward, self._masks)
        self._stats = EngineStats()
        self._length_warning = LengthWarning(forward)
        self._door = EngineDoor(settings.max_queue, lock)
        self._ids = itertools.count(1)
        self._orders = itertools.count()
        # Choices that have not ended, by request id.
        self._open: dict[int, list[Request]] = {}
        self._num_open = 0
        self._deltas: list[tuple[TokenStream, TokenDelta]] = []
        self._ended_at = time.monotonic()
        self._seconds_per_request = 0.0
        # The plan of the next step, where it was made while the latest one was computed.
        self._ahead: StepPlan | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="dflash-moe-engine", daemon=True)
        self._door.watch(self._thread.is_alive)
        self._at_exit = _close_at_exit(self)
        self._thread.start()

    # -- any thread ------------------------------------------------------------------------------
    def submit(self, token_ids: Sequence[int], params: SamplingParams | None = None) -> TokenStream:
        """Has a prompt completed, and returns where its tokens come. Raises ConfigError for a
        prompt or parameters that can never be computed, QueueFull where too many wait, and
        RequestCancelled where the engine is closed; each names the request.
        """
        params = SamplingParams() if params is None else params
        request_id = next(self._ids)
        name = f"request {request_id}"
        prompt = checked_prompt(self._forward, name, token_ids, params, self.settings)
        self._length_warning.look(name, len(prompt), params.max_tokens)
        stream = TokenStream(self._door, request_id, params.n)
        try:
            self._door.send(Submit(tuple(self._requests(request_id, prompt, params, stream))))
        except DflashError as error:
            raise error.reworded(f"{name}: {error}") from None
        return stream

    @property
    def length_limit(self) -> LengthLimit:
        """The most tokens that a request may have, its prompt included, and why no more."""
        return length_limit(self._forward, self.settings)

    def _requests(self, request_id: int, prompt: list[int], params: SamplingParams, stream: TokenStream) -> list[Request]:
        seed = secrets.randbits(63) if params.seed is None else params.seed
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        max_length = len(prompt) + params.max_tokens
        now = time.monotonic()
        return [
            Request(
                request_id, choice, 0, list(prompt), len(prompt), params,
                SamplingState(params, seed=seed, choice=choice, prompt_ids=prompt),
                self._forward.block_hashes(max_length), stream, stops, times=RequestTimes(submitted=now),
            )
            for choice in range(params.n)
        ]  # fmt: skip

    def stats(self) -> dict[str, Any]:
        """Returns what was counted so far: steps, tokens, blocks, requests and times."""
        pool = self._forward.blocks
        found = self._stats.report()
        found |= {
            "read_back_bytes": self._steps.read_back_bytes,
            "waiting": self._num_open - len(self._scheduler.running),
            "running": len(self._scheduler.running),
            "preemptions": self._scheduler.num_preempted,
            "blocks": {
                "total": pool.num_blocks, "free": pool.num_free, "cached": pool.num_cached, "evicted": pool.num_evicted,
                "tokens": pool.block_tokens,
            },
            **self._forward.stats(),
            "speculation": dataclasses.asdict(self._speculator.stats()),
        }  # fmt: skip
        return found

    def check_integrity(self, timeout_s: float = 30.0) -> None:
        """Compares the books of blocks with the sequences that there are, between two steps. Raises
        EngineError where they differ.
        """
        self._between_steps(self._check_blocks, timeout_s)

    def drop_prefix_cache(self) -> None:
        """Forgets all cached prefixes, so that a measurement does not find its own prompts."""
        self._between_steps(self._forget_cached, 30.0)

    def settle(self) -> None:
        """Returns once the engine thread has heard what was sent to it before, between two steps.
        Raises EngineError where its step does not end in time.
        """
        self._between_steps(lambda: None, CLOSE_S + self.settings.call_timeout_s)

    def _between_steps(self, function: Callable[[], None], timeout_s: float) -> None:
        done, errors = Bell(), list[BaseException]()

        def call() -> None:
            try:
                function()
            except BaseException as error:  # noqa: BLE001 - it belongs to the thread that asked
                errors.append(error)
            finally:
                done.ring()

        self._door.send(BetweenSteps(call))
        if not done.wait(timeout_s):
            raise EngineError(f"the engine thread did not come to the end of its step within {timeout_s:g} s")
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Ends all requests with RequestCancelled, and the engine thread. It may be called
        twice.
        """
        atexit.unregister(self._at_exit)
        self._close(RequestCancelled("the engine is closed; open another one"))

    def _close(self, error: DflashError) -> None:
        self._stopping = True
        self._door.refuse(error)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S + self.settings.call_timeout_s)
            if self._thread.is_alive():
                log.warning("the engine thread did not end within %g s", CLOSE_S + self.settings.call_timeout_s)
                # Who still waits for it learns that no answer comes.
                self._door.watch(lambda: False)
        self._masks.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    # -- the engine thread -------------------------------------------------------------------------
    def _run(self) -> None:
        _core.set_canonical_float_mode()  # torch's operators and the sampler make bits here
        error: DflashError = RequestCancelled("the engine was closed before the request had ended")
        try:
            while not self._stopping:
                if self._scheduler.has_work:
                    self._step()
                else:
                    self._deliver(wait=True)
        except BaseException as found:  # noqa: BLE001 - whatever it is, callers must not wait for ever
            log.exception("the engine thread has ended by an error")
            error = found if isinstance(found, DflashError) else EngineError(f"the engine has ended by an error: {found!r}")
            self._stopping = True
        self._end_all(error)

    def _end_all(self, error: DflashError) -> None:
        """Ends whatever is open, and all that was submitted and not accepted yet. The books may
        contradict each other by now; every stream ends nevertheless.
        """
        self._door.refuse(error)
        reason = CANCELLED if isinstance(error, RequestCancelled) else ERROR
        try:
            self._deliver(wait=False)
        except Exception:
            log.exception("the last commands of an engine have failed")
        for request in [one for choices in self._open.values() for one in choices]:
            named = error.reworded(f"{request.name}: {error}")
            try:
                self._end(request, reason, named)
            except Exception:
                log.exception("%s: its blocks could not be given back", request.name)
                self._deltas.append((request.stream, TokenDelta(request.choice, finish_reason=reason, error=named)))
        self._exchange(wait=False)

    def _exchange(self, *, wait: bool) -> list[Command]:
        deltas, self._deltas = self._deltas, []
        if self._unwanted:
            self._masks.drop(self._unwanted)
            self._unwanted = []
        num_waiting = self._num_open - len(self._scheduler.running)
        began = time.perf_counter()
        commands = self._door.exchange(
            deltas, num_waiting=num_waiting, seconds_per_request=self._seconds_per_request, wait=wait and not deltas
        )
        if deltas:
            self._stats.deliver_s += time.perf_counter() - began
        return commands

    def _deliver(self, *, wait: bool) -> None:
        """Hands tokens to their callers, and does what was asked for meanwhile; where `wait` is set
        and there are no tokens, it waits until something is.
        """
        for command in self._exchange(wait=wait):
            if isinstance(command, Submit):
                self._accept(command.requests)
            elif isinstance(command, Cancel):
                for request in [one for one in self._open.get(command.request_id, ()) if command.choice in (None, one.choice)]:
                    self._end(request, CANCELLED)
            else:
                command.function()

    def _accept(self, requests: tuple[Request, ...]) -> None:
        leader, *followers = requests
        if not self._open:
            # How long nobody asked for anything says nothing about how fast requests end.
            self._ended_at = time.monotonic()
        self._open[leader.request_id] = list(requests)
        self._num_open += len(requests)
        for request in requests:
            request.order = next(self._orders)
        self._unasked += [request for request in requests if request.params.token_mask is not None]
        if self._forward.cuts_prompts:
            leader.followers = followers
            followers = []
        for request in (leader, *followers):
            self._scheduler.add(request)

    def _step(self) -> None:
        """The life of a step. Where it fails before its commit nothing has changed but that its
        requests end.
        """
        began = time.perf_counter()
        plan = self._plan()
        if plan is not None:
            try:
                with self._steps.begin(plan) as step:
                    step.run()
                    step.sample(self._plan_ahead)
            except EngineError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, other requests go on
                self._fail(plan, error)
            else:
                self._commit(step, began)
        self._deliver(wait=False)

    def _observe(self, plan: StepPlan, outcomes: Sequence[Outcome], seconds: float) -> None:
        """Lets the speculator learn from a clean step."""
        if not self._speculates:
            return
        decoding = {rows.request for rows in plan.rows if not rows.is_prefill}
        found: dict[Hashable, tuple[int, int]] = {
            one.request.key: (one.num_drafts, one.num_accepted) for one in outcomes if one.request in decoding
        }
        self._speculator.observe(found, plan.num_rows, seconds)

    def _ask_masks(self) -> None:
        """Has the masks of the next tokens computed while the next step is."""
        if not self._unasked:
            return
        asked, self._unasked = self._unasked, []
        try:
            # A mask sees the new tokens of its choice and not the prompt.
            num_queued = self._masks.request_all(
                [MaskRequest(one.key, one.params.token_mask, tuple(one.tokens[one.num_prompt :])) for one in asked]
            )
        except ConfigError as error:
            for request in asked:
                self._end(request, ERROR, error.reworded(f"{request.name}: {error}"))
        else:
            self._unasked = asked[num_queued:]

    def _plan(self) -> StepPlan | None:
        """Decides what the next step computes and makes it true but for its rows. None where all
        requests have ended, because their masks could not be asked for.
        """
        began = time.perf_counter()
        self._ask_masks()
        if not self._scheduler.has_work:
            return None
        ahead, self._ahead = self._ahead, None
        plan = None if ahead is None else self._scheduler.revise(ahead)
        if plan is None or not plan.rows:
            plan = self._scheduler.plan(self._drafts())
        self._scheduler.apply(plan)
        if not plan.rows and not plan.preempted:
            raise EngineError(f"{self._num_open} requests are open, and the scheduler found nothing to compute")
        now = time.monotonic()
        for admission in plan.admitted:
            request = admission.request
            self._stats.cached_tokens += len(admission.blocks) * self._forward.blocks.block_tokens
            request.times.scheduled = request.times.scheduled or now
        self._stats.plan_s += time.perf_counter() - began
        return plan

    def _drafts(self) -> dict[Request, Sequence[int]]:
        """Returns guesses for the requests that decode in the next step."""
        if not self._speculates:
            return {}
        decoding: dict[Hashable, Request] = {
            one.key: one for one in self._scheduler.running if len(one.tokens) - one.num_computed == 1
        }
        # A masked token waits for those before it, so that nothing can be guessed behind it.
        rows = [
            (key, one.tokens, 1 if one.params.token_mask is not None else one.params.max_tokens - one.num_generated)
            for key, one in decoding.items()
        ]
        budget = self.settings.max_batch_tokens - len(decoding)
        found = self._speculator.plan(rows, len(self._scheduler.running), budget)
        return {decoding[key]: drafts for key, drafts in found.items()}

    def _plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Plans the step behind one that is under way, where what that one leaves is known before
        its tokens are.
        """
        sampled = [request for rows in plan.rows for request in rows.sampled]
        is_known = (
            self.settings.plans_ahead
            and not self._speculates
            and not begins_followers(plan)
            and all(request.params.token_mask is None for request in sampled)
        )
        return self._scheduler.plan(ahead=plan) if is_known else None

    # -- the end of a step -------------------------------------------------------------------------
    def _commit(self, step: StepRun, began: float) -> None:
        """Makes the tokens of a clean step, which was planned from `began` on, those of its
        requests.
        """
        computed = time.perf_counter()
        plan, outcomes, stats = step.plan, step.outcomes, self._stats
        # Before requests end, which the speculator then forgets.
        self._observe(plan, outcomes, computed - began)
        stats.steps += 1
        stats.batch_sizes[len(plan.rows)] += 1
        got = {outcome.request: outcome for outcome in outcomes}
        for rows in plan.rows:
            if rows.is_prefill:
                is_again = rows.first + rows.count > rows.request.num_prompt or rows.request.num_generated > 0
                stats.recomputed_tokens += rows.count if is_again else 0
                stats.prompt_tokens += 0 if is_again else rows.count
            if rows.sampled and rows.request in got:
                self._scheduler.begin_followers(rows.request, [one for one in rows.sampled[1:] if one in got])
                if rows.request.followers:
                    self._scheduler.release_followers(rows.request)
            self._publish(rows.request)
        now = time.monotonic()
        for outcome in outcomes:
            self._advance(outcome, now)
        self._ahead = step.following
        stats.forward_s += step.forward_s
        stats.sample_s += step.sample_s
        stats.commit_s += time.perf_counter() - computed

    def _advance(self, outcome: Outcome, now: float) -> None:
        """Gives a request its tokens, as far as it goes on, and its caller too."""
        request = outcome.request
        if outcome.error is not None:
            self._end(request, ERROR, outcome.error.reworded(f"{request.name}: {outcome.error}"))
            return
        reason, taken = None, 0
        for token in outcome.token_ids:
            taken += 1
            if token in request.stop_token_ids:
                reason = STOP
            elif request.num_generated + taken >= request.params.max_tokens:
                reason = LENGTH
            if reason:
                break
        token_ids = outcome.token_ids[:taken]
        request.tokens.extend(token_ids)
        request.sampling.advance(token_ids)
        times = request.times
        times.first_token, times.latest_token = times.first_token or now, now
        times.scheduled = times.scheduled or now
        stats = self._stats
        stats.generated_tokens += taken
        stats.drafted_tokens += outcome.num_drafts
        stats.accepted_tokens += outcome.num_accepted
        logprobs = None if outcome.logprobs is None else outcome.logprobs[:taken]
        if reason is None:
            self._deltas.append((request.stream, TokenDelta(request.choice, token_ids, logprobs, time_s=now)))
            if request.params.token_mask is not None:
                self._unasked.append(request)
        else:
            self._end(request, reason, token_ids=token_ids, logprobs=logprobs)

    def _publish(self, request: Request) -> None:
        """Lets other prompts find the full blocks of a request."""
        sequence, hashes = request.sequence, request.hashes
        if self.settings.prefix_cache and self._forward.cuts_prompts and sequence is not None:
            if sequence.num_tokens - len(hashes.hashes) * hashes.block_tokens >= hashes.block_tokens:
                request.extend_hashes()
            sequence.blocks.publish(hashes.hashes)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """Ends the requests of a step that failed. Nothing else has changed."""
        self._stats.failed_steps += 1
        if not isinstance(error, DflashError):
            log.error("a step has failed", exc_info=error)
            error = DflashError(f"the step has failed: {shown(error)}")
        for rows in plan.rows:
            for request in (rows.request, *rows.request.followers):
                if request.finish_reason is None:
                    self._end(request, ERROR, error.reworded(f"{request.name}: {error}"))

    def _end(
        self, request: Request, reason: str, error: DflashError | None = None, *, token_ids: tuple[int, ...] = (),
        logprobs: Any = None,
    ) -> None:  # fmt: skip
        self._scheduler.end(request, reason)
        choices = self._open[request.request_id]
        choices.remove(request)
        for other in choices:
            if request in other.followers:
                other.followers.remove(request)
        self._speculator.forget(request.key)
        if request.params.token_mask is not None:
            self._unwanted.append(request.key)
            self._unasked = [other for other in self._unasked if other is not request]
        if not choices:
            del self._open[request.request_id]
        self._num_open -= 1
        self._stats.ended(request, reason)
        now = time.monotonic()
        self._seconds_per_request += (now - self._ended_at - self._seconds_per_request) / 16
        self._ended_at = now
        self._deltas.append((request.stream, TokenDelta(request.choice, token_ids, logprobs, reason, error, now)))

    def _forget_cached(self) -> None:
        # A plan that was made ahead may adopt what is forgotten now.
        self._ahead = None
        self._forward.blocks.forget_cached()

    def _check_blocks(self) -> None:
        tables = [one.sequence.blocks.block_table for one in self._scheduler.running if one.sequence is not None]
        self._forward.blocks.check_integrity(tables)


def _close_at_exit(engine: Engine) -> Callable[[], None]:
    """Has an engine closed before the interpreter ends: its thread is in compiled code then."""
    reference = weakref.ref(engine)

    def close() -> None:
        found = reference()
        if found is not None:
            found.close()

    atexit.register(close)
    return close
