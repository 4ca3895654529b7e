"""A reader that takes nothing for a minute is cut off, and one that takes a byte now and then is
not; time is the test's own.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httptools")

import uvicorn


class Timer:
    def __init__(self, timers: list[Timer], when: float, call: Callable[[], None]) -> None:
        self.when, self.call, self._timers = when, call, timers
        timers.append(self)

    def cancel(self) -> None:
        if self in self._timers:
            self._timers.remove(self)


class Clock:
    """A loop of which only timers are used."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []

    def call_later(self, delay: float, call: Callable[[], None]) -> Timer:
        return Timer(self.timers, self.now + delay, call)

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while due := [one for one in self.timers if one.when <= until]:
            first = min(due, key=lambda one: one.when)
            self.timers.remove(first)
            self.now = first.when
            first.call()
        self.now = until


class Transport:
    """A connection whose reader takes what the test says."""

    def __init__(self) -> None:
        self.waiting = 0
        self.is_aborted = False

    def set_write_buffer_limits(self, high: int) -> None:
        self.high = high

    def get_extra_info(self, _name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True


@pytest.fixture
def connection() -> tuple[Clock, Transport, object]:
    from dflash_moe.server.front.http_protocol import BoundedProtocol

    async def make() -> object:
        config = uvicorn.Config(lambda *_: None, lifespan="off", log_config=None)
        return BoundedProtocol(config, uvicorn.server.ServerState(), {}, asyncio.get_running_loop())

    protocol = asyncio.run(make())
    protocol.loop, transport = Clock(), Transport()
    protocol.connection_made(transport)
    protocol._stop_head_timer()
    return protocol.loop, transport, protocol


def test_a_reader_that_takes_nothing_for_a_minute_is_cut_off(connection):
    clock, transport, protocol = connection
    transport.waiting = 50_000
    protocol.pause_writing()
    clock.advance(59)
    assert not transport.is_aborted
    clock.advance(7)
    assert transport.is_aborted
    assert clock.timers == []


def test_a_reader_that_takes_a_byte_a_minute_is_kept(connection):
    clock, transport, protocol = connection
    transport.waiting = 50_000
    protocol.pause_writing()
    for _ in range(20):
        clock.advance(50)
        transport.waiting -= 1
    assert not transport.is_aborted
    protocol.resume_writing()
    assert clock.timers == []
    clock.advance(1000)
    assert not transport.is_aborted
