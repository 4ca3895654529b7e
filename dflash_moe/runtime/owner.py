"""Which process an object belongs to. A forked child has copies of a runtime's sockets and child
processes; a word or a signal of its own would reach what the parent is using.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import os

from dflash_moe.errors import DflashError


class Owner:
    """The process that made this."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """False in a forked child."""
        return os.getpid() == self._pid

    def require_here(self) -> None:
        """DflashError in a forked child, as the C++ client raises there."""
        if not self.is_here:
            raise DflashError("this runtime belongs to the parent process; start one of your own after fork()")
