"""Each request leaves a line that its caller's records can be joined with, and in which nobody
reads what was asked.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from dflash_moe.server.front import exchange, request_log
from dflash_moe.server.front.request_log import LogForm, RequestLog
from tests.server.scripted_engine import QUEUE_S, ScriptedEngine
from tests.server.served import Served, served, wait_for

COMPLETIONS = "/v1/completions"
KEY = "a-key-of-somebody-who-may"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
SECRET = "a secret that nobody logs"


@contextmanager
def stderr_in(folder: Path) -> Iterator[Path]:
    """A file with all that is written to stderr meanwhile, for a test that reads while a front
    writes. `capfd` would cut off its own file after reading, and with it what came between the two.
    """
    path, kept = folder / "stderr", os.dup(2)
    with open(path, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 2)
    try:
        yield path
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def lines(stderr: Path, count: int) -> list[str]:
    """The whole lines of requests so far, once there are so many."""

    def read() -> list[str]:
        whole, _, _ = stderr.read_text().rpartition("\n")
        return [line for line in whole.splitlines() if "request" in line]

    wait_for(lambda: len(read()) >= count)
    return read()


def test_a_line_says_what_a_request_took_and_never_what_was_asked(tmp_path):
    with stderr_in(tmp_path) as stderr, served(keys=[KEY], request_log=LogForm.JSON) as front:
        headers = {"authorization": f"Bearer {KEY}", "x-request-id": "mine/7", "traceparent": PARENT}
        body = {"prompt": SECRET, "max_tokens": 5}
        status, answer, found = front.ask("POST", COMPLETIONS, body, headers)
        assert (status, found["x-request-id"]) == (200, "mine/7")
        # Who only looks at the server leaves none.
        front.ask("GET", "/metrics", headers=headers)
        front.ask("GET", "/ready")
        front.ask("POST", f"/v1/{SECRET.replace(' ', '-')}?key={KEY}", body, headers)
        written = lines(stderr, 2)
    first, second = map(json.loads, written)
    assert first.pop("seconds") >= first.pop("first_token_seconds") > 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first.pop("time"))
    assert first == {
        "method": "POST", "route": COMPLETIONS, "status": 200, "end": "whole", "queue_seconds": QUEUE_S, "cached_tokens": 0,
        "prompt_tokens": answer["usage"]["prompt_tokens"], "completion_tokens": 5, "request_id": "mine/7", "trace_id": TRACE,
    }  # fmt: skip
    assert (second["route"], second["status"]) == ("other", 404)
    assert not re.search(f"secret|{KEY}", "".join(written))


def test_a_caller_that_hangs_up_is_in_a_line_of_text(tmp_path):
    with stderr_in(tmp_path) as stderr, served(ScriptedEngine(step_s=0.02)) as front:
        connection = front.connect()
        connection.request("POST", COMPLETIONS, json.dumps({"prompt": "def", "max_tokens": 400, "stream": True}))
        answer = connection.getresponse()
        answer.read(10)
        request_id = answer.headers["x-request-id"]
        answer.close()
        connection.close()
        (line,) = lines(stderr, 1)
    assert re.search(
        rf"INFO request: POST {COMPLETIONS} 200 end=cut seconds=\S+ prompt_tokens=\d+ .* request_id={request_id}$", line
    )


def test_without_a_log_there_is_no_line(tmp_path):
    with stderr_in(tmp_path) as stderr, served(request_log=LogForm.OFF) as front:
        assert front.post(COMPLETIONS, {"prompt": "def", "max_tokens": 1})[0] == 200
    assert "request" not in stderr.read_text()


def test_strangers_fill_no_disk(tmp_path):
    with stderr_in(tmp_path) as stderr, served(keys=[KEY]) as front:
        for _ in range(20):
            assert front.ask("POST", COMPLETIONS, {})[0] == 401
    (line,) = [line for line in stderr.read_text().splitlines() if "stranger" in line]
    assert f"401: POST {COMPLETIONS} request_id=" in line


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ("a" * 128, True),
        ("a" * 129, False),
        ("", False),
        ("two words", False),
        ('"}', False),
        ("ü", False),
        ("a/b:c=1@d", True),
    ],
)
def test_only_a_plain_name_of_a_request_is_kept(front: Served, given: str, is_kept: bool):
    connection = front.connect()
    connection.putrequest("GET", "/v1/models")
    connection.putheader("x-request-id", given.encode())
    connection.endheaders()
    found = connection.getresponse().headers["x-request-id"]
    connection.close()
    assert (found == given) == is_kept
    assert is_kept or re.fullmatch("[0-9a-f]{32}", found)


@pytest.mark.parametrize(
    ("given", "is_trace"),
    [
        (PARENT, True), (PARENT + "-more", False), ("cc" + PARENT[2:], True), ("cc" + PARENT[2:] + "-more", True),
        ("ff" + PARENT[2:], False), (PARENT.upper(), False), (PARENT[:-1], False), (PARENT.replace(TRACE, "0" * 32), False),
        (PARENT.replace("b7ad6b7169203331", "0" * 16), False), ("", False), (PARENT + "\n", False),
    ],
)  # fmt: skip
def test_a_trace_is_one_of_w3cs(given: str, is_trace: bool):
    scope: dict[str, Any] = {"method": "GET", "headers": [(b"traceparent", given.encode())]}
    found = exchange.Exchange(exchange.Traffic(), scope, lambda: None, lambda _message: None)
    assert found.trace_id == (TRACE if is_trace else "")


def test_nobody_waits_for_whoever_reads_no_stderr(monkeypatch):
    taken, written = threading.Event(), []

    def write(_descriptor: int, line: bytes) -> int:
        taken.wait()
        written.append(line)
        return len(line)

    monkeypatch.setattr(os, "write", write)
    log = RequestLog(LogForm.JSON)
    for place in range(request_log.MAX_WAITING + 10):
        log.write({"place": place})
    assert 9 <= log.num_dropped <= 10
    taken.set()
    log.close()
    assert len(written) == request_log.MAX_WAITING + 10 - log.num_dropped
