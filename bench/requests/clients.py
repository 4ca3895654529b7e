"""The clients of engine_requests.py: threads that keep an engine supplied with requests, take their
tokens, cancel some, and watch that each ends as it should and that memory does not grow.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.requests.drawn import Drawn
from dflash_moe.telemetry.memory import process_memory

# So long no token of a request may come. On a machine with a core to itself a step takes
# milliseconds, and whoever was preempted waits for those that came earlier.
STALL_S = 120.0
# A run with so many faults has said enough.
MOST_FAULTS = 20
# Looks at memory in a run, at equal numbers of finished requests.
NUM_LOOKS = 200
ENDS = frozenset({"stop", "length", "cancelled"})


@dataclass(frozen=True, slots=True)
class Outcome:
    """The tokens of each choice of a request, and why each ended."""

    number: int
    tokens: tuple[tuple[int, ...], ...]
    reasons: tuple[str, ...]


class Fault(Exception):
    """A request that did not end as it should, said in a sentence."""


def run_request(engine: Any, params: Any, drawn: Drawn, stall_s: float = STALL_S) -> Outcome:
    """Submits a request, takes its tokens to the end, and cancels it when that was drawn. Raises
    Fault, and whatever the engine raises.
    """
    stream = engine.submit(list(drawn.prompt_ids), params)
    timer = None
    if drawn.cancel_after_s is not None:
        timer = threading.Timer(drawn.cancel_after_s, stream.cancel)
        timer.start()
    try:
        return _taken(stream, drawn, stall_s)
    except BaseException:
        stream.cancel()
        raise
    finally:
        if timer is not None:
            timer.cancel()


def _taken(stream: Any, drawn: Drawn, stall_s: float) -> Outcome:
    tokens: list[list[int]] = [[] for _ in range(drawn.num_choices)]
    reasons: list[str | None] = [None] * drawn.num_choices
    left = drawn.cancel_after_tokens
    while None in reasons:
        if left is not None and left <= 0:
            stream.cancel()
            left = None
        deltas = stream.take(stall_s)
        if not deltas:
            raise Fault(f"nothing came for {stall_s:g} s, or the stream ended before its choices; they are at {reasons}")
        for delta in deltas:
            if reasons[delta.choice] is not None:
                raise Fault(f"choice {delta.choice} had ended ({reasons[delta.choice]}), and more came")
            if delta.finish_reason not in (None, *ENDS):
                raise Fault(f"choice {delta.choice} ended with {delta.finish_reason}: {delta.error}")
            tokens[delta.choice] += delta.token_ids
            reasons[delta.choice] = delta.finish_reason
            left = None if left is None else left - len(delta.token_ids)
    return _judged(drawn, Outcome(drawn.number, tuple(map(tuple, tokens)), tuple(map(str, reasons))))


def _judged(drawn: Drawn, outcome: Outcome) -> Outcome:
    is_cancelled = drawn.cancel_after_tokens is not None or drawn.cancel_after_s is not None
    for choice, (tokens, reason) in enumerate(zip(outcome.tokens, outcome.reasons, strict=True)):
        if len(tokens) > drawn.max_tokens or (reason == "length" and len(tokens) < drawn.max_tokens):
            raise Fault(f"choice {choice} has {len(tokens)} tokens of {drawn.max_tokens}, and ended with {reason}")
        if reason == "cancelled" and not is_cancelled:
            raise Fault(f"choice {choice} was cancelled by nobody")
    return outcome


@dataclass(slots=True)
class Trace:
    """Anonymous memory over the run, at each look: requests finished until then, seconds since the
    beginning, bytes.
    """

    finished: list[int] = field(default_factory=list)
    elapsed_s: list[float] = field(default_factory=list)
    anonymous_bytes: list[int] = field(default_factory=list)

    def look(self, finished: int, elapsed_s: float, anonymous_bytes: int) -> None:
        """Adds a look."""
        self.finished.append(finished)
        self.elapsed_s.append(elapsed_s)
        self.anonymous_bytes.append(anonymous_bytes)

    def grown_bytes(self) -> int:
        """Returns by how much the last quarter's median exceeds the second quarter's. In the first
        one the pool's pages and everybody's scratch memory are touched.
        """
        quarter = len(self.anonymous_bytes) // 4
        if not quarter:
            return 0
        before = statistics.median(self.anonymous_bytes[quarter : 2 * quarter])
        return round(statistics.median(self.anonymous_bytes[-quarter:]) - before)


@dataclass(slots=True)
class Load:
    """A run of `num_requests` requests. `keep` gets the outcomes for which `is_kept` says so, from
    several threads, one at a time. `reasons` counts choices by why they ended.
    """

    engine: Any
    draw: Callable[[int], Drawn]
    make_params: Callable[[Drawn], Any]
    num_requests: int
    is_kept: Callable[[int], bool]
    keep: Callable[[Outcome], None]
    say: Callable[[str], None] = lambda _line: None
    stall_s: float = STALL_S
    finished: int = 0
    tokens: int = 0
    forked: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    trace: Trace = field(default_factory=Trace)
    seconds: float = 0.0
    _next: int = field(default=0, init=False)
    _began: float = field(default=0.0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def run(self, num_clients: int) -> None:
        """Keeps `num_clients` requests outstanding until all have ended, or faults are too many."""
        self._began = time.monotonic()
        clients = [threading.Thread(target=self._serve, name=f"client {place}") for place in range(num_clients)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        self.seconds = time.monotonic() - self._began

    def _serve(self) -> None:
        while (number := self._take_number()) is not None:
            drawn = self.draw(number)
            try:
                outcome = run_request(self.engine, self.make_params(drawn), drawn, self.stall_s)
            except Exception as error:  # noqa: BLE001 - whatever a request ends with is this campaign's finding
                self._add_fault(number, error)
            else:
                self._add(drawn, outcome)

    def _take_number(self) -> int | None:
        with self._lock:
            if self._next >= self.num_requests or len(self.faults) >= MOST_FAULTS:
                return None
            self._next += 1
            return self._next - 1

    def _add(self, drawn: Drawn, outcome: Outcome) -> None:
        with self._lock:
            self.finished += 1
            self.tokens += sum(map(len, outcome.tokens))
            self.forked += drawn.num_choices > 1
            self.reasons.update(outcome.reasons)
            if self.is_kept(drawn.number):
                self.keep(outcome)
            every = max(1, self.num_requests // NUM_LOOKS)
            if self.finished % every == 0:
                self.trace.look(self.finished, time.monotonic() - self._began, process_memory().anonymous_bytes)
            if self.finished % (20 * every) == 0:
                self.say(f"{self.finished} of {self.num_requests} requests, {self.tokens} tokens")

    def _add_fault(self, number: int, error: Exception) -> None:
        said = str(error) if isinstance(error, Fault) else f"{type(error).__name__}: {error}"
        with self._lock:
            self.faults.append(f"request {number}: {said}")
            self.say(self.faults[-1])
