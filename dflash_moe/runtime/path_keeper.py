"""Keeps the data paths of a runtime usable: it renews a path that the client says is worn, and all
paths when a change of mode wants other slots.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import queue
import select
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from dflash_moe.errors import DflashError, WorkerLost, WorkerTimeout
from dflash_moe.protocol.framing import PeerGone

if TYPE_CHECKING:
    from dflash_moe import _core
    from dflash_moe.runtime.fleet import Fleet, Member

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

    def __init__(self, client: _core.Client, fleet: Fleet) -> None:
        self._client = client
        self._fleet = fleet
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
        self._thread.start()

    def replace(self, slots: Mapping[str, _core.SlotPlan]) -> None:
        """Gives every worker a path with other slots, planned in `slots` by its name. The caller
        holds the client (`Client.hold`), so that no call is under way.

        Errors: WorkerLost, WorkerTimeout. Some workers then have the new slots, and the thread
        renews the path that failed; the others keep their former ones.
        """
        for name, member in self._fleet.members.items():
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
            session = self._member(index).session
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

    def _member(self, index: int) -> Member:
        return next(member for member in self._fleet.members.values() if member.client_index == index)

    def _renew_worn(self, index: int, reason: str) -> None:
        member = self._member(index)
        log.info("worker %s: its data path is worn: %s", member.name, reason)
        try:
            slots = member.slots
            failure = "" if slots is None else try_to_renew(member.name, partial(self._renew, member, slots), self._is_over)
            if failure and not self._is_over.is_set():
                self._client.mark_lost(index, failure)  # calls that need it say so; the others go on
        except DflashError as error:  # the runtime was closed meanwhile
            log.debug("worker %s: its data path is not renewed any more: %s", member.name, str(error))

    def _renew(self, member: Member, slots: _core.SlotPlan) -> None:
        channel, generation, _ = self._fleet.attach(member, slots)
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
            log.warning("worker %s: data path not renewed: %s", worker, str(error))
            return "hung up when its data path was to be renewed"
        except WorkerTimeout as error:
            log.warning("worker %s: data path not renewed (attempt %d): %s", worker, attempt + 1, str(error))
            failure = f"did not answer when its data path was to be renewed, {attempt + 1} times"
        except Exception as error:  # noqa: BLE001 - whatever it was, calls must not wait for this path
            log.warning("worker %s: data path not renewed (attempt %d): %s", worker, attempt + 1, str(error))
            failure = f"its data path could not be renewed: {error}"
            is_over.wait(PAUSE_S)
    return failure


def _join(thread: threading.Thread) -> None:
    """Waits for another thread's end; a runtime that nobody closed is collected on any thread."""
    if thread is not threading.current_thread():
        thread.join(STOP_S)
