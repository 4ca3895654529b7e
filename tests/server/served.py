"""A real front before a scripted engine, for tests.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from dflash_moe.errors import DflashError
from dflash_moe.server.front.large_bodies import LARGE_BYTES
from dflash_moe.server.front_keeper import FrontKeeper
from dflash_moe.server.listening import Bound, bind
from dflash_moe.server.model_facts import template_facts, tokenizer_facts
from dflash_moe.server.server_settings import ServerSettings
from tests.server.scripted_engine import MAX_MODEL_LEN, MAX_QUEUE, MODEL, VOCAB_SIZE, ScriptedEngine

WAIT_S = 60.0
# Makes a body large, so that the process that reads those is there and lives as long as the front.
LARGE = {"user": " " * LARGE_BYTES}
# Characters of several bytes, and of several code points.
UNICODE = [
    "naïve 漢字 🎉 done", "Ünïcödé — „Gänsefüßchen“", "👩‍👩‍👧‍👦 family", "中文和日本語のテキスト", "e\u0301 \u200d\u2060 ﷽",
]  # fmt: skip


@cache
def tokenizer() -> Any:
    """The demo model's tokenizer, as transformers has it."""
    pytest.importorskip("transformers")
    pytest.importorskip("uvicorn")
    from dflash_moe.integrations.tokenizer import load_tokenizer

    return load_tokenizer(MODEL)


def facts(**changed: Any) -> dict[str, Any]:
    """What a front is told of the demo model."""
    return {
        "tokenizer": tokenizer_facts(tokenizer()), **template_facts(MODEL, tokenizer()), "sampling": {"temperature": 0.0},
        "max_model_len": MAX_MODEL_LEN, "max_text_bytes": 1 << 20, "vocab_size": VOCAB_SIZE, "max_queue": MAX_QUEUE,
        "end_ids": [0], "fingerprint": "fp_0123456789abcdef", **changed,
    }  # fmt: skip


def ids_of(text: str) -> list[int]:
    """The demo model's tokens of a text."""
    return list(tokenizer()(text, add_special_tokens=False)["input_ids"])


def repeated(text: str, count: int) -> str:
    """What the scripted engine answers: the ids of a prompt again and again."""
    return str(tokenizer().decode((ids_of(text) * count)[:count], skip_special_tokens=True))


class Served:
    """A front that is up, and what stands behind it."""

    def __init__(self, engine: ScriptedEngine, keeper: FrontKeeper, bound: Bound, failures: list[DflashError]) -> None:
        self.engine = engine
        self.keeper = keeper
        self.bound = bound
        self.failures = failures

    @property
    def url(self) -> str:
        return self.bound.url(has_tls=False)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.bound.port, timeout=WAIT_S)

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any, Mapping[str, str]]:
        """Status, parsed body and headers of one request; a body that is no bytes goes as JSON."""
        connection = self.connect()
        try:
            raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, raw, dict(headers or {}))
            answer = connection.getresponse()
            text = answer.read()
            found = json.loads(text) if text and "json" in answer.headers.get("content-type", "") else text.decode()
            return answer.status, found, {name.lower(): value for name, value in answer.getheaders()}
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        return self.ask("POST", path, body, headers)[:2]

    def events(self, path: str, body: Any) -> list[Any]:
        """The events of a stream."""
        status, text, _ = self.ask("POST", path, {**body, "stream": True})
        assert status == 200, text
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    def wait_ready(self) -> None:
        wait_for(lambda: self.ask("GET", "/ready")[0] == 200)


def prompt_of(front: Served) -> str:
    """The prompt that the engine was sent last, as text."""
    return str(tokenizer().decode(front.engine.submitted[-1][0]))


def wait_for(is_so: Any, seconds: float = WAIT_S) -> None:
    """Waits until something is so. Fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if is_so():
                return
        except OSError:
            pass
        assert time.monotonic() < deadline, f"it was not so within {seconds} s"
        time.sleep(0.02)


@contextmanager
def served(
    engine: ScriptedEngine | None = None, *, is_loaded: bool = True, told: Mapping[str, Any] | None = None, **settings: Any
) -> Iterator[Served]:
    """A front; with `is_loaded` it has the model."""
    engine = engine or ScriptedEngine()
    bound = bind("127.0.0.1", 0)
    up, failures = threading.Event(), list[DflashError]()
    keeper = FrontKeeper(
        bound.sock, ServerSettings(**{"names": ["demo"], **settings}).for_front(), on_up=up.set, on_failed=failures.append
    )
    try:
        if is_loaded:
            keeper.serve(engine, facts(**(told or {})))
            assert up.wait(WAIT_S)
        yield Served(engine, keeper, bound, failures)
    finally:
        keeper.close()
        engine.close()
        bound.sock.close()
