"""Keeps the data paths of a runtime usable: it renews a path that the client says is worn, and all
paths when a change of mode wants other slots.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import queue
import select
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from dflash_moe.errors import DflashError, WorkerLost, WorkerTimeout

if TYPE_CHECKING:
    from dflash_moe import _core
    from dflash_moe.runtime.fleet import Fleet, Member

log = logging.getLogger(__name__)

# A worker that did not answer this many renewals of a path in a row is lost.
RENEWALS = 3
# The thread has this time to end. It looks at its bell between two renewals.
STOP_S = 5.0


class PathKeeper:
    """One thread that sleeps until the client says that a path is worn (csrc/client/path.h).

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
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="dflash-paths", daemon=True)

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

    def close(self) -> None:
        """Ends the thread. It never raises."""
        self._is_over = True
        if self._thread.is_alive():
            # A forked child has no such thread, and the client refuses it.
            with suppress(DflashError):
                self._client.wake_renewer()
                self._thread.join(STOP_S)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._worn_fd, select.POLLIN)
        while not self._is_over:
            poller.poll()
            try:
                for index, reason in (*self._client.retire_worn_paths(), *self._take_left_over()):
                    self._renew_worn(index, reason)
            except DflashError as error:
                # The client refuses because the runtime was closed meanwhile.
                log.debug("paths are not renewed any more: %s", str(error))
                return

    def _take_left_over(self) -> list[tuple[int, str]]:
        return [self._left_over.get_nowait() for _ in range(self._left_over.qsize())]

    def _renew_worn(self, index: int, reason: str) -> None:
        member = next(member for member in self._fleet.members.values() if member.client_index == index)
        log.info("worker %s: its data path is worn: %s", member.name, reason)
        for attempt in range(RENEWALS):
            if self._is_over or member.slots is None:
                return
            try:
                self._renew(member, member.slots)
                return
            except WorkerTimeout as error:
                log.warning("worker %s: data path not renewed (attempt %d): %s", member.name, attempt + 1, str(error))
                reason = f"did not answer when its data path was to be renewed, {attempt + 1} times"
            except WorkerLost as error:
                # The reason leaves out how its process ended: calls that need the worker add that.
                log.warning("worker %s: data path not renewed: %s", member.name, str(error))
                reason = "hung up when its data path was to be renewed"
                break
            except DflashError as error:
                reason = f"its data path could not be renewed: {error}"
                break
        # From here on calls that need the worker raise WorkerLost, and all others go on.
        self._client.mark_lost(index, reason)

    def _renew(self, member: Member, slots: _core.SlotPlan) -> None:
        channel, generation, _ = self._fleet.attach(member, slots)
        self._client.renew_path(member.client_index, channel, generation)
        log.info("worker %s: data path renewed, generation %d", member.name, generation)
