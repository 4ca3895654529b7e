"""Ties the life of a started worker to its host: the kernel kills it when its parent dies, it
ignores Ctrl-C, and a crash leaves a trace in its log.

The kernel's signal comes when the launcher thread of the host ends, which holders/launcher.py keeps
alive. The hang-up of the control connection covers the rest, so that a worker whose host died is
gone within 2 s even while it computes.
SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal

# The number is that of linux/prctl.h.
_PR_SET_PDEATHSIG = 1


def tie_to_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when its parent dies. It exits at once when the parent
    is gone already, because no signal would come then.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(0)


def guard_signals() -> None:
    """Ignores SIGINT, because the host that got it too says goodbye in its own time. SIGTERM and
    fatal errors end the process, the latter with a trace on stderr.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
