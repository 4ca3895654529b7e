"""Brings lost workers back: it sees that they end, carries out what their state machines order
(membership.py), and tells people how they stand.

One thread sleeps until something happens: a process ends, a control connection hangs up, the calls
say that a worker is lost, a pause is over. Whatever takes time - starting, dialling, loading,
ending - runs in a thread of its own per worker, so that a worker which does not answer holds up no
other.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from dflash_moe.errors import (
    CheckpointError,
    ConfigError,
    DflashError,
    ProtocolError,
    UnsupportedError,
    WorkerError,
    WorkerLost,
    WorkerTimeout,
    WorkerUnfit,
)
from dflash_moe.holders.events import HolderEvents, LifeEvent, Notice
from dflash_moe.holders.holder import TOLD_TO_STOP, Holder, Parting, WorkerState
from dflash_moe.holders.membership import Event, Happening, Order, State, Task

if TYPE_CHECKING:
    from dflash_moe.holders.placed_experts import PlacedExperts

log = logging.getLogger(__name__)

# The threads have this time to end once everything they wait for has been hung up on.
STOP_S = 1.0
# A thread that waits for another one hangs up on its worker this often, because a start opens a new
# session that the former call did not see.
HANG_UP_EVERY_S = 0.02
# These say that a worker is there and will not do until somebody mends it.
UNFIT = (CheckpointError, ProtocolError, UnsupportedError, ConfigError, WorkerUnfit)


class Calls(Protocol):
    """Those who call the workers: a client in this process, or a program next to it."""

    def lose(self, member: Holder, reason: str) -> None:
        """Ends or parks the calls that need a worker which is gone. It may know that already."""

    def join(self, member: Holder) -> None:
        """Gives a worker that has loaded its shards a data path, so that calls use it again. Raises
        DflashError.
        """

    def news(self) -> list[tuple[str, Happening, str]]:
        """Returns the workers that calls have given up, with the reason, and those that drain and
        have answered all; never raises.
        """

    def note(self, notice: Notice) -> None:
        """Does what an event asks for that is nothing for a state machine."""

    def tell(self, member: Holder) -> None:
        """Is told whenever the state of a worker has changed, from the keeper's thread."""

    def descriptor(self) -> int:
        """Returns what becomes readable when there may be new losses, -1 where nothing does."""


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


class WorkerKeeper:
    """Keeps the members of a fleet that are other processes, from their adoption until they are no
    members any more. Any thread may call its public methods. `call_off` and `close` end it.
    """

    def __init__(self, placed: PlacedExperts, calls: Calls, events: HolderEvents) -> None:
        """`events` are taken by this object's thread, and by nobody else; whoever made them closes
        their bell. Raises DflashError where this process is out of descriptors.
        """
        self._placed = placed
        self._fleet = placed.fleet
        self._calls = calls
        self._events = events
        # Guards the machines. The thread that holds it takes it again where it collects a runtime
        # that nobody closed.
        self._lock = threading.RLock()
        # Told whenever a worker that is let go is gone, back, or left alone.
        self._changed = threading.Condition(self._lock)
        events.bell.open("the thread that brings workers back")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dflash-workers", daemon=True)

    def start(self) -> None:
        """Takes the fleet's workers over, which are all loaded and have their data paths."""
        for member in self._fleet.members.values():
            if member.session is not None:
                self._adopt(member)
        self._thread.start()
        self._events.bell.ring()  # for what was put before it could be heard

    def adopt(self, member: Holder) -> None:
        """Takes one more worker over, likewise. Raises WorkerLost where the runtime was closed."""
        with self._lock:
            if self._is_over.is_set():
                raise WorkerLost(f"worker {member.name} is not added: the runtime was closed", worker=member.name)
            self._adopt(member)
        self._events.bell.ring()

    def _adopt(self, member: Holder) -> None:
        member.open_pidfd()
        for what in (Happening.ADDED, Happening.STARTED, Happening.JOINED):
            member.life.on(Event(what, member.life.attempt), time.monotonic())
        self._calls.tell(member)

    def _kept(self) -> list[Holder]:
        return [member for member in self._fleet.members.values() if member.life.state is not State.GONE]

    def _find(self, name: str) -> Holder | None:
        """Returns a member that is kept, None for all others."""
        return next((member for member in self._kept() if member.name == name), None)

    # -- what others say and ask -------------------------------------------------------------------

    def release(self, name: str) -> None:
        """Ends the quarantine of a worker: it is started or dialled again at once. Raises
        ConfigError for a worker that is not in quarantine.
        """
        self._fleet.owner.require_here()
        kept = self._find(name)
        if kept is None:
            there = ", ".join(one.name for one in self._kept()) or "none"
            raise ConfigError(f"release: no worker is named {name!r}; there are {there}")
        with self._lock:
            state = kept.life.state
        if state is not State.QUARANTINED:
            raise ConfigError(f"release: worker {name} is {state.value} and not quarantined")
        self._events.happen(kept, Happening.RELEASED)

    def let_go(self, name: str, parting: Parting, *, is_recycled: bool = False) -> None:
        """Begins to remove a worker of another process, or to start it anew; `await_end` waits for
        what comes of it. Raises ConfigError for one that drains already, and for one that cannot be
        started anew because it is not ready.
        """
        kept = self._fleet.members[name]
        with self._lock:
            state = kept.life.state
            if state in (State.DRAINING, State.GONE):
                raise ConfigError(f"worker {name} is {state.value} already: it is being removed or started anew")
            if is_recycled and state is not State.READY:
                raise ConfigError(f"worker {name} is {state.value} and not ready{_because(kept.life.reason)}")
            kept.parting = parting
        self._events.happen(kept, Happening.RECYCLED if is_recycled else Happening.REMOVED)

    def await_end(self, name: str, seconds: float) -> WorkerState | None:
        """Waits until a worker that is let go is no member any more, and returns None, or until it
        has been started anew, or is not started again, and returns how it stands. Raises
        WorkerTimeout after so many seconds, and DflashError where the runtime is closed meanwhile.
        """
        until = time.monotonic() + seconds
        with self._changed:
            while not self._is_over.is_set():
                kept = self._fleet.members.get(name)
                if kept is None:
                    return None
                if kept.parting is None:
                    return kept.stands(time.monotonic())
                if not self._changed.wait(until - time.monotonic()):
                    raise WorkerTimeout(f"worker {name} is {kept.life.state.value} after {seconds:g} s", worker=name)
        raise DflashError(f"the runtime was closed while worker {name} was let go")

    def states(self) -> list[WorkerState]:
        """Returns how every member stands, those inside this process too."""
        self._fleet.owner.require_here()
        self._events.bell.ring()
        now = time.monotonic()
        with self._lock:
            return [member.stands(now) for member in self._fleet.members.values()]

    def remedy_of(self, name: str) -> str:
        """Returns a clause that says what is done about a worker that was lost."""
        kept = self._find(name)
        if kept is None or self._is_over.is_set():
            return "start the runtime anew"
        with self._lock:
            state, reason, is_coming = kept.life.state, kept.life.reason, kept.life.is_coming
        is_on = kept.life.policy.is_on
        if state is State.READY and is_on:
            is_coming = True  # the loss has not been noticed yet
        if not is_coming or not is_on:
            # A reason may quote a log, which the error that this becomes part of does too.
            sentence = reason.partition("\n")[0].removesuffix("; last lines of its log:")
            why = f" ({sentence})" if state is State.QUARANTINED and is_on else ""
            return f"it is left alone{why}: runtime.release({name!r}) starts it again"
        if kept.life.is_started_by_host:
            return "it is being started again, and calls that need it work once it has loaded"
        if kept.address.is_registered:
            return "it is waited for until it registers again"
        return "it is dialled again until it is back"

    # -- the end -----------------------------------------------------------------------------------

    def call_off(self) -> None:
        """From now on nothing is started, and what is under way is cut short; never raises. Workers
        that are ready stay as they are.
        """
        self._is_over.set()
        with self._changed:
            self._changed.notify_all()
        if not self._thread.is_alive():  # never started
            return
        self._events.bell.ring()
        if self._thread is not threading.current_thread():
            self._thread.join(STOP_S)
        deadline = time.monotonic() + STOP_S
        for kept in self._kept():
            self._cut_short(kept, kept.errand, deadline)

    def close(self) -> None:
        """Closes what the keeper owns; never raises."""
        for kept in self._kept():
            kept.close_pidfd()

    def _cut_short(self, kept: Holder, errand: threading.Thread | None, deadline: float) -> None:
        """Ends what is under way for a worker, by ending the worker itself."""
        while errand is not None and errand.is_alive() and time.monotonic() < deadline:
            session = kept.session
            if session is not None:
                session.kill()
                session.hang_up()
            if errand is threading.current_thread():
                return
            errand.join(HANG_UP_EVERY_S)

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                self._sleep()
                self._take_events()
                self._take_news()
                self._take_due()
            except Exception:
                if self._is_over.is_set():
                    return
                log.exception("the keeper of workers failed, and goes on")
                self._is_over.wait(HANG_UP_EVERY_S)
                self._events.bell.ring()  # for what waits behind the event that failed

    def _sleep(self) -> None:
        """Sleeps until something happens. Processes that ended become losses here."""
        poller = select.poll()
        watched: dict[int, Holder] = {}
        for descriptor in (self._events.bell.fileno(), self._calls.descriptor()):
            if descriptor >= 0:
                poller.register(descriptor, select.POLLIN)
        for kept in self._kept():
            if not kept.life.serves or kept.session is None:
                continue
            control = kept.session.fileno()
            for descriptor, events in ((control, select.POLLRDHUP | select.POLLIN), (kept.pidfd, select.POLLIN)):
                if descriptor >= 0:
                    watched[descriptor] = kept
                    poller.register(descriptor, events)
        # Nothing but an event or the next try has to wake this thread.
        awoken = poller.poll(self._until_next_look())
        self._events.bell.hush()
        gone = set()
        for descriptor, events in awoken:
            kept_one = watched.get(descriptor)
            if kept_one is None:
                continue
            if events == select.POLLIN and descriptor != kept_one.pidfd and kept_one.session is not None:
                kept_one.session.take_notices()
            else:
                gone.add(kept_one)
        for kept in gone:
            self._handle(kept, Event(Happening.LOST, kept.life.attempt, "hung up"))

    def _until_next_look(self) -> float | None:
        """Returns the milliseconds until a worker is tried again or must have drained, None where
        none waits.
        """
        looks = [at for kept in self._kept() if (at := kept.next_look()) is not None]
        return max(0.0, min(looks) - time.monotonic()) * 1000 + 1 if looks else None

    def _take_events(self) -> None:
        for happened in self._events.take():
            if isinstance(happened, LifeEvent):
                self._handle(happened.holder, happened.event)
            else:
                self._calls.note(happened)

    def _take_news(self) -> None:
        for name, what, reason in self._calls.news():
            kept = self._find(name)
            if kept is not None and kept.life.serves:
                self._handle(kept, Event(what, kept.life.attempt, reason))

    def _take_due(self) -> None:
        for kept in self._kept():
            due = kept.next_look()
            if due is None or time.monotonic() < due:
                continue
            what = Happening.DUE if kept.life.state is State.WAITING else Happening.DRAINED
            self._handle(kept, Event(what, kept.life.attempt))

    def _handle(self, kept: Holder, event: Event) -> None:
        session = kept.session
        if event.what is Happening.LOST and kept.life.serves and session is not None and session.has_left():
            event = replace(event, reason=TOLD_TO_STOP, is_death=False)
            kept.has_left = kept.address.is_registered
        with self._lock:
            before = kept.life.state
            orders = kept.life.on(event, time.monotonic())
            after = kept.life.state
        if before is not after:
            self._on_change(kept, before)
        for order in orders:
            if order.task is Task.DRAIN and kept.parting is not None:
                kept.drained_by = time.monotonic() + kept.parting.drain_s
            if order.task in (Task.START, Task.JOIN, Task.END) and not self._is_over.is_set():
                self._begin(kept, order)

    def _on_change(self, kept: Holder, before: State) -> None:
        life, member = kept.life, kept
        if before is State.DRAINING:
            kept.close_pidfd()
        if life.state is State.READY:
            log.info("worker %s is ready again, at attempt %d", member.name, life.attempt)
            kept.open_pidfd()
        elif life.state is State.DRAINING:
            log.info("worker %s is let go, and finishes what it has", member.name)
        elif life.state is State.GONE:
            self._dismiss(kept)
        elif before is State.READY:
            kept.close_pidfd()
            log.info("worker %s is lost: %s", member.name, life.reason)
            self._calls.lose(member, life.reason)
        elif life.state is State.QUARANTINED:
            log.info("worker %s is quarantined: %s", member.name, life.reason)
        elif life.state is State.LOST:
            log.info("worker %s is not back yet: %s", member.name, life.reason)
        self._calls.tell(member)
        if kept.parting is not None and (life.state in (State.READY, State.QUARANTINED)):
            with self._changed:
                kept.parting = None
                self._changed.notify_all()

    def _dismiss(self, kept: Holder) -> None:
        """Forgets a worker that is no member any more."""
        kept.close_pidfd()
        if kept.parting is not None:
            kept.parting.gone(kept)
        with self._changed:
            self._changed.notify_all()

    # -- what takes time ---------------------------------------------------------------------------

    def _begin(self, kept: Holder, order: Order) -> None:
        former = kept.errand
        name = f"dflash-{order.task.value}-{kept.name}"
        kept.errand = threading.Thread(target=self._run_errand, args=(kept, order, former), name=name, daemon=True)
        try:
            kept.errand.start()
        except RuntimeError as error:  # as many threads as the system allows
            kept.errand = former
            if order.task is Task.END:
                self._run_errand(kept, order, former)
                return
            reason = f"this process cannot start a thread for it: {error}"
            self._events.happen(kept, Happening.FAILED, reason, attempt=order.attempt, is_death=False)

    def _run_errand(self, kept: Holder, order: Order, former: threading.Thread | None) -> None:
        reason, is_death = "", True
        try:
            steps: dict[Task, Callable[[Holder], Happening]] = {
                Task.START: self._start, Task.JOIN: self._join, Task.END: partial(self._end, former),
            }  # fmt: skip
            what = steps[order.task](kept)
        except UNFIT as error:
            what, reason = Happening.UNFIT, str(error)
        except (WorkerLost, WorkerTimeout) as error:
            what, reason = Happening.FAILED, str(error)
        except DflashError as error:
            # It is busy with another host, or this process lacks something, such as descriptors.
            what, reason = Happening.FAILED, str(error)
            is_death = isinstance(error, WorkerError) and order.task is Task.JOIN
        except Exception as error:
            log.exception("worker %s: %s came to nothing", kept.name, order.task.value)
            what, reason = Happening.FAILED, f"{type(error).__name__}: {error}"
        self._events.happen(kept, what, reason, attempt=order.attempt, is_death=is_death)

    def _start(self, kept: Holder) -> Happening:
        self._fleet.start_again(kept)
        kept.has_left = False
        return Happening.STARTED

    def _join(self, kept: Holder) -> Happening:
        self._fleet.load_again(kept, self._placed.held[kept.name])
        self._calls.join(kept)
        kept.last_exit = ""
        return Happening.JOINED

    def _end(self, former: threading.Thread | None, kept: Holder) -> Happening:
        self._cut_short(kept, former, time.monotonic() + STOP_S)
        # When the loss was seen another thread may have had the connection, and the last word.
        if kept.address.is_registered and kept.session is not None and kept.session.has_left():
            kept.has_left = True
        if kept.life.state is State.DRAINING and kept.parting is not None:
            kept.parting.end(kept)
            self._fleet.dismiss(kept)
        else:
            self._fleet.end_member(kept)
        return Happening.ENDED
