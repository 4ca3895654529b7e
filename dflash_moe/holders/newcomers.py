"""Adds workers that register under names which the topology does not list, one after the other, as
`add_worker` does for one that somebody names.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

from dflash_moe.errors import DflashError, WorkerTimeout
from dflash_moe.holders.session import START_LIMIT
from dflash_moe.topology import WorkerSpec
from dflash_moe.topology.addresses import REGISTERED

if TYPE_CHECKING:
    from dflash_moe.holders.elastic import Elastic
    from dflash_moe.holders.placed_experts import PlacedExperts

log = logging.getLogger(__name__)

# The thread has this time to end once the worker that it adds is hung up on.
STOP_S = 5.0
# Whoever waits for expected workers looks so often.
LOOK_S = 0.05


class Newcomers:
    """The thread that adds them, from `start` to `call_off`; it does nothing where nobody may
    register beyond those that the topology lists.
    """

    def __init__(self, placed: PlacedExperts, elastic: Elastic) -> None:
        self._placed = placed
        self._elastic = elastic
        self._is_over = threading.Event()
        self._waiting: queue.Queue[str | None] | None = None
        self._thread = threading.Thread(target=self._run, name="dflash-newcomers", daemon=True)

    def start(self) -> None:
        """Begins to take newcomers, and waits until as many workers have registered as the topology
        expects. Raises WorkerTimeout that says how many are there, and who is missing by name.
        """
        desk, registration = self._placed.fleet.desk, self._placed.topology.registration
        if desk is None or registration is None or registration.names is None:
            return
        self._waiting = desk.newcomers = queue.Queue(registration.max_pending)
        self._thread.start()
        self._await(registration.expect, [] if registration.allows("any") else list(registration.names))

    def _await(self, expected: int, names: list[str]) -> None:
        limit_s = self._placed.settings.start_timeout_s
        until = time.monotonic() + limit_s
        while len(there := self._there()) < expected:
            if self._is_over.wait(LOOK_S) or time.monotonic() > until:
                missing = [name for name in names if name not in there]
                raise WorkerTimeout(
                    f"registration.expect: {expected} workers are expected, and {len(there)} have registered within "
                    f"{limit_s:g} s ({START_LIMIT}): {', '.join(there) or 'none'}"
                    + (f"; missing are {', '.join(missing)}" if missing else "")
                )

    def _there(self) -> list[str]:
        return [name for name, member in self._placed.fleet.members.items() if member.address.is_registered]

    def call_off(self) -> None:
        """Ends the thread; the worker that it adds is ended with the fleet. It never raises."""
        self._is_over.set()
        if self._waiting is None:
            return
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            log.debug("newcomers wait, and are not added any more")

    def close(self) -> None:
        """Waits for what was called off; never raises."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_S)

    def _run(self) -> None:
        waiting, desk = self._waiting, self._placed.fleet.desk
        while waiting is not None and desk is not None and not self._is_over.is_set():
            # It waits for newcomers for as long as its runtime lives; `call_off` puts the last one.
            name = waiting.get()
            if name is None or self._is_over.is_set():
                return
            if name in self._placed.fleet.members or not desk.has(name):
                continue  # it came twice, or is gone again
            try:
                self._elastic.add(WorkerSpec(name, address=REGISTERED), is_patient=True)
            except DflashError as error:
                if not self._is_over.is_set():
                    log.warning("worker %s registered and is not added: %s", name, error)
                    desk.refuse(name, error)
            except Exception:
                log.exception("worker %s registered and could not be added", name)
