"""The process that an object belongs to. A forked child has copies of a runtime's sockets and of
the ids of its child processes, and whatever it sent there would reach what the parent is using.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os

from dflash_moe.errors import DflashError


class Owner:
    """Remembers the process that made it."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is the process that made it; false in a forked child."""
        return os.getpid() == self._pid

    def require_here(self) -> None:
        """Raises DflashError in a forked child, as the C++ client does there."""
        if not self.is_here:
            raise DflashError("this runtime belongs to the parent process; start one of your own after fork()")
