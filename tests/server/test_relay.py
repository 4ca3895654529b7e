"""The engine process's end of the link: whatever a front, a request or the engine meets, a front is
given up, and the server goes on or ends as it was asked to.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import queue
import select
import signal
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_moe.engine.request import TokenDelta
from dflash_moe.engine.sampling.sampling_params import SamplingParams
from dflash_moe.errors import EngineError
from dflash_moe.server import relay
from dflash_moe.server.front import frames
from dflash_moe.server.relay import Relay
from dflash_moe.server.serving import Server

PATIENCE_S = 10.0


class Engine:
    """Takes requests, and fails as it is told."""

    def __init__(self, failure: BaseException | None = None) -> None:
        self.failure = failure
        self.deliver: Any = None

    def sink(self, deliver: Any) -> Any:
        self.deliver = deliver
        return deliver

    def submit(self, *_arguments: Any) -> int:
        if self.failure is not None:
            raise self.failure
        return 1

    def cancel(self, *_arguments: Any) -> None: ...

    def is_alive(self) -> bool:
        return True

    def unready_reason(self) -> str:
        return ""


@pytest.fixture
def link() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The engine process's end, which its relay closes, and the front's."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(PATIENCE_S)
    with theirs:
        yield ours, theirs


def served(ours: socket.socket, engine: Engine) -> tuple[threading.Thread, list[str]]:
    """Serves an engine, and returns the thread that receives and why it has ended."""
    found = Relay(ours, lambda: None)
    found.serve(engine)
    reasons: list[str] = []
    thread = threading.Thread(target=lambda: reasons.append(found.receive()))
    thread.start()
    return thread, reasons


def read_to_the_end(front: socket.socket) -> None:
    while front.recv(1 << 16):
        pass


def test_a_front_that_takes_no_tokens_is_given_up_with_its_sink(link, monkeypatch):
    ours, front = link
    monkeypatch.setattr(relay, "MAX_WAITING", 3)
    engine = Engine()
    thread, reasons = served(ours, engine)
    with pytest.raises(EngineError, match="the front has not taken 4 tokens"):
        engine.deliver([(1, TokenDelta(0, (7,)))] * 4)
    read_to_the_end(front)
    thread.join(PATIENCE_S)
    assert reasons == ["it hung up"]


def test_a_front_that_sends_nonsense_and_reads_nothing_is_given_up_at_once(link):
    ours, front = link
    engine = Engine()
    thread, reasons = served(ours, engine)
    front.sendall(frames.packed(frames.SUBMIT, 1, frames.token_bytes([1]), frames.params_fields(SamplingParams()), b""))
    front.sendall(frames.packed(frames.ASK, 5))
    assert front.recv(1 << 16)  # the answer, behind which the request is known
    # More than the buffers of a pair of sockets hold, so that the sending thread waits.
    engine.deliver([(1, TokenDelta(0, (7,) * 1_000_000))])
    assert select.select([front], [], [], PATIENCE_S)[0]
    front.sendall(frames.packed("nonsense"))
    thread.join(PATIENCE_S)
    assert [reason.partition(":")[0] for reason in reasons] == ["it sent what is no request"]


@pytest.mark.parametrize("failure", [MemoryError(), KeyError("shape")])
def test_what_a_request_meets_costs_its_front_and_nothing_else(link, failure):
    ours, front = link
    thread, reasons = served(ours, Engine(failure))
    front.sendall(frames.packed(frames.SUBMIT, 1, frames.token_bytes([1]), frames.params_fields(SamplingParams()), b""))
    read_to_the_end(front)
    thread.join(PATIENCE_S)
    assert reasons == [f"its request has failed: {type(failure).__name__}"]


def test_a_front_whose_frames_cannot_be_made_is_given_up(link):
    ours, front = link
    engine = Engine()
    thread, _ = served(ours, engine)
    front.sendall(frames.packed(frames.SUBMIT, 1, frames.token_bytes([1]), frames.params_fields(SamplingParams()), b""))
    front.sendall(frames.packed(frames.ASK, 5))
    assert front.recv(1 << 16)  # the answer, behind which the request is known
    engine.deliver([(1, TokenDelta(0, (object(),)))])
    read_to_the_end(front)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_server_whose_engine_is_dead_ends_once_it_is_asked_to():
    def drain(_deadline_s: float) -> bool:
        raise EngineError("the engine has ended")

    server = object.__new__(Server)
    server._settings = SimpleNamespace(drain_s=1.0)
    server._events = queue.SimpleQueue()
    server._keeper = SimpleNamespace(drain=lambda: None, close=lambda within_s: None)
    codes: list[int] = []
    thread = threading.Thread(
        target=lambda: codes.append(server._drained(SimpleNamespace(drain=drain), signal.SIGTERM)), daemon=True
    )
    thread.start()
    thread.join(PATIENCE_S)
    assert codes == [0]
