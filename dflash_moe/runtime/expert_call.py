"""A submitted expert call: wait for it, await it, or drop it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

from dflash_moe import _core
from dflash_moe.errors import DflashError, WorkerError, WorkerTimeout

# a wait without a limit of its own is bounded by the call's deadline, not by this
WAIT_STEP_S = 3600.0


class ExpertCall:
    """A submitted call. Keep the inputs unchanged until it is done. Dropping it abandons the
    call.
    """

    __slots__ = ("__weakref__", "_call", "_deliver", "_explain", "_layer", "_result")

    def __init__(
        self,
        layer: object,
        call: _core.Call | None,
        result: Any,
        explain: Callable[[WorkerError], DflashError],
        deliver: Callable[[], None] | None = None,
    ) -> None:
        """By `ExpertRuntime.submit`; `call` None: there was nothing to compute. `deliver` brings a
        result to the device.
        """
        self._deliver = deliver
        self._explain = explain
        self._layer = layer
        self._call = call
        self._result = result

    def done(self) -> bool:
        """True once `result()` would return (or raise) at once."""
        return self._call is None or self._call.is_done()

    def result(self, timeout: float | None = None) -> Any:
        """Waits and returns the experts' output.

        WorkerTimeout when `timeout` seconds pass first (the call goes on), or the call's own error:
        WorkerLost, WorkerTimeout, WorkerError, ProtocolError; DflashError where the runtime was
        closed before.
        """
        if self._call is None:
            return self._result
        while not self._call.wait(WAIT_STEP_S if timeout is None else timeout):
            if timeout is not None:
                raise WorkerTimeout(f"layer {self._layer}: not done within the {timeout:g} s given to result(); it goes on")
        try:
            self._call.result()
        except WorkerError as error:
            raise self._explain(error) from None
        if self._deliver is not None:
            self._deliver()
            self._deliver = None
        # a result that is kept must not keep the data paths of a closed runtime open
        self._call = None
        return self._result

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.get_running_loop().run_in_executor(None, self.result).__await__()
