"""One line of each request at its end, on stderr: never a prompt, an answer or a key.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from enum import Enum
from typing import Any


class LogForm(str, Enum):
    """How a line looks, or that there is none."""

    TEXT = "text"
    JSON = "json"
    OFF = "off"


# Lines that may wait for whoever reads stderr. That is a megabyte, and more are dropped.
MAX_WAITING = 4096
# What waits at the end has so long to be written.
CLOSE_S = 1.0


class RequestLog:
    """Writes in a thread of its own, because stderr may be a pipe that somebody is slow to read,
    and no other request must wait for that.
    """

    def __init__(self, form: LogForm) -> None:
        self._write = _FORMATS.get(form)
        self.num_dropped = 0
        self._lines: queue.Queue[Mapping[str, Any] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        if self._write is not None:
            self._thread.start()

    def write(self, fields: Mapping[str, Any]) -> None:
        """Has a line written of `fields`, which are of JSON's types. It never waits."""
        if self._write is None:
            return
        try:
            self._lines.put_nowait({"time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"), **fields})
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Returns once all is written, or after CLOSE_S."""
        if self._write is None:
            return
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (fields := self._lines.get()) is not None:
            assert self._write is not None
            with contextlib.suppress(OSError):  # nobody reads it any more
                os.write(2, self._write(fields).encode("ascii", "backslashreplace") + b"\n")


def _as_text(fields: Mapping[str, Any]) -> str:
    given = dict(fields)
    first = f"{given.pop('time')} INFO request: {given.pop('method')} {given.pop('route')} {given.pop('status')}"
    return " ".join([first, *(f"{name}={value}" for name, value in given.items())])


_FORMATS: Mapping[LogForm, Callable[[Mapping[str, Any]], str]] = {LogForm.TEXT: _as_text, LogForm.JSON: json.dumps}
