"""Too many requests, too slow readers, a server that loads, drains or lacks a worker: each gets its
answer, and nobody else waits for it.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time

from dflash_moe.errors import QueueFull, WorkerLost
from tests.server.scripted_engine import ScriptedEngine
from tests.server.served import Served, facts, served, wait_for

TEXT = "/v1/completions"
SHORT = {"prompt": "def", "max_tokens": 2}


def error_of(front: Served, path: str, body: object) -> tuple[int, dict, str | None]:
    status, answer, headers = front.ask("POST", path, body)
    return status, answer["error"], headers.get("retry-after")


def test_while_the_model_is_loaded_everything_says_so():
    with served(is_loaded=False) as front:
        wait_for(lambda: front.ask("GET", "/ready")[0] == 503)
        for method, path in (("GET", "/health"), ("GET", "/ready"), ("GET", "/v1/models"), ("POST", TEXT)):
            status, answer, headers = front.ask(method, path, b"{}" if method == "POST" else None)
            assert (status, answer["error"]["code"]) == (503, "loading")
            assert int(headers["retry-after"]) >= 1
        front.keeper.serve(front.engine, facts())
        front.wait_ready()
        assert front.post(TEXT, SHORT)[0] == 200


def test_a_full_queue_is_429_with_the_time_of_the_engine(front):
    front.engine.refusal = QueueFull("9 requests wait and at most 9 may", retry_after_s=7.4)
    try:
        status, error, retry = error_of(front, TEXT, SHORT)
        assert (status, error["type"], error["code"], error["retry_after_s"], retry) == (
            429,
            "rate_limit_error",
            "queue_full",
            7.4,
            "8",
        )
        status, error, _ = error_of(front, TEXT, {**SHORT, "prompt": ["a", "b"], "stream": True})
        assert (status, error["code"]) == (429, "queue_full")
    finally:
        front.engine.refusal = None
    assert front.post(TEXT, SHORT)[0] == 200


def test_a_part_of_the_model_that_is_away_is_503_and_strangers_hear_no_names():
    key = "a-key-of-somebody-who-may"
    with served(keys=[key]) as front:
        front.engine.unready = "worker w7 is lost"
        known = {"x-api-key": key}
        status, answer, _ = front.ask("POST", TEXT, SHORT, known)
        assert (status, answer["error"]["code"], answer["error"]["message"]) == (503, "unready", "worker w7 is lost")
        assert front.ask("POST", TEXT, SHORT)[0] == 401
        # The answer to who asked before may still hold.
        wait_for(lambda: "w7" in str(front.ask("GET", "/ready", headers=known)[1]))
        status, answer, _ = front.ask("GET", "/ready")
        assert (status, answer["error"]["code"], "w7" in str(answer)) == (503, "unready", False)
        assert front.ask("GET", "/health")[0] == 200
        front.engine.unready = ""
        front.wait_ready()


def test_health_fails_with_the_engine_thread(front):
    assert front.ask("GET", "/health")[:2] == (200, {"status": "ok"})
    front.engine.is_up = False
    try:
        wait_for(lambda: front.ask("GET", "/health")[0] == 503)
        assert front.ask("GET", "/ready")[0] == 503
    finally:
        front.engine.is_up = True
    front.wait_ready()


def test_an_engine_process_that_answers_no_probe_does_not_live():
    never = threading.Event()

    class Stuck(ScriptedEngine):
        def is_alive(self):
            never.wait(60)
            return True

    with served(Stuck()) as front:
        try:
            status, answer, _ = front.ask("GET", "/health")
            assert (status, answer["error"]["code"]) == (503, "engine_gone")
            assert "not answered within" in answer["error"]["message"]
        finally:
            never.set()


def test_an_engine_that_fails_before_the_first_token_is_a_status_and_later_an_event(front):
    front.engine.failure = WorkerLost("worker w1 is lost")
    try:
        status, error, _ = error_of(front, TEXT, {"prompt": "def", "max_tokens": 9})
        assert (status, error["code"]) == (503, "worker_lost")
        events = front.events(TEXT, {"prompt": "def", "max_tokens": 9})
        assert [one["choices"][0]["text"] for one in events[:2]] == ["def", "def"]
        assert events[2]["error"]["code"] == "worker_lost"
        assert events[3:] == ["[DONE]"]
    finally:
        front.engine.failure = None


def open_stream(front: Served, body: object, *, receive_bytes: int | None = None) -> socket.socket:
    """A stream of which nothing is read yet."""
    sock = socket.socket()
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.connect(("127.0.0.1", front.bound.port))
    sock.settimeout(60)
    raw = json.dumps(body).encode()
    sock.sendall(b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (TEXT.encode(), len(raw), raw))
    return sock


def test_whoever_hangs_up_has_the_request_cancelled(front):
    for is_streamed in (True, False):
        before = len(front.engine.cancelled)
        front.engine.step_s = 0.02
        try:
            sock = open_stream(front, {"prompt": "def", "max_tokens": 400, "stream": is_streamed})
            wait_for(lambda: front.engine.open)
            if is_streamed:
                assert sock.recv(100)
            sock.close()
            wait_for(lambda: not front.engine.open, 5)
        finally:
            front.engine.step_s = 0.0005
        assert len(front.engine.cancelled) > before


def test_two_hundred_callers_vanish_and_nothing_of_them_stays(front):
    socks = [open_stream(front, {"prompt": "def", "max_tokens": 500, "stream": True}) for _ in range(200)]
    for sock in socks:
        sock.close()
    wait_for(lambda: not front.engine.open)
    assert front.post(TEXT, SHORT)[0] == 200
    wait_for(lambda: len(list(os.scandir(f"/proc/{front.keeper.pid}/fd"))) < 40)


def test_a_reader_that_takes_nothing_delays_nobody_and_is_cut_off_when_far_behind():
    # Each token has twenty alternatives, so that what is not read soon fills all buffers.
    long_answer = ScriptedEngine(lambda prompt, _choice: prompt * 100_000, step_s=0.0)
    with served(long_answer, told={"max_model_len": 100_000}) as front:
        sock = open_stream(front, {"prompt": [5], "max_tokens": 90_000, "stream": True, "logprobs": 20}, receive_bytes=4096)
        wait_for(lambda: front.engine.open)
        began = time.monotonic()
        assert front.post(TEXT, SHORT)[0] == 200
        assert time.monotonic() - began < 20
        wait_for(lambda: not front.engine.open)
        assert front.engine.cancelled
        sock.close()


def test_connections_beyond_the_bound_are_told_so():
    with served(max_connections=3) as front:
        kept = [socket.create_connection(("127.0.0.1", front.bound.port), timeout=30) for _ in range(3)]
        wait_for(lambda: front.ask("GET", "/health")[0] == 503)
        status, answer, _ = front.ask("GET", "/health")
        assert (status, answer["error"]["code"]) == (503, "too_many_connections")
        for sock in kept:
            sock.close()
        wait_for(lambda: front.ask("GET", "/health")[0] == 200)


def test_silence_is_broken_by_comments():
    gate = threading.Event()

    class Silent(ScriptedEngine):
        def submit(self, *given):
            gate.wait(60)
            return super().submit(*given)

    with served(Silent()) as front:
        sock = open_stream(front, {"prompt": "def", "max_tokens": 2, "stream": True})
        first = sock.recv(4096)
        assert first.startswith(b"HTTP/1.1 200")
        if b": waiting" not in first:
            assert b": waiting" in sock.recv(4096)
        gate.set()
        rest = b""
        while b"[DONE]" not in rest:
            rest += sock.recv(4096)
        sock.close()


def test_a_draining_server_finishes_what_is_open_and_refuses_the_rest():
    with served() as other:
        other.engine.step_s = 0.02
        sock = open_stream(other, {"prompt": "def", "max_tokens": 60, "stream": True})
        wait_for(lambda: other.engine.open)
        other.keeper.drain()
        wait_for(lambda: other.ask("GET", "/ready")[0] == 503)
        status, error, retry = error_of(other, TEXT, SHORT)
        assert (status, error["code"], int(retry) >= 1) == (503, "draining", True)
        assert other.ask("GET", "/health")[0] == 200
        assert other.engine.drain(30)
        text = b""
        while b"[DONE]" not in text:
            text += sock.recv(1 << 16)
        assert b"error" not in text
        sock.close()


def test_what_a_drain_cancels_ends_in_an_error_event():
    with served() as front:
        front.engine.step_s = 0.05
        sock = open_stream(front, {"prompt": "def", "max_tokens": 400, "stream": True})
        assert sock.recv(1 << 16)
        assert not front.engine.drain(0.01)
        text = b""
        while b"[DONE]" not in text:
            text += sock.recv(1 << 16)
        assert b'"code":"cancelled"' in text
        sock.close()


def test_a_slow_reader_gets_the_last_tokens_of_a_drain_and_the_connection_is_closed():
    # Some megabytes, of which the kernel holds a part and the front the rest.
    long_answer = ScriptedEngine(lambda prompt, _choice: prompt * 4000, step_s=0.0)
    with served(long_answer, told={"max_model_len": 100_000}) as front:
        sock = open_stream(front, {"prompt": [5], "max_tokens": 3000, "stream": True, "logprobs": 10}, receive_bytes=4096)
        wait_for(lambda: front.engine.submitted and not front.engine.open)
        front.keeper.drain()
        assert front.engine.drain(30)
        closing = threading.Thread(target=front.keeper.close, args=(60.0,))
        closing.start()
        text = b""
        while received := sock.recv(1 << 16):
            text += received
        sock.close()
        closing.join(60)
        assert text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert b"error" not in text
        assert not front.failures


def test_a_reader_that_takes_nothing_is_cut_off_at_the_end_of_a_drain():
    long_answer = ScriptedEngine(lambda prompt, _choice: prompt * 4000, step_s=0.0)
    with served(long_answer, told={"max_model_len": 100_000}) as front:
        sock = open_stream(front, {"prompt": [5], "max_tokens": 3000, "stream": True, "logprobs": 10}, receive_bytes=4096)
        wait_for(lambda: front.engine.submitted and not front.engine.open)
        front.keeper.drain()
        front.keeper.close(0.2)
        text = b""
        try:
            while received := sock.recv(1 << 16):
                text += received
        except ConnectionResetError:
            pass
        sock.close()
        assert b"[DONE]" not in text


def test_a_request_that_reaches_a_drained_engine_is_told_so():
    with served() as front:
        # The front has not heard of it yet.
        front.engine.drain(0)
        status, error, retry = error_of(front, TEXT, SHORT)
        assert (status, error["code"], int(retry) >= 1) == (503, "draining", True)
