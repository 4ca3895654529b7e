"""A child process that works on what strangers wrote, within limits that it sets itself. It is used
for one thing after the other, and replaced when it had to be killed.

Both sides write frames: a length of 4 bytes and so many more. The child writes one when it is
ready, and then one for each that it was sent.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence

from dflash_moe.holders.launcher import FOLDER_VARIABLES, ISOLATION, OWN_GROUP, isolated_environment

# The work is limited in processor time, which a busy machine gives late. What is not there after so
# long will not come.
PATIENCE_S = 10.0
# An interpreter with jinja2 starts in 0.1 s on an idle machine.
START_S = 30.0
REAP_S = 5.0
LENGTH = struct.Struct("<I")
# The bytes of the first frame, which says no more than that it is there.
_MAX_READY = 1 << 16
# What an interpreter needs to start. Everything else stays here: a token in the environment is
# nothing for a stranger's program.
_KEPT_VARIABLES = {*FOLDER_VARIABLES, "PATH", "HOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV"}


def child_environment() -> dict[str, str]:
    """Returns the environment of a process that runs what a stranger wrote."""
    return {name: value for name, value in isolated_environment(os.environ).items() if name in _KEPT_VARIABLES}


class Ended(Exception):  # noqa: N818 - it carries which limit ended the process
    """The process ended, or was given up."""

    def __init__(self, limit: str) -> None:
        super().__init__(limit)
        self.limit = limit


class LimitedProcess:
    """A running child. One thread at a time may ask; close it."""

    def __init__(self, program: Sequence[str], *, time_limit: str, memory_limit: str) -> None:
        """Starts a script with its arguments and waits until it is ready. The limits are the words
        for an end by each. Raises OSError where nothing can be started, and Ended where
        it has ended first.
        """
        self._time_limit = time_limit
        self._memory_limit = memory_limit
        self._process = subprocess.Popen(
            [sys.executable, *ISOLATION, *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
            cwd="/",
            # It ends with the pipe, or a second later.
            **OWN_GROUP,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        for descriptor in (self._to, self._from):
            os.set_blocking(descriptor, False)
        try:
            self._read_frame(time.monotonic() + START_S, _MAX_READY, "it said more than that it is ready")
        except BaseException:
            self.close()
            raise

    def ask(self, request: bytes, most_bytes: int, too_large: str) -> bytes:
        """Sends a request and returns its answer, of `most_bytes` at most. Raises Ended with the
        limit that ended it; `too_large` are the words for a larger answer. A process that was not
        heard to its end must be closed.
        """
        deadline = time.monotonic() + PATIENCE_S
        self._write_all(LENGTH.pack(len(request)), deadline)
        self._write_all(request, deadline)
        return self._read_frame(deadline, most_bytes, too_large)

    def _write_all(self, content: bytes, deadline: float) -> None:
        rest = memoryview(content)
        while rest:
            self._await(self._to, selectors.EVENT_WRITE, deadline)
            try:
                rest = rest[os.write(self._to, rest) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._ended() from None

    def _read_frame(self, deadline: float, most_bytes: int, too_large: str) -> bytes:
        size = LENGTH.unpack(self._read_exactly(LENGTH.size, deadline))[0]
        if size > most_bytes:
            raise Ended(too_large)
        return self._read_exactly(size, deadline)

    def _read_exactly(self, size: int, deadline: float) -> bytes:
        parts, missing = [], size
        while missing:
            self._await(self._from, selectors.EVENT_READ, deadline)
            try:
                part = os.read(self._from, min(missing, 1 << 20))
            except BlockingIOError:
                continue
            if not part:
                raise self._ended()
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _await(self, descriptor: int, event: int, deadline: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, event)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise Ended(f"no answer came within {PATIENCE_S:g} s")

    def _ended(self) -> Ended:
        """Returns what ended the process, whose pipe has closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_S)
        code = self._process.returncode
        if code == -signal.SIGPROF:
            return Ended(self._time_limit)
        if code in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, 1):
            # What an interpreter without memory dies of, or one whose stack was overrun.
            return Ended(f"{self._memory_limit}, or nested too deeply")
        return Ended(f"its process ended with status {code}")

    def close(self) -> None:
        """Kills the process and reaps it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
