"""The audit of a running host: rows that workers have computed for calls are computed again, within
a budget of processor time, and a worker that is outvoted is taken out.

It finds arithmetic that goes wrong after a worker has joined, which no checksum sees: a core that
fails when it is hot, a card's memory, a driver. One thread sleeps until a copy of an exchange is
there (csrc/transport/tapped.h), computes its rows one by one, and pauses after each so long that it
stays within the budget.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import random
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_moe import _core
from dflash_moe.errors import DflashError
from dflash_moe.holders.audit.host_twin import REFERENCE, HostTwin
from dflash_moe.holders.audit.row_questions import ExchangedRow, RowQuestion, difference, exchanged_rows
from dflash_moe.holders.events import Bell
from dflash_moe.holders.membership import Happening
from dflash_moe.model.refusals import in_one_line
from dflash_moe.telemetry.spaced_log import SpacedLog

if TYPE_CHECKING:
    from dflash_moe.holders.events import HolderEvents, WeightsDamaged
    from dflash_moe.holders.fleet import Fleet
    from dflash_moe.holders.holder import Holder
    from dflash_moe.placement.held_shards import HeldShard

log = logging.getLogger(__name__)

# So many exchanges of a worker in a row are copied at a time, so that an error which comes at
# regular intervals is not missed each time, and their requests have so many bytes at most.
BURST_EXCHANGES, BURST_BYTES = 128, 8 << 20
# Of one exchange so many rows in a row are computed again.
ROWS_OF_AN_EXCHANGE = 128
# Between two bursts a random number of exchanges goes by, below this one.
MOST_SKIPPED = 1024
# The thread ends within the computation of a row.
STOP_S = 5.0
# After it could not even wait for copies, the thread tries again so much later.
AGAIN_S = 1.0
# Two changes of weights in memory within this time are bad memory and no accident.
DAY_S = 86_400.0


@dataclass(slots=True)
class _Watched:
    """What the audit knows of one worker."""

    audited_rows: int = 0
    mismatches: int = 0
    # When a row or a pass of the audit last found it right, by the clock of time.time().
    last_good: float | None = None
    # Why its rows are not computed again, empty where they are.
    skipped: str = ""
    changes: deque[float] = field(default_factory=deque)
    num_changes: int = 0


class Answerer(NamedTuple):
    """Who gave an answer: a holder in one of its attempts, so one process."""

    holder: Holder
    attempt: int

    @staticmethod
    def now(holder: Holder) -> Answerer:
        """Returns the process that is a holder now, or is about to join as one."""
        # The first attempt begins once the holder is adopted, which is after its path was made.
        return Answerer(holder, max(1, holder.life.attempt))


@dataclass(slots=True)
class _Tapped:
    tap: _core.Tap
    by: Answerer
    # Whether it was outvoted and no other process has taken its place yet. What it goes on to
    # answer until it is lost would only be outvoted once more.
    is_out: bool = False


class Taps:
    """What the audit sees of the channels to other processes: a tap for each worker, which copies
    exchanges. It is made before the fleet that makes the channels. Any thread may call.
    """

    def __init__(self) -> None:
        # Rung when there is one more tap, and at the end.
        self.bell = Bell()
        # The thread that holds it takes it again where it collects a runtime that nobody closed.
        self._lock = threading.RLock()
        self._tapped: dict[str, _Tapped] = {}

    def watch(self, holder: Holder, channel: _core.Channel) -> _core.Channel:
        """Returns what is used instead of a fresh channel to a worker. What another process in its
        place has answered must not be held against it, so that no copy of that is left.
        """
        by = Answerer.now(holder)
        with self._lock:
            one = self._tapped.get(holder.name)
            if one is None:
                one = self._tapped[holder.name] = _Tapped(_core.Tap(), by)
                arm(one.tap, num_skipped=0)
            elif one.by != by:
                one.tap.take()
                one.by, one.is_out = by, False
        self.bell.ring()
        return _core.make_tapped(channel, one.tap)

    def everybody(self) -> list[tuple[str, _core.Tap]]:
        """Returns all taps by their workers' names."""
        with self._lock:
            return [(name, one.tap) for name, one in self._tapped.items()]

    def copies(self, name: str) -> tuple[Answerer, list[tuple[bytes, bytes]]]:
        """Takes the copied requests and replies of a worker, none of one that is out, and returns
        who answered them.
        """
        with self._lock:
            one = self._tapped[name]
            copied = one.tap.take()
            return one.by, [] if one.is_out else copied

    def take_out(self, by: Answerer) -> None:
        """Drops what a process has answered, and what it answers until another takes its place."""
        with self._lock:
            one = self._tapped.get(by.holder.name)
            if one is not None and one.by == by:
                one.is_out = True
                one.tap.take()
                arm(one.tap, num_skipped=0)

    def close(self) -> None:
        """Lets the taps go, whose channels go with the client, and closes the bell."""
        with self._lock:
            self._tapped.clear()
        self.bell.close()


def arm(tap: _core.Tap, *, num_skipped: int) -> None:
    """Has a tap copy a burst of exchanges after the next `num_skipped` ones."""
    tap.arm(num_skipped, BURST_EXCHANGES, BURST_BYTES)


class Audit:
    """Audits the workers of one fleet. `start` begins, `call_off` ends it. Any thread may call."""

    def __init__(
        self, fleet: Fleet, taps: Taps, path: Path, held: Callable[[], Mapping[str, Sequence[HeldShard]]], *, isa: str,
        cpu: float, events: HolderEvents, rng: random.Random | None = None,
    ) -> None:  # fmt: skip
        """`cpu` is the part of a core that computing rows again may take; 0 computes none. `held`
        returns the shards of each holder by its name. Who is outvoted is put into `events`. Raises
        DflashError where this process is out of descriptors.
        """
        taps.bell.open("the audit")
        self._fleet = fleet
        self._taps = taps
        self._held = held
        self._cpu = cpu
        self._events = events
        self._rng = rng or random.Random()
        self._twin = HostTwin(path, isa)
        self._third = HostTwin(path, REFERENCE)
        self._watched: dict[str, _Watched] = {}
        self._rows: deque[tuple[Answerer, ExchangedRow]] = deque()
        self._num_host_mismatches = 0
        self._num_undecided = 0
        self._failure = ""
        self._troubles = SpacedLog(log)
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dflash-audit", daemon=True)

    def start(self) -> None:
        """Begins to compute rows again, unless the budget is 0."""
        if self._cpu > 0:
            self._thread.start()

    def call_off(self) -> None:
        """Ends the thread; never raises."""
        self._is_over.set()
        self._taps.bell.ring()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(STOP_S)

    def close(self) -> None:
        """Closes what the audit owns, once it is called off; never raises."""
        if not self._thread.is_alive():
            self._twin.close()
            self._third.close()

    def stats(self) -> dict[str, Any]:
        """Returns `audited_rows`, `mismatches`, those in which this host itself was `host_wrong` or
        nobody could tell (`undecided`), `golden_rows`, and by worker its rows, mismatches, weights
        found changed, when it was last found right (seconds since 1970), and why it is skipped.
        `failure` says what keeps rows of all workers from being computed again, empty where nothing
        does.
        """
        with self._lock:
            watched = {**{name: _Watched() for name, _ in self._taps.everybody()}, **self._watched}
        workers = {
            name: {
                "audited_rows": one.audited_rows, "mismatches": one.mismatches, "weights_changed": one.num_changes,
                "last_good": one.last_good, "skipped": one.skipped,
            }
            for name, one in watched.items()
        }  # fmt: skip
        return {
            "audited_rows": sum(one["audited_rows"] for one in workers.values()),
            "mismatches": sum(one["mismatches"] for one in workers.values()),
            "weights_changed": sum(one["weights_changed"] for one in workers.values()),
            "host_wrong": self._num_host_mismatches,
            "undecided": self._num_undecided,
            "golden_rows": self._fleet.shards.golden.num_compared,
            "golden_mismatches": self._fleet.shards.golden.num_mismatches,
            "failure": self._failure,
            "workers": workers,
        }

    def note_damage(self, damage: WeightsDamaged) -> None:
        """Notes that weights have changed in a worker's memory. Those that could not be loaded
        again, and a second change within a day, take the worker out.
        """
        name, failure, now = damage.holder.name, damage.failure, time.monotonic()
        with self._lock:
            one = self._of(name)
            one.num_changes += 1
            one.changes.append(now)
            while now - one.changes[0] >= DAY_S:
                one.changes.popleft()
            is_second = len(one.changes) > 1
        where = f"weights of layer {damage.layer}, shard {damage.shard} changed in the memory of worker {name}"
        if failure:
            log.error("%s and could not be loaded again: %s", where, failure)
            self._outvote(damage, f"{where} and could not be loaded again: {failure}", is_last=is_second)
        elif is_second:
            log.error("%s, for the second time within a day: its memory is bad", where)
            self._outvote(damage, f"{where}, for the second time within a day", is_last=True)
        else:
            log.warning("%s; they were loaded again. Answers since they were last summed up may be wrong", where)

    def _outvote(self, damage: WeightsDamaged, reason: str, *, is_last: bool) -> None:
        self._events.happen(damage.holder, Happening.OUTVOTED, reason, attempt=damage.attempt, is_last=is_last)

    # -- what is seen ------------------------------------------------------------------------------

    def _of(self, name: str) -> _Watched:
        return self._watched.setdefault(name, _Watched())

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                self._step()
        except BaseException as error:  # noqa: BLE001 - whatever it is, stats() has to tell it
            if not self._is_over.is_set():
                self._failure = f"the thread of the audit has ended: {_in_words(error)}"
                log.exception("the audit failed, and ends")

    def _step(self) -> None:
        """Computes one row again and pauses, or where there is none sleeps until copies come."""
        began = time.monotonic()
        if self._audit_next():
            # Another thread reads the weights, whose processor time counts too.
            used = time.monotonic() - began
            self._is_over.wait(used / self._cpu - used)
            return
        try:
            self._await_copies()
            self._failure = ""
        except Exception as error:  # noqa: BLE001 - the audit outlives whatever it is
            self._failure = f"copies cannot be waited for: {_in_words(error)}"
            self._troubles.exception("the audit could not wait for copies, and tries again")
            self._is_over.wait(AGAIN_S)

    def _await_copies(self) -> None:
        """Sleeps until an exchange was copied, and takes the rows of all that are there."""
        poller = select.poll()
        bell, taps = self._taps.bell, self._taps.everybody()
        poller.register(bell.fileno(), select.POLLIN)
        for _, tap in taps:
            poller.register(tap.fileno(), select.POLLIN)
        # Nothing but a copy or the end has to wake this thread.
        awoken = {descriptor for descriptor, _ in poller.poll()}
        bell.hush()
        for name, tap in taps:
            if tap.fileno() in awoken:
                self._take(name, tap)

    def _take(self, name: str, tap: _core.Tap) -> None:
        by, copied = self._taps.copies(name)
        for request, reply in copied:
            first = self._rng.randrange(1 << 16)
            with self._dropping(name):
                self._rows.extend((by, row) for row in self._rows_of(request, reply, first))
        # A worker that dies, or an attempt that another one has overtaken, never answers some of
        # what was sent. So what was sent counts, and not what came back.
        if tap.is_spent:
            arm(tap, num_skipped=self._rng.randrange(MOST_SKIPPED))

    def _rows_of(self, request: bytes, reply: bytes, first: int) -> Iterator[ExchangedRow]:
        yield from exchanged_rows(request, reply, first=first, at_most=ROWS_OF_AN_EXCHANGE)

    def _audit_next(self) -> bool:
        """Computes one row again; returns whether there was one."""
        with suppress(IndexError):
            golden = self._fleet.shards.golden.unproven.popleft()
            with self._dropping(golden.holder):
                member = self._fleet.members.get(golden.holder)
                if member is not None:  # else it was removed meanwhile
                    self._audit(Answerer.now(member), golden.held, golden.question, golden.reply)
            return True
        with suppress(IndexError):
            by, row = self._rows.popleft()
            with self._dropping(by.holder.name):
                held = self._shard_of(by.holder.name, row.layer, row.shard)
                if held is not None:
                    self._audit(by, held, row.question, row.answer)
            return True
        return False

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        """What fails in here is over for one row of this worker, and for nothing else."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the audit outlives whatever a row brings
            with self._lock:
                self._of(name).skipped = f"a row could not be computed again: {_in_words(error)}"
            if not self._is_over.is_set():
                self._troubles.exception("a row of worker %s could not be computed again, and is left out", name)

    def _shard_of(self, name: str, layer: int, shard: int) -> HeldShard | None:
        return next((one for one in self._held().get(name, ()) if (one.layer.index, one.shard_id) == (layer, shard)), None)

    # -- the verdict -------------------------------------------------------------------------------

    def _audit(self, by: Answerer, held: HeldShard, question: RowQuestion, answer: bytes) -> None:
        name = by.holder.name
        with self._lock:
            one = self._of(name)
        second = self._second_opinion(name, held, question)
        if second is None:
            one.skipped = f"no other holder, and this host does not compute {held.numerics} with its bits"
            if self._twin.failure:
                one.skipped = f"this host has not the weights: {self._twin.failure}"
            elif self._twin.setback:
                one.skipped = f"this host cannot compute at this time: {self._twin.setback}"
            return
        one.skipped = ""
        one.audited_rows += 1
        if second == answer:
            one.last_good = time.time()
            return
        one.mismatches += 1
        third = self._third.compute(held, question) if self._third.computes(held) else None
        where = f"layer {held.layer.index} ({held.layer.name}), shard {held.shard_id}"
        if third == answer:
            self._num_host_mismatches += 1
            log.error("audit: this host computes %s otherwise than worker %s and the reference: this machine's processor or "
                      "memory makes wrong numbers", where, name)  # fmt: skip
            return
        if third != second:
            self._num_undecided += 1
            log.error("audit: worker %s computes %s otherwise than its second opinion, and nobody can tell who is right: %s",
                      name, where, difference(held, question, answer, second))  # fmt: skip
            return
        if doubt := self._doubt_of_files():
            # The host's opinions come from files that may be others than the worker has loaded.
            self._num_undecided += 1
            one.skipped = doubt
            log.error("audit: worker %s computes %s otherwise than this host, so that nobody can tell who is right: %s",
                      name, where, one.skipped)  # fmt: skip
            return
        since = "it joined" if one.last_good is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.last_good))
        reason = f"outvoted: {where}: {difference(held, question, answer, second)}, as this host and the reference compute it"
        log.error("audit: worker %s is %s; its answers since %s may be wrong", name, reason, since)
        self._taps.take_out(by)
        self._rows = deque(row for row in self._rows if row[0] != by)
        self._events.happen(by.holder, Happening.OUTVOTED, reason, attempt=by.attempt)

    def _doubt_of_files(self) -> str:
        """Says why this host's files may be others than workers have loaded, empty where not."""
        try:
            if self._fleet.shards.are_files_unchanged():
                return ""
        except DflashError as error:
            return f"it is not known at this time whether this host's files have changed: {error}"
        return "this host's files of the checkpoint have changed since the start: start the runtime anew"

    def _second_opinion(self, name: str, held: HeldShard, question: RowQuestion) -> bytes | None:
        """Returns what this host computes, else another holder of the shard, None where neither can
        be had.
        """
        if self._twin.computes(held):
            computed = self._twin.compute(held, question)
            if computed is not None:
                return computed
        for other in self._held():
            theirs = self._shard_of(other, held.layer.index, held.shard_id) if other != name else None
            if theirs is None:
                continue
            with suppress(DflashError):  # one of the two was removed or lost meanwhile
                if self._fleet.architecture_of(other) != self._fleet.architecture_of(name):
                    continue
                computed = self._fleet.shards.ask_row(other, theirs, question)
                if computed is not None:
                    return computed
        return None


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {in_one_line(error)}"
