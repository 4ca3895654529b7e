"""Lets calls through, or holds them back while data paths are renewed. The open gate costs a call
two deque operations.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from dflash_moe.errors import WorkerTimeout
from dflash_moe.runtime.expert_call import ExpertCall

# times call_timeout_s: by then every call has ended (kMaxPatience of csrc/client/engine.h)
MAX_PATIENCE = 20
POLL_S = 0.0005  # renewing takes milliseconds and is rare


class CallGate:
    """Callers append to `active` before they look at `is_shut`, and pop when they are through: both
    are atomic.

    Whoever shuts the gate holds `lock`, and after `quiesce` no call is under way.
    """

    def __init__(self) -> None:
        self.active: deque[None] = deque()
        self.is_shut = False
        self.lock = threading.RLock()
        self._submitted: weakref.WeakSet[ExpertCall] = weakref.WeakSet()

    def note_submitted(self, call: ExpertCall) -> None:
        """Counts `call` as under way until it is done or dropped."""
        self._submitted.add(call)

    @contextmanager
    def stepping_back(self) -> Iterator[None]:
        """For a caller that found the gate shut: it does not count as under way until it has had
        the lock.
        """
        self.active.pop()
        try:
            self.lock.acquire()
        except BaseException:  # Ctrl-C while waiting: the caller pops its entry in any case
            self.active.append(None)
            raise
        try:
            yield
        finally:
            # before the lock goes, so that the next one to shut the gate waits for this call
            self.active.append(None)
            self.lock.release()

    def quiesce(self, *, seconds: float) -> None:
        """Shuts the gate and waits for the calls under way; the caller holds `lock`. WorkerTimeout
        after `seconds`.
        """
        self.is_shut = True
        until = time.monotonic() + seconds
        while self.active or any(not call.done() for call in list(self._submitted)):
            if time.monotonic() > until:
                raise WorkerTimeout("calls are still under way after their deadline; collect or drop submitted calls first")
            time.sleep(POLL_S)
