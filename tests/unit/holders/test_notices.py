"""What a worker says unasked is heard, also where one read takes several messages off the wire.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from dflash_moe.errors import WorkerLost
from dflash_moe.holders import conversation
from dflash_moe.holders.conversation import Conversation
from dflash_moe.protocol.framing import Connection
from dflash_moe.protocol.messages import Stats, StatsRequest, WeightsChanged

WAIT_S = 30.0
KEYS = [("w0", b"k" * 32)]


class Listening:
    """Both ends of a conversation, and the shards that its notices named."""

    def __init__(self, *, is_encrypted: bool) -> None:
        # What one end of these has sent, the other one can read at once.
        ours, theirs = map(Connection, socket.socketpair())
        if is_encrypted:
            until = time.monotonic() + WAIT_S
            accepting = threading.Thread(
                target=lambda: theirs.encrypt(KEYS, is_dialling=False, deadline=until, waiting_for="the host")
            )
            accepting.start()
            ours.encrypt(KEYS, is_dialling=True, deadline=until, waiting_for="the worker")
            accepting.join(WAIT_S)
        self.worker = theirs
        self.host = Conversation(
            "w0", ours, loss=lambda text: WorkerLost(text, worker="w0"), quote_log=lambda: "", on_notice=self.hear
        )
        self.heard: list[int] = []
        # It sends another notice for each that is heard.
        self.is_endless = False

    def hear(self, notice: WeightsChanged) -> None:
        self.heard.append(notice.shard)
        if self.is_endless:
            self.notify(0)

    def notify(self, *shards: int) -> None:
        for shard in shards:
            notice = WeightsChanged(layer=0, shard=shard, local_expert_id=0, failure="")
            self.worker.send(notice, deadline=time.monotonic() + WAIT_S)

    def poll(self) -> int:
        """Listens as the keeper of workers does, and returns how often there was something."""
        poller = select.poll()
        poller.register(self.host.connection.fileno(), select.POLLIN)
        num_awoken = 0
        while poller.poll(0):
            self.host.take_notices()
            num_awoken += 1
        return num_awoken

    def ask(self) -> dict[str, int]:
        with self.host.turn("send its counters", timeout_s=WAIT_S, limit="a fixed limit") as turn:
            return dict(turn.ask(StatsRequest(), Stats).counters)

    def close(self) -> None:
        self.host.close()
        self.worker.close()


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def listening(request: pytest.FixtureRequest) -> Iterator[Listening]:
    ends = Listening(is_encrypted=request.param)
    yield ends
    ends.close()


def test_all_notices_that_came_together_are_heard(listening: Listening) -> None:
    listening.notify(0, 1, 2)
    assert listening.poll() == 1
    assert listening.heard == [0, 1, 2]
    listening.notify(3)
    listening.poll()
    assert listening.heard == [0, 1, 2, 3]


def test_notices_that_came_along_with_an_answer_are_heard(listening: Listening) -> None:
    listening.notify(0)
    listening.worker.send(Stats(counters={"calls": 1}), deadline=time.monotonic() + WAIT_S)
    listening.notify(1, 2)
    assert listening.ask() == {"calls": 1}
    listening.poll()
    assert listening.heard == [0, 1, 2]


def test_answers_that_nobody_asked_for_do_not_pass_for_ones_that_are_owed(listening: Listening) -> None:
    listening.worker.send(Stats(counters={"calls": 1}), deadline=time.monotonic() + WAIT_S)
    listening.poll()
    listening.worker.send(Stats(counters={"calls": 2}), deadline=time.monotonic() + WAIT_S)
    assert listening.ask() == {"calls": 2}


def test_a_worker_that_talks_without_end_holds_nobody_up(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "MAX_NOTICES", 2)
    listening.is_endless = True
    listening.notify(0)
    listening.host.take_notices()
    assert len(listening.heard) == 2


def test_a_worker_that_hangs_up_after_its_last_notice_was_heard(listening: Listening) -> None:
    listening.notify(0, 1)
    listening.worker.close()
    listening.host.take_notices()
    listening.host.take_notices()
    assert listening.heard == [0, 1]
