"""What the supervisor does with messages that come while it is at work on the former one.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

from dflash_moe.handover.handed_worker import HandedWorker
from dflash_moe.handover.supervisor import Supervisor

JOIN_S = 30.0


class Renewing(Supervisor):
    """Its first path is said to be worn before the thread that made it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self.num_made = 0

    def _make_path(self, holder: HandedWorker) -> None:
        self.num_made += 1
        if self.num_made == 1:
            self._begin_to_renew(holder, "worn again")


def test_path_that_is_worn_at_once_is_renewed_again():
    supervisor, holder = Renewing(), HandedWorker(0, SimpleNamespace(name="w0"), None)
    for expected in (2, 3):
        supervisor._begin_to_renew(holder, "worn")
        assert holder.thread is not None
        holder.thread.join(JOIN_S)
        assert supervisor.num_made == expected
        assert not holder.is_busy
