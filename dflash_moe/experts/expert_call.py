"""A submitted expert call, which its caller waits for, awaits, or drops.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from typing import Any

from dflash_moe import _core
from dflash_moe.errors import ConfigError, DflashError, WorkerError, WorkerTimeout

# The core waits at most this long at a time. A wait without a limit of its own repeats it, and ends
# with the deadline of the call, which is far shorter.
WAIT_STEP_S = 3600.0
# Another thread that copies the result to the device has this time: twice the limit that the core
# sets for the copy.
DELIVERY_S = 60.0


class ExpertCall:
    """A submitted call. The caller keeps the inputs unchanged until it is done. Dropping the object
    abandons the call.

    Any number of threads may wait for it, and each gets the result.
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
        """`ExpertRuntime.submit` makes it. `explain` completes an error of the client with what the
        runtime knows, and `deliver` copies the result to the caller's device.
        """
        self._call = call
        self._layer = layer
        self._result = result
        self._explain = explain
        self._deliver = deliver
        self._delivery = None if deliver is None else threading.Lock()

    def done(self) -> bool:
        """Says whether the call has ended, so that `result()` waits for no worker."""
        return self._call.is_done()

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the call and returns the experts' output, [num_tokens, out_size]; it is `out`
        where the caller gave one.

        Raises WorkerTimeout when `timeout` seconds pass first, while the call goes on, or the error
        of the call itself: WorkerLost, WorkerTimeout, WorkerError, ProtocolError; DflashError where
        the runtime was closed before. ConfigError is for a timeout that is no number of seconds.
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
    # The first comparison is false for NaN too.
    if not seconds >= 0 or isinstance(timeout, str | bytes):
        raise ConfigError(f"timeout: found {timeout!r}, expected seconds >= 0 or None")
    return seconds


class BoundExperts:
    """A call of the routed experts whose tensors are fixed (`ExpertRuntime.bind`). One thread at a
    time runs it.
    """

    __slots__ = ("batch", "client", "explained", "layer")

    def __init__(
        self, client: _core.Client, layer: int, batch: _core.TokenBatch, explained: Callable[[WorkerError], DflashError]
    ) -> None:
        """Whoever makes the call in another way, by the client, completes its errors by
        `explained`.
        """
        self.client, self.layer, self.batch, self.explained = client, layer, batch, explained

    def run(self) -> None:
        """Computes the experts and returns once the result is written. Errors are those of
        `ExpertRuntime.experts`.
        """
        try:
            self.client.run(self.layer, self.batch)
        except WorkerError as error:
            raise self.explained(error) from None

    def submit(self) -> Callable[[], None]:
        """Starts the call and returns the function that waits for its end, which raises what `run`
        would.
        """
        try:
            call = _core.Call(self.client, self.layer, self.batch)
        except WorkerError as error:
            raise self.explained(error) from None
        return lambda: self._finish(call)

    def _finish(self, call: _core.Call) -> None:
        try:
            while not call.wait(WAIT_STEP_S):
                pass
            call.result()
        except WorkerError as error:
            raise self.explained(error) from None
        finally:
            call.abandon()
