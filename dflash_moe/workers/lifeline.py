"""Ties a started worker's life to its host: parent-death signal, ignored Ctrl-C, crash traces in
the log.

The signal follows the host's launcher thread (runtime/launcher.py keeps it alive); the control
connection's hang-up covers the rest, so a worker whose host died is gone within 2 s even while it
computes.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def tie_to_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when its parent dies; exits at once when the parent is
    already gone.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(0)


def guard_signals() -> None:
    """Ignores SIGINT (the host drains and says goodbye) and lets SIGTERM and fatal errors end the
    process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
