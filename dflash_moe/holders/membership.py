"""When a worker that is lost is started again, dialled again, or left alone: a state machine for
the life of each member of a runtime, without clock, threads and I/O.

Somebody else carries its orders out and says what came of them (worker_keeper.py, and a simulator
under virtual time). Every order bears the number of the attempt that it belongs to, and what is
said of an earlier attempt changes nothing. So an answer that comes late does no harm.

    starting -> joining -> ready -> lost -> waiting -> starting ...
                                         -> quarantined (until it is released)
    any of them -> draining -> gone
    ready -> draining -> starting ... where it is recycled
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import enum
import random
from collections import deque
from dataclasses import dataclass, field, replace

# A pause is drawn from this part of its length around it, so that workers which died together do
# not come back in the same moment.
JITTER = 0.2
# Doubling ends here. Every pause has reached its upper limit long before.
MAX_DOUBLINGS = 40


class State(enum.Enum):
    """Where a member stands."""

    # Its process is being started, or its address dialled, until both ends have greeted.
    STARTING = "starting"
    # It loads its shards, shows what it has loaded, and gets its data path.
    JOINING = "joining"
    READY = "ready"
    # What is left of it is being cleared away.
    LOST = "lost"
    # It is tried again at `Life.next_try`.
    WAITING = "waiting"
    # It is left alone until somebody releases it.
    QUARANTINED = "quarantined"
    # It was removed or is recycled, finishes what it has, and is then cleared away.
    DRAINING = "draining"
    GONE = "gone"


class Happening(enum.Enum):
    """What can be said of a member."""

    ADDED = "added"
    STARTED = "started"
    JOINED = "joined"
    # START or JOIN came to nothing; whether that was a death, the event says.
    FAILED = "failed"
    # It is there and will not do: other weights, another version, a device that it lacks.
    UNFIT = "unfit"
    LOST = "lost"
    # Its numbers are wrong: what it answers must not be used any more.
    OUTVOTED = "outvoted"
    # What END ordered is done: no process and no connection of the attempt is left.
    ENDED = "ended"
    # The time of a WAIT has come.
    DUE = "due"
    RELEASED = "released"
    REMOVED = "removed"
    # Somebody wants it ended and started anew.
    RECYCLED = "recycled"
    DRAINED = "drained"


class Task(enum.Enum):
    """What is to be done for a member."""

    START = "start"
    JOIN = "join"
    # Hang up, kill the process where it is ours, and reap it. It may come while START or JOIN is
    # under way, which it cuts short.
    END = "end"
    WAIT = "wait"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to a member in one attempt. Other happenings than those of an attempt (added,
    due, released, removed, recycled) need no number.
    """

    what: Happening
    attempt: int = 0
    reason: str = ""
    # Of FAILED: whether the worker died, and not merely was busy, out of reach, or not started
    # because this process lacked something. Of LOST: whether it did not say goodbye.
    is_death: bool = True
    # Of OUTVOTED: whether it is not tried once more.
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be done now; of WAIT, not before `until`."""

    task: Task
    attempt: int
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How patient members are: the first and the longest pause in seconds, which double in between,
    and how many deaths within how many seconds are a crash loop.

    Where `is_on` is false, a lost member stays quarantined. `retries_unfit` is for those whom
    nobody can ask for a release: a worker started by hand that will not do is dialled again
    nevertheless.
    """

    backoff_s: tuple[float, float] = (0.1, 5.0)
    deaths: int = 5
    window_s: float = 60.0
    is_on: bool = True
    retries_unfit: bool = False


_OF_AN_ATTEMPT = frozenset(
    {
        Happening.STARTED,
        Happening.JOINED,
        Happening.FAILED,
        Happening.UNFIT,
        Happening.LOST,
        Happening.OUTVOTED,
        Happening.ENDED,
        Happening.DRAINED,
    }
)


@dataclass(slots=True)
class Life:
    """The life of one worker, gone until it is added. One thread at a time calls it.

    Times are seconds of one clock that never goes back, whose readings are handed in.
    """

    name: str
    policy: RestartPolicy
    rng: random.Random
    # False for a worker that somebody starts by hand: it is dialled without end while it is out of
    # reach, and only a loss after both ends have greeted counts as a death.
    is_started_by_host: bool = True
    state: State = State.GONE
    # Why it is not ready, empty where nothing is wrong; of a ready member, why it was not before.
    reason: str = ""
    # When the state began.
    since: float = 0.0
    # When a waiting member is tried again.
    next_try: float = 0.0
    # The number of the latest attempt to start or reach it.
    attempt: int = 0
    # How often it died since it was added, released or not.
    num_deaths: int = 0
    # Whether it was there in its latest attempt and would not do.
    is_unfit: bool = False
    # How often its numbers were found wrong since it was added or released.
    num_outvoted: int = 0
    _recent: deque[float] = field(default_factory=deque)
    _num_tries: int = 0
    _is_left_alone: bool = False
    _is_ending: bool = False
    _is_recycled: bool = False
    _lost_early: str | None = None

    def on(self, event: Event, now: float) -> list[Order]:
        """Takes what happened and returns what is to be done. An event that does not fit the state,
        or that is about an earlier attempt, changes nothing.
        """
        if event.what in _OF_AN_ATTEMPT and event.attempt != self.attempt:
            return []
        return getattr(self, f"_on_{event.what.value}")(event, now)  # type: ignore[no-any-return]

    @property
    def is_coming(self) -> bool:
        """Whether somebody works at it that it serves again, or it does."""
        if self._is_recycled and not self._is_left_alone:
            return True
        return self.state not in (State.QUARANTINED, State.DRAINING, State.GONE) and not self._is_left_alone

    @property
    def serves(self) -> bool:
        """Whether its loss is news: it is ready, or drains and is not being cleared away yet."""
        return self.state is State.READY or (self.state is State.DRAINING and not self._is_ending)

    # -- events of its life ------------------------------------------------------------------------

    def _on_added(self, _event: Event, now: float) -> list[Order]:
        if self.state is not State.GONE:
            return []
        self._forget()
        self.num_deaths, self.reason = 0, ""
        return self._start(now)

    def _on_started(self, _event: Event, now: float) -> list[Order]:
        if self.state is not State.STARTING:
            return []
        self._lost_early = None
        self._enter(State.JOINING, now)
        return [Order(Task.JOIN, self.attempt)]

    def _on_joined(self, event: Event, now: float) -> list[Order]:
        if self.state is not State.JOINING:
            return []
        self._enter(State.READY, now)
        if self._lost_early is None:
            return []
        return self._on_lost(replace(event, what=Happening.LOST, reason=self._lost_early), now)

    def _on_failed(self, event: Event, now: float) -> list[Order]:
        if self.state not in (State.STARTING, State.JOINING):
            return []
        # Until it has greeted, nobody knows that there is a worker behind an address.
        was_there = self.is_started_by_host or self.state is State.JOINING
        return self._lose(event.reason, now, is_death=event.is_death and was_there)

    def _on_unfit(self, event: Event, now: float) -> list[Order]:
        if self.state not in (State.STARTING, State.JOINING):
            return []
        self.is_unfit = True
        self._is_left_alone = self.is_started_by_host or not self.policy.retries_unfit
        return self._lose(event.reason, now, is_death=False)

    def _on_lost(self, event: Event, now: float) -> list[Order]:
        if self.state is State.JOINING:
            # It was lost between its path and the word of it, which is on its way.
            self._lost_early = event.reason
            return []
        if self.state is State.DRAINING:
            return self._end()
        if self.state is not State.READY:
            return []
        if now - self.since >= self.policy.backoff_s[1]:
            self._num_tries = 0
        return self._lose(event.reason, now, is_death=event.is_death)

    def _on_outvoted(self, event: Event, now: float) -> list[Order]:
        if not self.serves:
            return []
        self.num_outvoted += 1
        if event.is_last or self.num_outvoted > 1:
            self._is_left_alone = True
        if self.state is State.DRAINING:
            # What it still owes would be as wrong: it is not waited for.
            self.reason = event.reason
            return self._end()
        return self._lose(event.reason, now, is_death=True)

    def _on_ended(self, _event: Event, now: float) -> list[Order]:
        if not self._is_ending:
            return []
        self._is_ending = False
        if self.state is State.DRAINING:
            if self._is_recycled:
                self._is_recycled = False
                if not self._is_left_alone:
                    return self._start(now)
                self._enter(State.QUARANTINED, now)
                return []
            self._enter(State.GONE, now)
            return []
        if self._is_left_alone:
            self._enter(State.QUARANTINED, now)
            return []
        self._enter(State.WAITING, now)
        self.next_try = now + self._pause()
        return [Order(Task.WAIT, self.attempt, self.next_try)]

    def _on_due(self, _event: Event, now: float) -> list[Order]:
        if self.state is not State.WAITING:
            return []
        if now < self.next_try:
            return [Order(Task.WAIT, self.attempt, self.next_try)]
        return self._start(now)

    # -- what people ask for -----------------------------------------------------------------------

    def _on_released(self, _event: Event, now: float) -> list[Order]:
        if self.state is not State.QUARANTINED:
            return []
        self._forget()
        return self._start(now)

    def _on_removed(self, _event: Event, now: float) -> list[Order]:
        self._is_recycled = False
        if self.state in (State.WAITING, State.QUARANTINED):
            self._enter(State.GONE, now)
            return []
        if self.state in (State.GONE, State.DRAINING):
            return []
        was_ready, self.state = self.state is State.READY, State.DRAINING
        self.since = now
        return [Order(Task.DRAIN, self.attempt)] if was_ready else self._end()

    def _on_recycled(self, _event: Event, now: float) -> list[Order]:
        """Of a member that is not ready, nothing has to be ended first: it is being started anyway,
        or waits for somebody to release it.
        """
        if self.state is not State.READY:
            return []
        self._is_recycled = True
        self._enter(State.DRAINING, now)
        return [Order(Task.DRAIN, self.attempt)]

    def _on_drained(self, _event: Event, _now: float) -> list[Order]:
        return self._end() if self.state is State.DRAINING else []

    # -- steps -------------------------------------------------------------------------------------

    def _start(self, now: float) -> list[Order]:
        self.attempt += 1
        self.is_unfit = False
        self._enter(State.STARTING, now)
        return [Order(Task.START, self.attempt)]

    def _lose(self, reason: str, now: float, *, is_death: bool) -> list[Order]:
        self.reason = reason
        if is_death:
            self.num_deaths += 1
            self._recent.append(now)
            while self._recent and now - self._recent[0] >= self.policy.window_s:
                self._recent.popleft()
            if len(self._recent) >= self.policy.deaths:
                self.reason = f"{len(self._recent)} deaths within {self.policy.window_s:g} s, at last: {reason}"
                self._is_left_alone = True
        if not self.policy.is_on:
            self._is_left_alone = True
        self._enter(State.LOST, now)
        return self._end()

    def _end(self) -> list[Order]:
        """Orders END once; whoever clears a member away does so a single time."""
        if self._is_ending:
            return []
        self._is_ending = True
        return [Order(Task.END, self.attempt)]

    def _pause(self) -> float:
        first, longest = self.policy.backoff_s
        pause = min(longest, first * 2.0 ** min(self._num_tries, MAX_DOUBLINGS))
        self._num_tries += 1
        return pause * self.rng.uniform(1.0 - JITTER, 1.0 + JITTER)

    def _forget(self) -> None:
        self._recent.clear()
        self._num_tries = 0
        self._is_left_alone = False
        self._lost_early = None
        self.num_outvoted = 0

    def _enter(self, state: State, now: float) -> None:
        self.state, self.since = state, now
