"""The renewal of one data path: what becomes of it, how often it is tried, and when its worker is
given up for it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from dflash_moe.errors import DflashError, WorkerLost, WorkerTimeout
from dflash_moe.protocol.failures import is_passing
from dflash_moe.protocol.framing import PeerGone
from dflash_moe.telemetry.spaced_log import SpacedLog

log = logging.getLogger(__name__)

# A worker with which so many renewals of a path in a row came to nothing is lost.
RENEWALS = 3
# A renewal that lacked something, descriptors for example, pauses this long before its next try:
# others may give it back meanwhile.
PAUSE_S = 0.2


@dataclass(slots=True)
class Renewal:
    """One path that is being renewed by a thread of its own."""

    reason: str
    began: float = field(default_factory=time.monotonic)
    thread: threading.Thread | None = None
    is_late: bool = False
    is_over: bool = False
    # Done when the worker has its path or is lost. It fails where this process lacks something, and
    # the renewal goes on all the same.
    outcome: Future[None] = field(default_factory=Future)

    def next_outcome(self) -> Future[None]:
        """Returns what becomes of it from now on, whatever it has lacked before."""
        if self.outcome.done():
            self.outcome = Future()
        return self.outcome

    def lacks(self, error: Exception) -> None:
        """Says that this process lacks something, such as descriptors; more than once, too."""
        if not self.outcome.done():
            typed = error if isinstance(error, DflashError) else DflashError(f"a data path: {error}", code="system")
            # A copy: the traceback of the error has what was to become the path, a mapped segment
            # and its descriptors, and this object lives as long as the runtime.
            self.outcome.set_exception(typed.reworded(str(typed)))

    def end(self) -> None:
        """Says that the worker has its path, or is lost."""
        self.is_over = True
        if not self.outcome.done():
            self.outcome.set_result(None)


def try_to_renew(
    worker: str,
    renew: Callable[[], None],
    is_over: threading.Event,
    *,
    runs: Callable[[], bool] = lambda: True,
    on_lack: Callable[[Exception], None] = lambda _error: None,
) -> str:
    """Calls `renew`, which gives a worker a fresh data path, until it has. Returns why the worker
    must be given up: it hung up, did not answer and does not even run (`runs` says so), or RENEWALS
    times nothing came of it; empty where it has its path, or where `is_over` is set.

    What this process lacks, such as descriptors, is nobody's fault: `on_lack` is told, and it goes
    on. PeerGone, which is about somebody else than the worker, is raised.
    """
    num_late = num_failed = 0
    lacks = SpacedLog(log)
    while not is_over.is_set():
        try:
            renew()
            return ""
        except PeerGone:
            raise
        except WorkerLost as error:  # what its process did is told by those who need it
            log.info("worker %s: data path not renewed: %s", worker, str(error))
            return "hung up when its data path was to be renewed"
        except WorkerTimeout as error:
            num_late += 1
            log.info("worker %s: data path not renewed (attempt %d): %s", worker, num_late, str(error))
            if num_late >= RENEWALS or not runs():
                often = f", {num_late} times" if num_late > 1 else ""
                return f"did not answer when its data path was to be renewed{often}"
        except Exception as error:  # noqa: BLE001 - whatever it was, calls must not wait for this path
            if is_passing(error):
                lacks.warning("worker %s: data path not renewed yet: %s", worker, str(error))
                on_lack(error)
            else:
                num_failed += 1
                log.info("worker %s: data path not renewed (attempt %d): %s", worker, num_failed, str(error))
                if num_failed >= RENEWALS:
                    return f"its data path could not be renewed: {error}"
            is_over.wait(PAUSE_S)
    return ""
