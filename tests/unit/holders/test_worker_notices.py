"""What people are told of workers that come and go: once each, with the way, and as a warning only
where nobody wanted it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import logging
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_moe.cli import options
from dflash_moe.errors import WorkerTimeout
from dflash_moe.holders.client_calls import tell_people
from dflash_moe.holders.holder import TOLD_TO_STOP, Holder
from dflash_moe.holders.membership import Event, Happening, Life, RestartPolicy
from dflash_moe.holders.path_keeper import try_to_renew
from dflash_moe.topology.addresses import Address, parse_address

FAR = parse_address("tcp://10.0.0.2:7171")
OWN = parse_address(None)


class Told:
    """A worker's life, of which every change is told."""

    def __init__(self, address: Address = FAR, *, transport: str = "tcp", deaths: int = 5) -> None:
        session: Any = SimpleNamespace(is_encrypted=True)
        self.life = Life("far", RestartPolicy(deaths=deaths), random.Random(1), address.is_started_by_host)
        self.member: Any = Holder("far", address, transport, "f32-canonical", "packed", self.life, session=session)
        self.now = 0.0

    def happens(self, *happenings: Happening, reason: str = "") -> None:
        for what in happenings:
            before = self.life.state
            self.now += 10.0  # longer than any pause
            self.life.on(Event(what, self.life.attempt, reason), self.now)
            if self.life.state is not before:
                tell_people(self.member)

    def starts(self) -> None:
        self.happens(Happening.ADDED, Happening.STARTED, Happening.JOINED)

    def fails_to_return(self) -> None:
        self.happens(Happening.ENDED, Happening.DUE, Happening.FAILED, reason="cannot be reached")

    def returns(self) -> None:
        self.happens(Happening.ENDED, Happening.DUE, Happening.STARTED, Happening.JOINED)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, logger="dflash_moe.notices")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


def test_a_loss_and_a_return_are_said_once_and_attempts_are_not(said: Any) -> None:
    told = Told()
    told.starts()
    told.happens(Happening.LOST, reason="hung up")
    for _ in range(3):
        told.fails_to_return()
    told.returns()
    assert said() == [
        ("INFO", "worker far at tcp://10.0.0.2:7171 is connected (TCP, encrypted)"),
        ("WARNING", "worker far (TCP, encrypted) is lost: hung up; it is dialled until it is back"),
        ("WARNING", "worker far is back (TCP, encrypted)"),
    ]


def test_a_worker_that_was_told_to_stop_is_no_warning_and_neither_is_its_return(said: Any) -> None:
    told = Told()
    told.starts()
    told.happens(Happening.LOST, reason=TOLD_TO_STOP)
    told.fails_to_return()
    told.returns()
    assert said()[1:] == [
        ("INFO", "worker far (TCP, encrypted) has left: it was told to stop; it is dialled until it is back"),
        ("INFO", "worker far is back (TCP, encrypted)"),
    ]


def test_workers_of_the_host_are_said_only_where_something_happens_to_them(said: Any) -> None:
    told = Told(OWN, transport="shared", deaths=1)
    told.starts()
    assert said() == []
    told.happens(Happening.LOST, reason="hung up")
    told.happens(Happening.ENDED)
    told.happens(Happening.RELEASED, Happening.STARTED, Happening.JOINED)
    assert said() == [
        ("WARNING", "worker far (shared memory) is lost: 1 deaths within 60 s, at last: hung up"),
        ("ERROR", "worker far is left alone: 1 deaths within 60 s, at last: hung up"),
        ("WARNING", "worker far is back (shared memory)"),
    ]


def test_one_that_is_removed_is_let_go_and_gone_without_a_warning(said: Any) -> None:
    told = Told(OWN, transport="unix")
    told.starts()
    told.happens(Happening.REMOVED, Happening.DRAINED, Happening.ENDED)
    assert said() == [
        ("INFO", "worker far (a Unix socket) is let go, and finishes what it has"),
        ("INFO", "worker far is gone"),
    ]


def test_the_way_says_whether_tcp_is_encrypted() -> None:
    member = Told().member
    assert member.way == "TCP, encrypted"
    member.session.is_encrypted = False
    assert member.way == "TCP, not encrypted"
    member.transport, member.session = "loopback", None
    assert member.way == "the host's own process"


def test_attempts_to_renew_a_path_are_no_warnings(said: Any, caplog: pytest.LogCaptureFixture) -> None:
    def renew() -> None:
        raise WorkerTimeout("worker far did not attach a tcp data path")

    with caplog.at_level(logging.DEBUG):
        assert try_to_renew("far", renew, threading.Event())
    assert caplog.records
    assert all(record.levelno <= logging.INFO for record in caplog.records)


def test_commands_show_notices_on_what_is_stderr_when_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    shown_log = logging.getLogger("dflash_moe.notices")
    former = shown_log.handlers, shown_log.level, shown_log.propagate
    try:
        options.show_log("notices")
        with capsys.disabled():
            pass  # another stream is stderr afterwards
        Told().starts()
        assert capsys.readouterr().err == "worker far at tcp://10.0.0.2:7171 is connected (TCP, encrypted)\n"
    finally:
        shown_log.handlers, shown_log.level, shown_log.propagate = former
