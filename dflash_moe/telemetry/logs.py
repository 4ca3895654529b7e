"""Sets up the logging of worker processes, and makes their log files in anonymous memory, so that
nothing is left behind.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import os
import sys
import threading

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
QUOTED_LINES = 8
# At most so many bytes of a log are read, which is enough for the quoted lines.
_TAIL_BYTES = 4096


def set_up_worker_logging() -> None:
    """Sends all log records of this process to stderr."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=LOG_FORMAT, force=True)


class LogFile:
    """The file of a worker's stdout and stderr. It has a descriptor but no name, so that it
    vanishes with the last process that holds it.
    """

    def __init__(self, name: str) -> None:
        self._descriptor = os.memfd_create(f"dflash_moe-log-{name}"[:200], os.MFD_CLOEXEC)
        # What it ended with, once it is closed.
        self._last = ""
        # One thread may quote a log that another closes.
        self._lock = threading.RLock()

    def fileno(self) -> int:
        """Returns the descriptor that becomes stdout and stderr of the worker. It stays this
        object's.
        """
        return self._descriptor

    def tail(self, num_lines: int = QUOTED_LINES) -> str:
        """Returns the last lines without disturbing the position of the writer. After close these
        are the lines of that moment.
        """
        with self._lock:
            text = self._text() if self._descriptor >= 0 else self._last
        lines = [line for line in text.splitlines() if line.strip()]
        return "\n".join(lines[-num_lines:])

    def _text(self) -> str:
        start = max(0, os.fstat(self._descriptor).st_size - _TAIL_BYTES)
        return os.pread(self._descriptor, _TAIL_BYTES, start).decode("utf-8", "replace")

    def close(self) -> None:
        """Gives the memory back once the worker is gone. It may be called again."""
        with self._lock:
            if self._descriptor >= 0:
                self._last = self._text()
                os.close(self._descriptor)
                self._descriptor = -1
