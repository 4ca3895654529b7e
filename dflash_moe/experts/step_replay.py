"""Steps that fail over: a step of the host's device that a worker spoilt is computed again by plain
calls, which ask other holders.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from dflash_moe.errors import ConfigError, ProtocolError, UnsupportedError, WorkerError, WorkerLost, WorkerTimeout
from dflash_moe.experts.device_step import DeviceStep, DeviceSteps

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# Numbers out of range are the caller's: every holder would answer the same.
_NOT_REPLAYED = "range"


class _NoStep(Exception):  # noqa: N818 - no error: plain calls are made instead
    """There can be no step of the device now, for the reason that it says."""


class StepReplay:
    """Runs steps and counts how they went. Any thread may call."""

    def __init__(self, steps: DeviceSteps, patience_s: Callable[[], float]) -> None:
        """`patience_s()` is how long a step may wait until it can begin, in seconds."""
        self._steps = steps
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._counts = {"steps": 0, "replays": 0, "plain": 0}
        # The reason that was logged last why a step was none of the device's.
        self._reason = ""

    def counts(self) -> dict[str, int]:
        """Returns how many steps the device made (`steps`), how many of them were replayed by plain
        calls (`replays`), and how many were made by plain calls from the start (`plain`), because
        no holder was there that a device can ask.
        """
        with self._lock:
            return dict(self._counts)

    def run(self, work: Callable[[], Result], undo: Callable[[], None], stream: int | None) -> Result:
        """As `ExpertRuntime.run_step`."""
        if self._steps.of_this_thread() is not None:
            raise ConfigError("run_step: a step is open already; leave it first")
        try:
            step = self._begin(stream)
            self._count("steps")
            with step:
                return work()
        except _NoStep as error:
            self._note_plain(str(error))
        except (WorkerError, ProtocolError) as error:
            if error.code == _NOT_REPLAYED:
                raise
            log.warning("a device step is replayed by plain calls: %s", str(error))
            self._count("replays")
            undo()
        finally:
            self._steps.abandon()
        return work()

    def _begin(self, stream: int | None) -> DeviceStep:
        try:
            return self._steps.begin(stream, self._patience_s())
        except (WorkerLost, WorkerTimeout, UnsupportedError) as error:
            raise _NoStep(str(error)) from error

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def _note_plain(self, reason: str) -> None:
        self._count("plain")
        if reason != self._reason:
            self._reason = reason
            log.warning("plain calls instead of device steps: %s", reason)
