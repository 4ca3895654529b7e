"""Makes the data paths of a running runtime: it renews a path that the client says is worn, all
paths when a change of mode wants other slots, and gives a worker that comes back its first one.

Only one thread at a time makes a path to a worker, and what a thread knows of a session counts only
as long as the worker has that session: a renewal that is overtaken by a restart changes nothing.
Settings may change while a worker is waited for; a path that does not fit them any more is made
anew, so that nobody who changes settings ever waits for a worker.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import contextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from dflash_moe.errors import ConfigError, DflashError, WorkerLost, WorkerTimeout
from dflash_moe.holders.events import PathLate
from dflash_moe.holders.fleet import LEAST_ATTACH_S
from dflash_moe.holders.renewal import PAUSE_S, RENEWALS, Renewal, try_to_renew
from dflash_moe.protocol.descriptors import Descriptors

if TYPE_CHECKING:
    from dflash_moe import _core
    from dflash_moe.config import Settings
    from dflash_moe.holders.events import HolderEvents
    from dflash_moe.holders.holder import Holder
    from dflash_moe.holders.placed_experts import PlacedExperts
    from dflash_moe.placement.held_shards import HeldShard

log = logging.getLogger(__name__)

# The threads have this time to end. A renewal under way ends as soon as its connection is hung up.
STOP_S = 5.0
# Why a path is renewed that is not worn.
OTHER_SLOTS = "slots of another size are needed"
NOBODY: Mapping[str, Sequence[HeldShard]] = MappingProxyType({})
# Takes a fresh path over: the host's channel, the generation, and the pulse's descriptor or -1.
TakePath = Callable[["_core.Channel", int, int], None]


class PathKeeper:
    """One thread that sleeps until the client says that a path is worn (csrc/client/path.h), and
    another for each renewal under way, so that a worker that does not answer holds up no other's.

    Calls that need a worn path wait in the client meanwhile, each under its own deadline. Whoever
    renews a path has retired it before, so that no two threads renew the same one.
    """

    def __init__(self, client: _core.Client, placed: PlacedExperts, events: HolderEvents) -> None:
        self._client = client
        self._placed = placed
        self._fleet = placed.fleet
        self._events = events
        # By name of a worker, also of those that were removed: held over the making of one path.
        self._locks: dict[str, threading.Lock] = {}
        # Held while settings come in force, and while a fresh path becomes the client's; never
        # while anybody waits for a worker.
        self._in_force = threading.Lock()
        self._worn_fd = client.worn_fd()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dflash-paths", daemon=True)
        # By worker; of the renewals that began last.
        self._renewals: dict[int, Renewal] = {}

    def start(self) -> None:
        """Starts the thread. Every worker is attached by then."""
        self._locks = {name: threading.Lock() for name in self._fleet.members}
        self._thread.start()

    @property
    def limit_s(self) -> float:
        """A worker answers within this time when it is asked for a path. Nobody listens to a
        retired path, so that one which stands still is found by that.
        """
        return max(self._placed.settings.stall_timeout_s, LEAST_ATTACH_S)

    @contextmanager
    def making(self, member: Holder) -> Iterator[None]:
        """Opens a block in which no other thread makes a path to `member`. Raises WorkerTimeout
        where another one does so for longer than a path can take.
        """
        lock = self._locks.setdefault(member.name, threading.Lock())
        if not lock.acquire(timeout=RENEWALS * (self.limit_s + PAUSE_S)):
            raise WorkerTimeout(f"worker {member.name}: another data path is being made all the while", worker=member.name)
        try:
            yield
        finally:
            lock.release()

    def make(
        self,
        member: Holder,
        take: TakePath,
        *,
        limit_s: float | None = None,
        arriving: Mapping[str, Sequence[HeldShard]] = NOBODY,
    ) -> None:
        """Makes a path to a worker, with slots by the settings in force, which do not change while
        `take` has it. `arriving` are holders that are no members yet, with their shards.

        Errors: those of `Fleet.attach` and of `take`.
        """
        with Descriptors() as pulse:  # only the first path of a session brings it
            while True:
                slots = self._plan(member, arriving)
                channel, generation, pulse_fd = self._fleet.attach(member, slots, limit_s)
                if pulse_fd >= 0:
                    pulse.hold([pulse_fd])
                with self._in_force:
                    if slots.holds(self._placed.plan_slots(arriving)[member.name]):
                        take(channel, generation, pulse.take_first() if len(pulse) else -1)
                        return
                log.info("worker %s: its data path is made anew, because the settings have changed", member.name)

    def _plan(self, member: Holder, arriving: Mapping[str, Sequence[HeldShard]]) -> _core.SlotPlan:
        with self._in_force:
            return self._placed.plan_slots(arriving)[member.name]

    def introduce(
        self, member: Holder, channel: _core.Channel, generation: int, pulse_fd: int, *, is_last_resort: bool = False
    ) -> None:
        """Makes a worker known to the client with its path, or takes it back where the client has
        lost it; a device step that is under way goes on without it. It owns `pulse_fd`.
        """
        placed, client = self._placed, self._client
        slices, (request_dtype, reply_dtype) = placed.slices, placed.wire_dtypes
        if member.client_index >= 0:
            self._tell_policy(member)
            client.revive(member.client_index, channel, generation, pulse_fd)
            return
        member.client_index = client.add_worker(
            name=member.name, channel=channel, generation=generation, pulse_fd=pulse_fd, slice_tokens=slices.slice_tokens,
            window=placed.window(member.slots), request_dtype=request_dtype, reply_dtype=reply_dtype,
            is_measured=slices.is_measured, is_last_resort=is_last_resort,
        )  # fmt: skip

    def _tell_policy(self, member: Holder) -> None:
        placed, client, index = self._placed, self._client, member.client_index
        client.set_policy(index, placed.slices.slice_tokens, placed.window(member.slots), placed.slices.is_measured)
        client.set_dtypes(index, *placed.wire_dtypes)

    def revive(self, member: Holder) -> None:
        """Gives a lost worker, which has a new session and has loaded its shards, a path and pulse
        by the settings in force, and takes it back into the client. Errors: WorkerLost,
        WorkerTimeout, ProtocolError; DflashError where the runtime was closed.
        """
        with self.making(member):
            # Nothing happens to one that is lost already.
            self._client.mark_lost(member.client_index, "another process took its place")
            self.make(member, lambda *path: self.introduce(member, *path), limit_s=self.limit_s)

    # -- other settings ----------------------------------------------------------------------------

    def change(self, settings: Settings) -> None:
        """Puts settings in force that differ from the former ones in mode, slices or wire dtypes
        only. The caller holds the client (`Client.hold`), so that no call is under way.

        Workers get paths with other slots side by side. Whoever hangs up is lost, and so is one
        that stands still and does not answer within `limit_s`; but after the time of a suspicion
        only those calls wait for it that need it. Raises DflashError where this process lacks
        something, such as descriptors: nobody is lost then, and the former settings stay in force.
        """
        former = self._placed.settings
        try:
            self._put_in_force(settings)
            renewed = [renewal.next_outcome() for renewal in list(self._renewals.values()) if not renewal.is_over]
            done, _ = wait(renewed, timeout=settings.suspect_ms / 1000, return_when=FIRST_EXCEPTION)
            lacks = [error for outcome in done if (error := outcome.exception(0.0)) is not None]
            if lacks and isinstance(lacks[0], DflashError):
                raise lacks[0].reworded(f"the former settings stay in force: {lacks[0]}")
        except BaseException:
            # The settings must not claim what is not in force, whatever it was: Ctrl-C, too.
            self._put_in_force(former)
            raise

    def _put_in_force(self, settings: Settings) -> None:
        """Begins to renew all paths where one of them has too small slots, also those that fit, so
        that the arena's limit holds. Whoever makes a path already sees to that himself.
        """
        with self._in_force:
            self._placed.use(settings)
            plans = self._placed.plan_slots()
            members = list(self._fleet.members.values())
            paths = {report["name"]: report["path"] for report in self._client.workers()}
            usable = [member for member in members if paths[member.name] in ("fresh", "in use")]
            retired = []
            if not all(member.slots is not None and member.slots.holds(plans[member.name]) for member in usable):
                retired = [member for member in usable if self._retire(member)]
            for member in members:
                self._tell_policy(member)
        for member in retired:
            self._begin_to_renew(member.client_index, OTHER_SLOTS)

    def _retire(self, member: Holder) -> bool:
        """Returns whether the path is this thread's to renew."""
        with suppress(WorkerLost, ConfigError):  # it was lost meanwhile, or worn and retired
            self._client.retire_path(member.client_index, OTHER_SLOTS)
            return True
        return False

    # -- the end -----------------------------------------------------------------------------------

    def call_off(self) -> None:
        """From now on nothing is renewed, and whom a renewal still waits for is hung up on; never
        raises.
        """
        self._is_over.set()
        if not self._thread.is_alive():  # never started
            return
        with suppress(DflashError):
            self._client.wake_renewer()
        _join(self._thread)
        for index, renewal in list(self._renewals.items()):
            session = self._fleet.at_index(index).session
            if session is not None and not renewal.is_over:
                session.hang_up()

    def close(self) -> None:
        """Waits for what was called off; never raises."""
        for renewal in list(self._renewals.values()):
            if renewal.thread is not None:
                _join(renewal.thread)

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._worn_fd, select.POLLIN)
        while not self._is_over.is_set():
            poller.poll(self._look())
            try:
                for index, reason in self._client.retire_worn_paths():
                    self._begin_to_renew(index, reason)
            except DflashError as error:  # the runtime was closed meanwhile
                log.debug("paths are not renewed any more: %s", str(error))
                return

    def _look(self) -> float | None:
        """Looks after renewals: one that had no thread yet may get one, and of a worker that is
        late somebody is told, once. Returns the milliseconds until the next look, None where
        nothing is to be seen.
        """
        suspect_s = self._placed.settings.suspect_ms / 1000
        waits_s = []
        for index, renewal in list(self._renewals.items()):
            left_s = renewal.began + suspect_s - time.monotonic()
            if renewal.is_over:
                continue
            if renewal.thread is None:
                self._start(index, renewal)
                waits_s.append(PAUSE_S)
            elif renewal.is_late:
                continue
            elif left_s > 0:
                waits_s.append(left_s)
            else:
                renewal.is_late = True
                with suppress(DflashError):  # the runtime was closed meanwhile
                    self._events.note(PathLate(self._fleet.at_index(index)))
        return 1000 * min(waits_s) + 1 if waits_s else None

    def _begin_to_renew(self, index: int, reason: str) -> None:
        renewal = self._renewals[index] = Renewal(reason)
        self._start(index, renewal)
        with suppress(DflashError):  # the runtime was closed meanwhile
            self._client.wake_renewer()  # for _look

    def _start(self, index: int, renewal: Renewal) -> None:
        name = f"dflash-path-{index}"
        thread = threading.Thread(target=self._renew_worn, args=(index, renewal), name=name, daemon=True)
        try:
            thread.start()
            renewal.thread = thread
        except RuntimeError as error:  # as many threads as the system allows
            renewal.lacks(error)

    def _runs(self, index: int) -> bool:
        """Says whether a worker that is waited for sends pulses all the while: it is only slow."""
        return self._client.pulse_age_s(index) < max(self._placed.settings.suspect_ms / 1000, LEAST_ATTACH_S)

    def _renew_worn(self, index: int, renewal: Renewal) -> None:
        member = self._fleet.at_index(index)
        log.info("worker %s: its data path is renewed: %s", member.name, renewal.reason)
        session = member.session

        def take(channel: _core.Channel, generation: int, _pulse_fd: int) -> None:
            self._tell_policy(member)
            self._client.renew_path(index, channel, generation)
            log.info("worker %s: data path renewed, generation %d", member.name, generation)

        def renew() -> None:
            with self.making(member):
                # Else the worker was lost meanwhile, and whoever brings it back makes its path.
                if member.session is session and self._client.workers()[index]["path"] == "worn":
                    self.make(member, take, limit_s=self.limit_s)

        try:
            failure = try_to_renew(member.name, renew, self._is_over, runs=partial(self._runs, index), on_lack=renewal.lacks)
            if failure and not self._is_over.is_set():
                with self.making(member):
                    if member.session is session:
                        self._client.mark_lost(index, failure)  # calls that need it say so; the others go on
                self._events.bell.ring()
        except DflashError as error:  # the runtime was closed meanwhile
            log.debug("worker %s: its data path is not renewed any more: %s", member.name, str(error))
        finally:
            renewal.end()


def _join(thread: threading.Thread) -> None:
    """Waits for another thread's end; a runtime that nobody closed is collected on any thread."""
    if thread is not threading.current_thread():
        thread.join(STOP_S)
