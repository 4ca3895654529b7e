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
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, overload

from dflash_moe import _core
from dflash_moe.engine.delivery import Bell, BetweenSteps, Cancel, EngineDoor, Outbox, Submit, TokenStream
from dflash_moe.engine.engine_settings import EngineSettings
from dflash_moe.engine.engine_stats import EngineStats, StepTimes
from dflash_moe.engine.open_requests import OpenRequests
from dflash_moe.engine.prompt_check import LengthLimit, LengthWarning, checked_prompt, length_limit
from dflash_moe.engine.request import CANCELLED, ERROR, LENGTH, STOP, Request, RequestTimes, TokenDelta
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.engine.sampling.sampling_state import SamplingState
from dflash_moe.engine.schedule import StepPlan
from dflash_moe.engine.step_planner import StepPlanner
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
        self._stats = EngineStats()
        self._planner = StepPlanner(forward, settings, self._stats)
        self._steps = StepRuns(forward, self._planner.masks)
        self._length_warning = LengthWarning(forward)
        self._door = EngineDoor(settings.max_queue, lock)
        self._open = OpenRequests(self._door, self._planner, self._stats)
        self._ids = itertools.count(1)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="dflash-moe-engine", daemon=True)
        self._door.watch(self._thread.is_alive)
        self._at_exit = _close_at_exit(self)
        self._thread.start()

    # -- any thread ------------------------------------------------------------------------------
    @overload
    def submit(
        self, token_ids: Sequence[int], params: SamplingParams | None = None, *, outbox: None = None, cache_salt: bytes = b""
    ) -> TokenStream: ...
    @overload
    def submit(
        self, token_ids: Sequence[int], params: SamplingParams | None = None, *, outbox: Outbox, cache_salt: bytes = b""
    ) -> int: ...
    def submit(
        self, token_ids: Sequence[int], params: SamplingParams | None = None, *, outbox: Outbox | None = None,
        cache_salt: bytes = b"",
    ) -> TokenStream | int:  # fmt: skip
        """Has a prompt completed, and returns the stream of its tokens; with an `outbox`, to which
        they go instead, the id of the request. What the prefix cache has of a prompt is found by
        requests with the same `cache_salt` alone.

        Raises ConfigError for a prompt or parameters that can never be computed, QueueFull where
        too many wait, and RequestCancelled where the engine is drained or closed, or the outbox has
        failed; each names the request.
        """
        params = SamplingParams() if params is None else params
        request_id = next(self._ids)
        name = f"request {request_id}"
        prompt = checked_prompt(self._forward, name, token_ids, params, self.settings)
        self._length_warning.look(name, len(prompt), params.max_tokens)
        if not isinstance(cache_salt, bytes):
            raise ConfigError(f"{name}: cache_salt {shown(cache_salt)} is not allowed; allowed: bytes")
        if outbox is not None and outbox.has_failed:
            raise RequestCancelled(f"{name}: its outbox has failed, and takes no tokens any more; make another one")
        sink = TokenStream(self._door, request_id, params.n) if outbox is None else outbox
        try:
            self._door.send(Submit(tuple(self._requests(request_id, prompt, params, sink, cache_salt))))
        except DflashError as error:
            raise error.reworded(f"{name}: {error}") from None
        return request_id if isinstance(sink, Outbox) else sink

    def cancel(self, request_id: int, choice: int | None = None) -> None:
        """Ends a request, or one choice of it, within one step. Where it has ended already, nothing
        happens.
        """
        self._door.send(Cancel(request_id, choice))

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a request unless it ignores them."""
        return self._eos

    @property
    def length_limit(self) -> LengthLimit:
        """The most tokens that a request may have, its prompt included, and why no more."""
        return length_limit(self._forward, self.settings)

    def room(self, num_prompt: int) -> int:
        """Returns the most `max_tokens` that a prompt of so many tokens may ask for, 0 where it is
        too long for any.
        """
        return max(0, self.length_limit.num_tokens - num_prompt)

    def refusal(self) -> str:
        """Returns why no request is taken now, empty where they are."""
        return self._door.refusal()

    def drain(self, deadline_s: float) -> bool:
        """Takes no new requests from now on, waits at most `deadline_s` seconds until the open ones
        have ended, and then cancels the rest. Returns whether all have ended by themselves.

        Refused and cancelled are requests with RequestCancelled of code "draining"; all else goes
        on, and the engine has yet to be closed. Raises what has closed it, where something has.
        """
        error = RequestCancelled("the engine is draining and takes no more requests; send them to another one", code="draining")
        self._door.drain(error)
        drained = Bell()
        self._door.send(BetweenSteps(lambda: self._open.drained.append(drained)))
        if drained.wait(max(0.0, deadline_s)):
            # An engine that was closed meanwhile, or has died, has ended them.
            return not self._stopping
        late = error.reworded(f"it had not ended {deadline_s:g} s after the engine began to drain")
        num_late: list[int] = []

        def end_late() -> None:
            num_late.append(self._open.num)
            self._open.end_all(CANCELLED, late)

        self._between_steps(end_late, CLOSE_S + self.settings.call_timeout_s)
        return num_late == [0]

    def _requests(
        self, request_id: int, prompt: list[int], params: SamplingParams, sink: TokenStream | Outbox, cache_salt: bytes
    ) -> list[Request]:
        seed = secrets.randbits(63) if params.seed is None else params.seed
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        max_length = len(prompt) + params.max_tokens
        now = time.monotonic()
        return [
            Request(
                request_id, choice, 0, list(prompt), len(prompt), params,
                SamplingState(params, seed=seed, choice=choice, prompt_ids=prompt),
                self._forward.block_hashes(max_length).salted(cache_salt), sink, stops, times=RequestTimes(submitted=now),
            )
            for choice in range(params.n)
        ]  # fmt: skip

    def stats(self) -> dict[str, Any]:
        """Returns what was counted so far: steps, tokens, blocks, requests and times."""
        pool = self._forward.blocks
        found = self._stats.report()
        found |= {
            "read_back_bytes": self._steps.read_back_bytes,
            "waiting": self._open.num - len(self._planner.scheduler.running),
            "running": len(self._planner.scheduler.running),
            "preemptions": self._planner.scheduler.num_preempted,
            "blocks": {
                "total": pool.num_blocks, "free": pool.num_free, "cached": pool.num_cached, "evicted": pool.num_evicted,
                "tokens": pool.block_tokens,
            },
            **self._forward.stats(),
            "speculation": dataclasses.asdict(self._planner.speculator.stats()),
        }  # fmt: skip
        return found

    def record_steps(self, steps: deque[StepTimes] | None) -> None:
        """Has the times of all later steps appended, until it is called with None."""
        self._between_steps(lambda: setattr(self._stats, "recorded", steps), CLOSE_S + self.settings.call_timeout_s)

    def check_integrity(self, timeout_s: float = 30.0) -> None:
        """Compares the books of blocks with the sequences that there are, between two steps. Raises
        EngineError where they differ.
        """
        self._between_steps(self._planner.check_blocks, timeout_s)

    def drop_prefix_cache(self) -> None:
        """Forgets all cached prefixes, so that a measurement does not find its own prompts."""
        self._between_steps(self._planner.forget_cached, 30.0)

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
        self._planner.masks.close()

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
                if self._planner.scheduler.has_work:
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
        self._open.end_all(reason, error)
        self._open.exchange(wait=False, is_stopping=True)
        self._open.ring_drained(always=True)

    def _deliver(self, *, wait: bool) -> None:
        """Hands tokens to their callers, and does what was asked for meanwhile; where `wait` is set
        and there are no tokens, it waits until something is.
        """
        for command in self._open.exchange(wait=wait, is_stopping=self._stopping):
            if isinstance(command, Submit):
                self._open.add(command.requests)
            elif isinstance(command, Cancel):
                self._open.cancel(command.request_id, command.choice)
            else:
                command.function()
        self._open.ring_drained(always=False)

    def _step(self) -> None:
        """The life of a step. Where it fails before its commit nothing has changed but that its
        requests end.
        """
        began = time.perf_counter()
        for request, reason in self._planner.ask_masks():
            self._open.end(request, ERROR, reason)
        # All may have ended, because their masks could not be asked for.
        if self._planner.scheduler.has_work:
            plan = self._planner.plan()
            try:
                with self._steps.begin(plan) as step:
                    step.run()
                    step.sample(self._planner.plan_ahead)
            except EngineError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, other requests go on
                self._fail(plan, error)
            else:
                self._commit(step, began)
        self._deliver(wait=False)

    # -- the end of a step -------------------------------------------------------------------------
    def _commit(self, step: StepRun, began: float) -> None:
        """Makes the tokens of a clean step, which was planned from `began` on, those of its
        requests.
        """
        computed = time.perf_counter()
        plan, outcomes, stats, scheduler = step.plan, step.outcomes, self._stats, self._planner.scheduler
        # Before requests end, which the speculator then forgets.
        self._planner.observe(plan, outcomes, computed - began)
        stats.steps += 1
        stats.batch_sizes[len(plan.rows)] += 1
        got = {outcome.request: outcome for outcome in outcomes}
        for rows in plan.rows:
            if rows.is_prefill:
                is_again = rows.first + rows.count > rows.request.num_prompt or rows.request.num_generated > 0
                stats.recomputed_tokens += rows.count if is_again else 0
                stats.prompt_tokens += 0 if is_again else rows.count
            if rows.sampled and rows.request in got:
                scheduler.begin_followers(rows.request, [one for one in rows.sampled[1:] if one in got])
                if rows.request.followers:
                    scheduler.release_followers(rows.request)
            self._planner.publish(rows.request)
        now = time.monotonic()
        for outcome in outcomes:
            self._advance(outcome, now)
        self._planner.follow(step.following)
        stats.forward_s += step.forward_s
        stats.sample_s += step.sample_s
        ended = time.perf_counter()
        stats.commit_s += ended - computed
        if stats.recorded is not None:
            stats.recorded.append(StepTimes(began, *step.times, ended, plan.num_rows, len(plan.rows)))
        stats.histograms["step_s"].add(ended - began)

    def _advance(self, outcome: Outcome, now: float) -> None:
        """Gives a request its tokens, as far as it goes on, and its caller too."""
        request = outcome.request
        if outcome.error is not None:
            self._open.end(request, ERROR, outcome.error.reworded(f"{request.name}: {outcome.error}"))
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
        stats = self._stats
        stats.advanced(request, taken, now)
        stats.drafted_tokens += outcome.num_drafts
        stats.accepted_tokens += outcome.num_accepted
        logprobs = None if outcome.logprobs is None else outcome.logprobs[:taken]
        if reason is None:
            self._open.say(request, TokenDelta(request.choice, token_ids, logprobs, time_s=now))
            self._planner.need_masks([request])
        else:
            self._open.end(request, reason, token_ids=token_ids, logprobs=logprobs)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """Ends the requests of a step that failed. Nothing else has changed."""
        self._stats.failed_steps += 1
        if not isinstance(error, DflashError):
            log.error("a step has failed", exc_info=error)
            error = DflashError(f"the step has failed: {shown(error)}")
        for rows in plan.rows:
            for request in (rows.request, *rows.request.followers):
                if request.finish_reason is None:
                    self._open.end(request, ERROR, error.reworded(f"{request.name}: {error}"))


def _close_at_exit(engine: Engine) -> Callable[[], None]:
    """Has an engine closed before the interpreter ends: its thread is in compiled code then."""
    reference = weakref.ref(engine)

    def close() -> None:
        found = reference()
        if found is not None:
            found.close()

    atexit.register(close)
    return close
