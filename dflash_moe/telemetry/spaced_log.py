"""Log lines about what may happen thousands of times a second, of which a reader needs one.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

# Between two lines at least so much time goes by.
SPACE_S = 60.0


class SpacedLog:
    """Writes the first of many lines about one thing, and then one in SPACE_S, which says how many
    there were since. One thread at a time may call.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._last_s: float | None = None
        self._num_kept_back = 0

    def warning(self, text: str, *values: object, **given: Any) -> None:
        """As `logging.Logger.warning`, unless a line was written a short time ago."""
        self._write(logging.WARNING, text, values, given)

    def exception(self, text: str, *values: object) -> None:
        """As `logging.Logger.exception`, unless a line was written a short time ago."""
        self._write(logging.ERROR, text, values, {"exc_info": True})

    def _write(self, level: int, text: str, values: tuple[object, ...], given: dict[str, Any]) -> None:
        now = self._clock()
        if self._last_s is not None and now - self._last_s < SPACE_S:
            self._num_kept_back += 1
            return
        if self._num_kept_back:
            text = f"{text} (and {self._num_kept_back} times since it was last said)"
        self._last_s, self._num_kept_back = now, 0
        self._log.log(level, text, *values, **given)
