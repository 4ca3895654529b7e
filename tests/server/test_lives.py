"""A front that is killed is replaced, and an engine process that is killed takes its front along;
in between nobody waits for what never comes.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.server.served import served, wait_for
from tests.server.test_overload import SHORT, TEXT, open_stream

ROOT = Path(__file__).parents[2]


def test_a_killed_front_is_replaced_and_its_requests_are_cancelled():
    with served() as front:
        front.engine.step_s = 0.02
        sock = open_stream(front, {"prompt": "def", "max_tokens": 400, "stream": True})
        assert sock.recv(100)
        killed = front.keeper.pid
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: not front.engine.open)
        # Callers wait in the backlog of the listening socket.
        assert front.ask("GET", "/ready")[0] in (200, 503)
        front.wait_ready()
        assert front.keeper.pid != killed
        front.engine.step_s = 0.0005
        assert front.post(TEXT, SHORT)[0] == 200
        assert not front.failures
        sock.close()


def test_five_ends_of_fronts_within_a_minute_end_the_server():
    with served() as front:
        seen: set[int | None] = set()
        while not front.failures:
            wait_for(lambda: front.failures or front.keeper.pid not in seen)
            pid = front.keeper.pid
            if front.failures or pid is None:
                break
            seen.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert len(seen) == 5
        assert "5 times within 60 s" in str(front.failures[0])


def test_a_front_that_sends_nonsense_is_replaced():
    with served() as front:
        first = front.keeper.pid
        relay = front.keeper._relay
        with pytest.raises(Exception, match="unknown"):
            relay._take("nonsense", [])
        relay.hang_up()
        wait_for(lambda: front.keeper.pid != first)
        front.wait_ready()


def test_a_killed_engine_process_ends_streams_in_an_event_and_its_front_within_two_seconds():
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.server.engine_program"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        port, pid = map(int, program.stdout.readline().split())

        class There:
            bound = type("Bound", (), {"port": port})

        sock = open_stream(There, {"prompt": "def", "max_tokens": 400, "stream": True})
        text = sock.recv(1 << 16)
        program.kill()
        killed = time.monotonic()
        while part := sock.recv(1 << 16):
            text += part
        assert b'"code":"engine_gone"' in text
        wait_for(
            lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3], 10
        )
        assert time.monotonic() - killed < 10
        sock.close()
    finally:
        program.kill()
        program.wait(10)
        program.stdout.close()
