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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_moe.engine.block_hashes import BlockHashes
from dflash_moe.engine.delivery import Call, Cancel, Command, EngineDoor, Submit, TokenStream
from dflash_moe.engine.engine_stats import EngineStats
from dflash_moe.engine.forward import Forward
from dflash_moe.engine.request import CANCELLED, ERROR, LENGTH, STOP, Request, RequestTimes, TokenDelta
from dflash_moe.engine.sampling_params import SamplingParams
from dflash_moe.engine.sampling_state import SamplingState
from dflash_moe.engine.schedule import Limits, Scheduler, StepPlan, begins_followers
from dflash_moe.engine.speculate import Speculator
from dflash_moe.engine.step_run import Outcome, StepRun
from dflash_moe.engine.token_masks import MaskRequest, MaskThread
from dflash_moe.errors import ConfigError, DflashError, EngineError, RequestCancelled, WorkerError, shown

if TYPE_CHECKING:
    from dflash_moe.runtime.expert_runtime import ExpertRuntime

log = logging.getLogger(__name__)

# The engine thread has so long to end its step when the engine is closed, beside the time that a
# call of experts may take.
CLOSE_S = 10.0
_MAX_ID = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What bounds an engine. The keys are those of the section `engine` of a topology."""

    max_batch_tokens: int = 1024
    max_requests: int = 64
    max_queue: int = 1024
    order: str = "fifo"
    speculate: str = "off"
    prefix_cache: bool = True
    # Whether the next step is planned while the device still computes, which it does on a card.
    plans_ahead: bool = False
    call_timeout_s: float = 30.0
    # The share of its layer's experts that a row reads, which prices drafts.
    expert_share: float = 1 / 16

    @classmethod
    def of(cls, runtime: ExpertRuntime) -> EngineSettings:
        """Returns those of a runtime and its model."""
        names = ("max_batch_tokens", "max_requests", "max_queue", "order", "speculate", "prefix_cache", "call_timeout_s")
        share = max(layer.top_k / layer.num_experts for layer in runtime.layers)
        return cls(
            **{name: getattr(runtime.settings, name) for name in names},
            plans_ahead=runtime.host_device != "cpu", expert_share=share,
        )  # fmt: skip


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
        self._steps = StepRun(forward, self._masks)
        self._stats = EngineStats()
        self._door = EngineDoor(settings.max_queue, lock)
        self._ids = itertools.count(1)
        self._orders = itertools.count()
        # Choices that have not ended, by request id.
        self._open: dict[int, list[Request]] = {}
        self._num_open = 0
        self._deltas: list[tuple[TokenStream, TokenDelta]] = []
        self._ended_at = time.monotonic()
        self._seconds_per_request = 0.0
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
        params = params or SamplingParams()
        request_id = next(self._ids)
        prompt = self._check(f"request {request_id}", token_ids, params)
        stream = TokenStream(self._door, request_id, params.n)
        self._door.send(Submit(tuple(self._requests(request_id, prompt, params, stream))))
        return stream

    def _check(self, name: str, token_ids: Sequence[int], params: SamplingParams) -> list[int]:
        prompt = [_token_id(name, token) for token in token_ids]
        if not prompt:
            raise ConfigError(f"{name}: the prompt has no tokens; at least 1 is needed")
        wrong = next((token for token in prompt if token >= self._forward.vocab_size), None)
        if wrong is not None:
            raise ConfigError(
                f"{name}: token id {wrong} is not allowed; the model has the ids 0..{self._forward.vocab_size - 1}"
            )
        try:
            params.check_ids(self._forward.vocab_size)
            self._forward.check_length(len(prompt) + params.max_tokens)
        except ConfigError as error:
            text = f"{name}: prompt of {len(prompt)} tokens and max_tokens {params.max_tokens}: {error}"
            raise error.reworded(text) from None
        return prompt

    def _requests(self, request_id: int, prompt: list[int], params: SamplingParams, stream: TokenStream) -> list[Request]:
        seed = secrets.randbits(63) if params.seed is None else params.seed
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        rotary = self._forward.prefix_seed(len(prompt) + params.max_tokens)
        now = time.monotonic()
        return [
            Request(
                request_id, choice, 0, list(prompt), len(prompt), params,
                SamplingState(params, seed=seed, choice=choice, prompt_ids=prompt),
                BlockHashes(rotary, self._forward.blocks.block_tokens), stream, stops, times=RequestTimes(submitted=now),
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

    def drop_prefix_cache(self, timeout_s: float = 30.0) -> None:
        """Forgets all cached prefixes, so that a measurement does not find its own prompts."""
        self._between_steps(self._forward.blocks.forget_cached, timeout_s)

    def _between_steps(self, function: Callable[[], None], timeout_s: float) -> None:
        done = threading.Event()
        errors: list[BaseException] = []

        def call() -> None:
            try:
                function()
            except BaseException as error:  # noqa: BLE001 - it belongs to the thread that asked
                errors.append(error)
            done.set()

        self._door.send(Call(call))
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
        left = [request for command in self._door.close(error) if isinstance(command, Submit) for request in command.requests]
        self._door.deliver([(one.stream, TokenDelta(one.choice, finish_reason=CANCELLED, error=error)) for one in left])
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S + self.settings.call_timeout_s)
            if self._thread.is_alive():
                log.warning("the engine thread did not end within %g s", CLOSE_S + self.settings.call_timeout_s)
        self._masks.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    # -- the engine thread -------------------------------------------------------------------------
    def _run(self) -> None:
        error: DflashError = RequestCancelled("the engine was closed before the request had ended")
        try:
            ahead: StepPlan | None = None
            while True:
                idle = not self._scheduler.has_work and not self._stopping
                self._serve(self._exchange(wait=idle))
                if self._stopping:
                    break
                if self._scheduler.has_work:
                    ahead = self._step(ahead)
        except BaseException as found:  # noqa: BLE001 - whatever it is, callers must not wait for ever
            log.exception("the engine thread has ended by an error")
            error = found if isinstance(found, DflashError) else EngineError(f"the engine has ended by an error: {found!r}")
            self._stopping = True
        for command in self._door.close(error):
            self._serve([command])
        for request in [one for choices in self._open.values() for one in choices]:
            self._end(request, CANCELLED if isinstance(error, RequestCancelled) else ERROR, error)
        self._exchange(wait=False)

    def _exchange(self, *, wait: bool) -> list[Command]:
        deltas, self._deltas = self._deltas, []
        num_waiting = self._num_open - len(self._scheduler.running)
        began = time.perf_counter()
        commands = self._door.exchange(
            deltas, num_waiting=num_waiting, seconds_per_request=self._seconds_per_request, wait=wait and not deltas
        )
        if deltas:
            self._stats.deliver_s += time.perf_counter() - began
        return commands

    def _serve(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Submit):
                self._accept(command.requests)
            elif isinstance(command, Cancel):
                for request in [one for one in self._open.get(command.request_id, ()) if command.choice in (None, one.choice)]:
                    self._end(request, CANCELLED)
            else:
                command.function()

    def _accept(self, requests: tuple[Request, ...]) -> None:
        leader, *followers = requests
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

    def _step(self, ahead: StepPlan | None) -> StepPlan | None:
        """Plans, computes and commits one step; returns the plan of the next one where it was made
        meanwhile.
        """
        began = time.perf_counter()
        self._ask_masks()
        plan = self._plan(ahead)
        planned = time.perf_counter()
        self._stats.plan_s += planned - began
        following: list[StepPlan] = []
        launched = (lambda: following.append(self._scheduler.plan(ahead=plan))) if self._may_plan_ahead(plan) else None
        try:
            outcomes, is_whole, times = self._steps.run(plan, launched)
        except (ConfigError, WorkerError, DflashError) as error:
            if isinstance(error, EngineError):
                raise
            self._fail(plan, error)
            return None
        computed = time.perf_counter()
        self._commit(plan, outcomes)
        self._stats.forward_s += times.forward_s
        self._stats.sample_s += times.sample_s
        self._observe(plan, outcomes, computed - began)
        self._stats.commit_s += time.perf_counter() - computed
        return following[0] if following and is_whole else None

    def _observe(self, plan: StepPlan, outcomes: Sequence[Outcome], seconds: float) -> None:
        """Lets the speculator learn from a step that is committed."""
        if not self._speculates:
            return
        decoding = {rows.request for rows in plan.rows if not rows.is_prefill}
        found: dict[Hashable, tuple[int, int]] = {
            one.request.key: (one.num_drafts, one.num_accepted) for one in outcomes if one.request in decoding
        }
        self._speculator.observe(found, plan.num_rows, seconds)

    def _ask_masks(self) -> None:
        """Has the masks of the next tokens computed while the next step is."""
        wanted = [one for one in self._unasked if one.finish_reason is None]
        if wanted:
            asked = [MaskRequest(one.key, one.params.token_mask, tuple(one.tokens)) for one in wanted]
            wanted = wanted[self._masks.request_all(asked) :]
        self._unasked = wanted

    def _plan(self, ahead: StepPlan | None) -> StepPlan:
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

    def _may_plan_ahead(self, plan: StepPlan) -> bool:
        """Says whether what a step leaves behind is known before its tokens are."""
        sampled = [request for rows in plan.rows for request in rows.sampled]
        return (
            self.settings.plans_ahead
            and not self._speculates
            and not begins_followers(plan)
            and all(request.params.token_mask is None for request in sampled)
        )

    # -- the end of a step -------------------------------------------------------------------------
    def _commit(self, plan: StepPlan, outcomes: Sequence[Outcome]) -> None:
        """Makes the tokens of a clean step those of its requests."""
        stats = self._stats
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

    def _advance(self, outcome: Outcome, now: float) -> None:
        """Gives a request its tokens, as far as it goes on, and its caller too."""
        request = outcome.request
        if outcome.error is not None:
            self._end(request, ERROR, outcome.error)
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

    def _fail(self, plan: StepPlan, error: DflashError) -> None:
        """Ends the requests of a step that failed. Nothing else has changed."""
        self._stats.failed_steps += 1
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
            self._masks.drop((request.key,))
        if not choices:
            del self._open[request.request_id]
        self._num_open -= 1
        self._stats.ended(request, reason)
        now = time.monotonic()
        self._seconds_per_request += (now - self._ended_at - self._seconds_per_request) / 16
        self._ended_at = now
        self._deltas.append((request.stream, TokenDelta(request.choice, token_ids, logprobs, reason, error, now)))

    def _check_blocks(self) -> None:
        tables = [one.sequence.blocks.block_table for one in self._scheduler.running if one.sequence is not None]
        self._forward.blocks.check_integrity(tables)


def _token_id(name: str, token: Any) -> int:
    if isinstance(token, bool) or not hasattr(token, "__index__") or not 0 <= int(token) <= _MAX_ID:
        raise ConfigError(f"{name}: token id {shown(token)} is not allowed; allowed: whole numbers from 0 on")
    return int(token)


def _close_at_exit(engine: Engine) -> Callable[[], None]:
    """Has an engine closed before the interpreter ends: its thread is in compiled code then."""
    reference = weakref.ref(engine)

    def close() -> None:
        found = reference()
        if found is not None:
            found.close()

    atexit.register(close)
    return close
