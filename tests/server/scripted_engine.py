"""An engine without a model, for the front: a thread gives each open request a token a step, from
answers that the test writes. It stands behind the same socket as the real one.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_moe.engine.engine_stats import EngineStats
from dflash_moe.engine.request import CANCELLED, ERROR, LENGTH, STOP, TokenDelta
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.engine.sampling.token_logprobs import TokenLogprobs
from dflash_moe.errors import DflashError, QueueFull
from dflash_moe.server.relay import Deliver

MODEL = Path(__file__).parents[2] / "bench" / "demo_model" / "dflash_moe_demo" / "model"
VOCAB_SIZE = 4096
MAX_MODEL_LEN = 512
MAX_QUEUE = 1024
# What it says that each request has waited.
QUEUE_S = 0.25


@dataclass(slots=True)
class ScriptedRequest:
    """An open choice, and what is left of its answer."""

    request_id: int
    choice: int
    prompt: list[int]
    params: SamplingParams
    salt: bytes
    deliver: Deliver
    left: list[int] = field(default_factory=list)
    num_given: int = 0


class ScriptedEngine:
    """`answer` says what a choice is answered; by default its own prompt, again and again. `step_s`
    is the time of a step, and `refusal` is raised for new requests.
    """

    def __init__(self, answer: Callable[[list[int], int], Sequence[int]] | None = None, step_s: float = 0.0005) -> None:
        self.answer = answer or (lambda prompt, _choice: prompt * (1 + MAX_MODEL_LEN // len(prompt)))
        self.step_s = step_s
        self.refusal: DflashError | None = None
        self.failure: DflashError | None = None
        self.unready = ""
        self.is_up = True
        self.submitted: list[tuple[list[int], SamplingParams, bytes]] = []
        self.grammars: list[str] = []
        self.cancelled: list[tuple[int, int | None]] = []
        self.open: list[ScriptedRequest] = []
        # What it says that workers have done, as `server.snapshot` has it.
        self.workers: dict[str, dict[str, Any]] = {}
        self.stats = EngineStats()
        self._is_draining = False
        self._ids = itertools.count(1)
        self._lock = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def sink(self, deliver: Deliver) -> Any:
        return deliver

    def submit(self, token_ids: Sequence[int], params: SamplingParams, sink: Any, salt: bytes) -> int:
        if self.refusal is not None:
            raise self.refusal
        if self._is_draining:
            raise QueueFull("draining", code="draining")
        with self._lock:
            request_id = next(self._ids)
            self.stats.prompt_tokens += len(token_ids)
            self.submitted.append((list(token_ids), params, salt))
            for choice in range(params.n):
                one = ScriptedRequest(request_id, choice, list(token_ids), params, salt, sink)
                one.left = list(self.answer(one.prompt, choice))
                self.open.append(one)
            self._lock.notify()
        return request_id

    def mask(self, grammar: str) -> Any:
        self.grammars.append(grammar)
        return lambda _token_ids: None

    def cancel(self, request_id: int, choice: int | None) -> None:
        with self._lock:
            self.cancelled.append((request_id, choice))
            ended = [one for one in self.open if one.request_id == request_id and choice in (None, one.choice)]
            self.open = [one for one in self.open if one not in ended]
        for one in ended:
            one.deliver([(request_id, TokenDelta(one.choice, finish_reason=CANCELLED))])

    def is_alive(self) -> bool:
        return self.is_up

    def unready_reason(self) -> str:
        return self.unready

    def snapshot(self) -> dict[str, Any]:
        report = self.stats.report()
        return {
            "engine": {
                **report, "batch_sizes": list(report["batch_sizes"].items()), "waiting": 0, "running": len(self.open),
                "preemptions": 0, "blocks": {"total": 64, "free": 48, "cached": 8, "evicted": 0, "tokens": 16},
            },
            "workers": self.workers, "mode": "auto", "mode_reason": "as asked", "fallback_calls": 0, "unready": self.unready,
        }  # fmt: skip

    def drain(self, deadline_s: float) -> bool:
        self._is_draining = True
        deadline = time.monotonic() + deadline_s
        while self.open and time.monotonic() < deadline:
            time.sleep(0.005)
        left = list(self.open)
        for one in left:
            self.cancel(one.request_id, one.choice)
        return not left

    def close(self) -> None:
        with self._lock:
            self._is_over = True
            self._lock.notify()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._is_over:
            with self._lock:
                if not self.open:
                    self._lock.wait(0.1)
                    continue
                self.stats.steps += 1
                self.stats.batch_sizes[len(self.open)] += 1
                self.stats.histograms["step_s"].add(self.step_s)
                by_sink: dict[Any, list[tuple[int, TokenDelta]]] = {}
                for one in list(self.open):
                    by_sink.setdefault(one.deliver, []).append((one.request_id, self._step(one)))
            for deliver, deltas in by_sink.items():
                deliver(deltas)
            time.sleep(self.step_s)

    def _step(self, one: ScriptedRequest) -> TokenDelta:
        if self.failure is not None and one.num_given >= 2:
            self.open.remove(one)
            return TokenDelta(one.choice, finish_reason=ERROR, error=self.failure)
        token = one.left.pop(0)
        one.num_given += 1
        self.stats.generated_tokens += 1
        reason = LENGTH if one.num_given == one.params.max_tokens else STOP if not one.left else None
        logprobs = None
        if one.params.logprobs is not None:
            best = tuple((token + place, -0.5 - place) for place in range(one.params.logprobs))
            logprobs = (TokenLogprobs(token, -0.5, 1, best),)
        if reason is None:
            return TokenDelta(one.choice, (token,), logprobs)
        self.open.remove(one)
        self.stats.finished[reason] += 1
        self.stats.histograms["queue_s"].add(QUEUE_S)
        cached = len(one.prompt) // 16 * 16
        return TokenDelta(one.choice, (token,), logprobs, reason, num_cached_tokens=cached, queue_s=QUEUE_S)
