"""Becomes another program that ends with the process which started it: `python tied_program.py
PARENT_PID PROGRAM ARGUMENT...`.

It runs as a file of its own, in an interpreter without the user's modules, because code between
fork and exec of a process with threads must not be Python. The process stays the same one, and its
descriptors, folder and terminal stay as they are. Without a terminal it leads a process group of
its own.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# The number is that of linux/prctl.h.
PR_SET_PDEATHSIG = 1
# These are what shells answer for a program that is not there, and for one that does not start.
NOT_FOUND, NOT_STARTED = 127, 126


def has_terminal() -> bool:
    """Says whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def become(parent_pid: int, command: list[str]) -> int:
    """Replaces this process. It returns an exit code only where that fails, after saying why."""
    # SIGTERM leaves the program the time to say goodbye, as it would have when told to end.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent_pid:
        return 128 + signal.SIGTERM
    if not has_terminal():
        # A signal to the parent's group would come twice, once from the parent, which hands it on.
        # With a terminal the group stays, because it is what Ctrl-C and job control act on.
        os.setpgid(0, 0)
    # An interpreter ignores these, and an ignored signal stays ignored in the program.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execv(command[0], command)
    except OSError as error:
        print(f"{command[0]}: cannot be started: {error.strerror}", file=sys.stderr)  # noqa: T201
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_STARTED


if __name__ == "__main__":
    sys.exit(become(int(sys.argv[1]), sys.argv[2:]))
