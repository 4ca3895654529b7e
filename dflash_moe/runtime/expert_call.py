"""A submitted expert call: wait for it, await it, or drop it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from typing import Any

from dflash_moe import _core
from dflash_moe.errors import ConfigError, DflashError, WorkerError, WorkerTimeout

# A wait without a limit of its own is bounded by the call's deadline, not by this.
WAIT_STEP_S = 3600.0
DELIVERY_S = 60.0  # twice the limit that the core sets for copying a result to the device


class ExpertCall:
    """A submitted call. Keep the inputs unchanged until it is done. Dropping it abandons the call.

    Any number of threads may wait for it; each gets the result.
    """

    __slots__ = ("__weakref__", "_call", "_deliver", "_delivery", "_explain", "_layer", "_result")

    def __init__(
        self,
        layer: object,
        call: _core.Call,
        result: Any,
        explain: Callable[[WorkerError], DflashError],
        deliver: Callable[[], None] | None,
    ) -> None:
        """By `ExpertRuntime.submit`. `deliver` brings the result to the caller's device."""
        self._call = call
        self._layer = layer
        self._result = result
        self._explain = explain
        self._deliver = deliver
        self._delivery = None if deliver is None else threading.Lock()

    def done(self) -> bool:
        """True once `result()` would return (or raise) at once."""
        return self._call.is_done()

    def result(self, timeout: float | None = None) -> Any:
        """Waits and returns the experts' output.

        WorkerTimeout when `timeout` seconds pass first (the call goes on), or the call's own error:
        WorkerLost, WorkerTimeout, WorkerError, ProtocolError; DflashError where the runtime was
        closed before. ConfigError for a timeout that is no number of seconds.
        """
        limit_s = WAIT_STEP_S if timeout is None else _seconds(timeout)
        while not self._call.wait(limit_s):
            if timeout is not None:
                raise WorkerTimeout(f"layer {self._layer}: not done within the {limit_s:g} s given to result(); it goes on")
        try:
            self._call.result()
        except WorkerError as error:
            raise self._explain(error) from None
        if self._delivery is not None:
            self._deliver_once(self._delivery)
        return self._result

    def _deliver_once(self, delivery: threading.Lock) -> None:
        if not delivery.acquire(timeout=DELIVERY_S):
            raise WorkerTimeout(f"layer {self._layer}: another thread did not bring the result to the device in time")
        try:
            if self._deliver is not None:
                self._deliver()
                self._deliver = None
        finally:
            delivery.release()

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.get_running_loop().run_in_executor(None, self.result).__await__()


def _seconds(timeout: float) -> float:
    try:
        seconds = float(timeout)
    except (TypeError, ValueError):
        seconds = float("nan")
    if not seconds >= 0 or isinstance(timeout, str | bytes):  # NaN too
        raise ConfigError(f"timeout: found {timeout!r}, expected seconds >= 0 or None")
    return seconds
