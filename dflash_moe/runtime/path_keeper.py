"""Makes the data paths of a running runtime: it renews a path that the client says is worn, all
paths when a change of mode wants other slots, and gives a worker that comes back its first one.

Only one thread at a time makes a path to a worker, and what a thread knows of a session counts only
as long as the worker has that session: a renewal that is overtaken by a restart changes nothing.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import queue
import select
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from dflash_moe.errors import DflashError, WorkerLost, WorkerTimeout
from dflash_moe.protocol.framing import PeerGone
from dflash_moe.runtime.fleet import LEAST_ATTACH_S

if TYPE_CHECKING:
    from dflash_moe import _core
    from dflash_moe.runtime.member import Member
    from dflash_moe.runtime.placed_experts import PlacedExperts

log = logging.getLogger(__name__)

# A worker that did not answer this many renewals of a path in a row is lost.
RENEWALS = 3
# A renewal that lacked something, descriptors for example, pauses this long before its next try:
# others may give it back meanwhile.
PAUSE_S = 0.2
# The threads have this time to end. A renewal under way ends as soon as its connection is hung up.
STOP_S = 5.0


class PathKeeper:
    """One thread that sleeps until the client says that a path is worn (csrc/client/path.h), and
    another for each renewal under way, so that a worker that does not answer holds up no other's.

    Calls that need a worn path wait in the client meanwhile, each under its own deadline. Whoever
    renews a path has retired it before, so that no two threads renew the same one.
    """

    def __init__(self, client: _core.Client, placed: PlacedExperts) -> None:
        self._client = client
        self._placed = placed
        self._fleet = placed.fleet
        # Called when a worker was given up because its path could not be renewed.
        self.on_loss: Callable[[], None] = lambda: None
        # By name of a worker, also of those that were removed: held over the making of one path.
        self._locks: dict[str, threading.Lock] = {}
        # Held while a holder is added, and while the settings in force change.
        self._adding = threading.Lock()
        self._worn_fd = client.worn_fd()
        # These paths, by client_index and with the reason, were retired by another thread that
        # could not renew them.
        self._left_over: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dflash-paths", daemon=True)
        # By worker; of renewals that began. The keeper's thread alone adds to it.
        self._renewals: dict[int, threading.Thread] = {}

    def start(self) -> None:
        """Starts the thread. Every worker is attached by then."""
        self._locks = {name: threading.Lock() for name in self._fleet.members}
        self._thread.start()

    @contextmanager
    def making(self, member: Member) -> Iterator[None]:
        """Opens a block in which no other thread makes a path to `member`. Raises WorkerTimeout
        where another one does so for longer than a path can take.
        """
        lock = self._locks.setdefault(member.name, threading.Lock())
        if not lock.acquire(timeout=self._path_limit_s):
            raise WorkerTimeout(f"worker {member.name}: another data path is being made all the while", worker=member.name)
        try:
            yield
        finally:
            lock.release()

    @property
    def _path_limit_s(self) -> float:
        """For no longer than this is one data path being made."""
        return RENEWALS * (self._fleet.attach_timeout_s + PAUSE_S)

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Opens a block in which the settings in force do not change and no other thread adds a
        holder. Raises WorkerTimeout where one of both takes longer than all paths can.
        """
        if not self._adding.acquire(timeout=(len(self._fleet.members) + 1) * self._path_limit_s):
            raise WorkerTimeout("the settings of the data paths are being changed all the while")
        try:
            yield
        finally:
            self._adding.release()

    @contextmanager
    def making_none(self) -> Iterator[None]:
        """Opens a block in which no path is made but by its own thread, so that the settings in
        force can change. Raises WorkerTimeout.
        """
        with ExitStack() as held:
            held.enter_context(self.adding())
            for member in self._fleet.members.values():
                held.enter_context(self.making(member))
            yield

    def revive(self, member: Member) -> None:
        """Gives a lost worker, which has a new session and has loaded its shards, a path and pulse
        by the settings in force, and takes it back into the client; a device step that is under way
        goes on without it. Errors: WorkerLost, WorkerTimeout, ProtocolError; DflashError where the
        runtime was closed.
        """
        client, placed, index = self._client, self._placed, member.client_index
        with self.making(member):
            client.mark_lost(index, "another process took its place")  # nothing happens to a lost one
            slots = placed.plan_slots()[member.name]
            channel, generation, pulse_fd = self._fleet.attach(member, slots)
            policy, (request_dtype, reply_dtype) = placed.slices, placed.wire_dtypes
            client.set_policy(index, policy.slice_tokens, placed.window(slots), policy.is_measured)
            client.set_dtypes(index, request_dtype, reply_dtype)
            client.revive(index, channel, generation, pulse_fd)

    def replace(self, slots: Mapping[str, _core.SlotPlan]) -> None:
        """Gives every worker that is not lost a path with other slots, planned in `slots` by its
        name. The caller holds the client (`Client.hold`), so that no call is under way, and lets no
        path be made (`making_none`). A lost worker gets such slots when it comes back.

        Errors: WorkerLost, WorkerTimeout. Some workers then have the new slots, and the thread
        renews the path that failed; the others keep their former ones.
        """
        lost = {report["name"] for report in self._client.workers() if report["state"] == "lost"}
        for name, member in self._fleet.members.items():
            if name in lost:
                continue
            self._client.retire_path(member.client_index, "slots of another size are needed")
            try:
                self._renew(member, slots[name])
            except DflashError as error:
                self._left_over.put((member.client_index, str(error)))
                self._client.wake_renewer()
                raise

    def call_off(self) -> None:
        """From now on nothing is renewed, and whom a renewal still waits for is hung up on; never
        raises.
        """
        self._is_over.set()
        if not self._thread.is_alive():  # never started; or this is a forked child
            return
        with suppress(DflashError):
            self._client.wake_renewer()
        _join(self._thread)
        for index, renewal in self._renewals.items():
            session = self._fleet.at_index(index).session
            if session is not None and renewal.is_alive():
                session.hang_up()

    def close(self) -> None:
        """Waits for what was called off; never raises."""
        for renewal in self._renewals.values():
            _join(renewal)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._worn_fd, select.POLLIN)
        while not self._is_over.is_set():
            poller.poll()
            try:
                for index, reason in (*self._client.retire_worn_paths(), *self._take_left_over()):
                    self._begin_to_renew(index, reason)
            except DflashError as error:  # the runtime was closed meanwhile
                log.debug("paths are not renewed any more: %s", str(error))
                return

    def _begin_to_renew(self, index: int, reason: str) -> None:
        renewal = threading.Thread(target=self._renew_worn, args=(index, reason), name=f"dflash-path-{index}", daemon=True)
        self._renewals[index] = renewal
        try:
            renewal.start()
        except RuntimeError:  # as many threads as the system allows
            del self._renewals[index]
            self._renew_worn(index, reason)

    def _take_left_over(self) -> list[tuple[int, str]]:
        return [self._left_over.get_nowait() for _ in range(self._left_over.qsize())]

    def _renew_worn(self, index: int, reason: str) -> None:
        member = self._fleet.at_index(index)
        log.info("worker %s: its data path is worn: %s", member.name, reason)
        session, slots = member.session, member.slots
        if slots is None:
            return

        def renew() -> None:
            with self.making(member):
                # Else the worker was lost meanwhile, and whoever brings it back makes its path.
                if member.session is session and self._client.workers()[index]["path"] == "worn":
                    self._renew(member, slots, limit_s)

        # Nobody listens to a retired path, so that its worker's pulses are judged by nobody. One
        # that stands still is found here instead, because a worker answers this at any time.
        limit_s = max(self._placed.settings.stall_timeout_s, LEAST_ATTACH_S)
        try:
            failure = try_to_renew(member.name, renew, self._is_over)
            if failure and not self._is_over.is_set():
                with self.making(member):
                    if member.session is session:
                        self._client.mark_lost(index, failure)  # calls that need it say so; the others go on
                self.on_loss()
        except DflashError as error:  # the runtime was closed meanwhile
            log.debug("worker %s: its data path is not renewed any more: %s", member.name, str(error))

    def _renew(self, member: Member, slots: _core.SlotPlan, limit_s: float | None = None) -> None:
        channel, generation, _ = self._fleet.attach(member, slots, limit_s)
        self._client.renew_path(member.client_index, channel, generation)
        log.info("worker %s: data path renewed, generation %d", member.name, generation)


def try_to_renew(worker: str, renew: Callable[[], None], is_over: threading.Event) -> str:
    """Calls `renew`, which gives a worker a fresh data path, RENEWALS times at most, until it has.
    Returns why the worker must be given up; empty where it has its path, or where `is_over` is set.
    PeerGone, which is about somebody else than the worker, is raised.
    """
    failure = ""
    for attempt in range(RENEWALS):
        if is_over.is_set():
            return ""
        try:
            renew()
            return ""
        except PeerGone:
            raise
        except WorkerLost as error:  # what its process did is told by those who need it
            log.info("worker %s: data path not renewed: %s", worker, str(error))
            return "hung up when its data path was to be renewed"
        except WorkerTimeout as error:
            log.info("worker %s: data path not renewed (attempt %d): %s", worker, attempt + 1, str(error))
            failure = f"did not answer when its data path was to be renewed, {attempt + 1} times"
        except Exception as error:  # noqa: BLE001 - whatever it was, calls must not wait for this path
            log.info("worker %s: data path not renewed (attempt %d): %s", worker, attempt + 1, str(error))
            failure = f"its data path could not be renewed: {error}"
            is_over.wait(PAUSE_S)
    return failure


def _join(thread: threading.Thread) -> None:
    """Waits for another thread's end; a runtime that nobody closed is collected on any thread."""
    if thread is not threading.current_thread():
        thread.join(STOP_S)
