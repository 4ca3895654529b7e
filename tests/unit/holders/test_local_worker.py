"""A worker in the host's own process that is closed while its data path is renewed.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import threading

import pytest

from dflash_moe import _core
from dflash_moe.errors import WorkerLost
from dflash_moe.holders import local_worker
from dflash_moe.holders.local_worker import LocalWorker

LIMIT_S = 30.0


def slots() -> _core.SlotPlan:
    slices = _core.plan_slices("batched", batch_capacity=16, stream_tokens=4, stream_tokens_max=16)
    return _core.plan_arena([[_core.ShardShape(8, 8, 1, 1)]], slices, "f32", "f32", 0)[0]


def test_a_close_while_a_path_is_renewed_ends_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = LocalWorker("near", isa="scalar", threads=1, spin_ns=0, slowdown=1.0, numerics="f32-canonical")
    closing = threading.Thread(target=worker.close)

    class ClosedWhileItStarts(threading.Thread):
        """A thread that somebody wants to end before it runs."""

        def start(self) -> None:
            closing.start()
            # Whoever closes has begun, and has to wait or may go on: both must end well.
            closing.join(0.1)
            super().start()

    with monkeypatch.context() as patch:
        patch.setattr(local_worker.threading, "Thread", ClosedWhileItStarts)
        channel = worker.attach(slots(), 1)
    closing.join(LIMIT_S)
    assert not closing.is_alive()
    assert not any(thread.name == "expert-near" for thread in threading.enumerate())
    del channel
    with pytest.raises(WorkerLost, match="near gets no new data path: the runtime was closed"):
        worker.attach(slots(), 2)
