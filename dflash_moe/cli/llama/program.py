"""The program that `dflash-moe llama` starts: its process, the signals that reach it, and its end.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from dflash_moe.errors import ConfigError, shown
from dflash_moe.handover import tied_program

# The program is looked at this often.
TICK_S = 0.25
# A program that was told to end has this time; a server finishes what it has begun.
END_S = 30.0
# SIGKILL is certain, and only uninterruptible I/O could delay the end.
REAP_S = 5.0
# Without a program these end this process, as Ctrl-C does by itself.
ENDING = (signal.SIGTERM, signal.SIGHUP)
# These are handed on. Ctrl-C reaches the program by itself where both share a terminal.
PASSED_ON = (*ENDING, signal.SIGINT)


def find_program(name: str) -> str:
    """Returns the absolute path of a program as a shell finds it. Raises ConfigError."""
    found = shutil.which(name)
    if found is None:
        raise ConfigError(f"program {shown(name)}: not found, or not executable; give its path after the --")
    return os.path.abspath(found)


class Program:
    """A direct child with this process's own standard streams. It ends when this process does; who
    waits for its exit status owns it.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], *, inherited: Sequence[int] = ()) -> None:
        """Starts it with the descriptors `inherited` under their numbers. Raises ConfigError where
        the system does not start processes.
        """
        launcher = [sys.executable, "-I", "-S", str(Path(tied_program.__file__)), str(os.getpid())]
        try:
            self._process = subprocess.Popen([*launcher, *command], env=dict(environ), pass_fds=inherited)
        except OSError as error:
            raise ConfigError(f"{command[0]}: cannot be started: {error.strerror}") from None
        self._kill_at = 0.0
        # A signal has reached this process that is the program's, so that its end is no surprise.
        self.is_signalled = False

    @property
    def pid(self) -> int:
        """The process, which is the program's own once it runs."""
        return self._process.pid

    def watch(self, look: Callable[[], str]) -> int:
        """Waits for the end and calls `look` now and then meanwhile. A text that it returns is the
        reason to end the program, and later looks are not taken. Returns the exit code as a shell
        has it.
        """
        is_ending = False
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return exit_code(self._process.wait(TICK_S))
            if not is_ending and look():
                is_ending = True
                self.terminate()
            if self._kill_at and time.monotonic() >= self._kill_at:
                self._process.kill()

    def terminate(self) -> None:
        """Tells it to end; END_S later it is killed by `watch`."""
        self._send(signal.SIGTERM)

    def close(self) -> None:
        """Ends it at once where it still runs, and reaps it."""
        if self._process.poll() is None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(REAP_S)

    def _send(self, number: int) -> None:
        if number != signal.SIGINT and not self._kill_at:
            self._kill_at = time.monotonic() + END_S
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    @contextmanager
    def signals_passed_on(self) -> Iterator[None]:
        """Hands signals to this process on to the program within the block, instead of ending."""

        def hand_on(number: int, _frame: FrameType | None) -> None:
            self.is_signalled = True
            if number != signal.SIGINT or not _is_in_terminals_foreground():
                self._send(number)

        former = {number: signal.signal(number, hand_on) for number in PASSED_ON}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)


def exit_code(status: int) -> int:
    """Returns a shell's exit code for a status of `subprocess`: 128 + n for an end by signal n."""
    return 128 - status if status < 0 else status


def _is_in_terminals_foreground() -> bool:
    """Whether a Ctrl-C goes to this process group, and so to the program as well."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
