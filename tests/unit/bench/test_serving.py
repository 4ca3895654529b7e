"""The serving campaigns: which rows meet a mark, how steps and readers are matched, and how callers
judge what they hear.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.peers.model import TINY
from bench.peers.targets import shown_line
from bench.serving.callers import Callers
from bench.serving.company import ENDLESS, ONCE, company
from bench.serving.model import served_model_path
from bench.serving.targets import AT_LEAST, against_peers, interference
from bench.serving.watched import delays_s
from dflash_moe.bench.streaming.load import Load
from dflash_moe.bench.streaming.stream import Streamed


def row(name: str, tokens_per_s: float, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "tokens_per_s": tokens_per_s, "ttft_s": {"p50": 1 / tokens_per_s}, "itl_s": {"p99": 1 / tokens_per_s},
        "server_cpu_us_per_token": {"front": 50.0}, "failed": 0, "refused": 0, **more,
    }  # fmt: skip


def lines_of(*rows: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {line["what"]: line for line in against_peers(rows)}


@pytest.mark.parametrize(("ours", "met"), [(150.0, True), (130.0, False)])
def test_the_better_peer_counts(ours: float, met: bool) -> None:
    found = lines_of(row("streams16-16bit-ours", ours), row("streams16-16bit-llama", 100.0), row("streams16-16bit-vllm", 50.0))[
        "tokens/s: streams16-16bit-ours"
    ]
    assert (found["against"], found["ratio"], found["met"]) == ("streams16-16bit-llama", ours / 100, met)
    assert shown_line(found).startswith("tokens/s: streams16-16bit-ours")


def test_a_first_token_is_compared_with_the_quicker_peer() -> None:
    found = lines_of(row("streams1-16bit-ours", 80.0), row("streams1-16bit-llama", 100.0), row("streams1-16bit-vllm", 50.0))[
        "first token, p50: streams1-16bit-ours"
    ]
    assert (found["against"], found["met"]) == ("streams1-16bit-llama", False)


def test_a_share_is_of_the_engine_with_as_many_requests() -> None:
    inside = {"name": "scheduler-q8_0", "total_tokens_per_s": {"1": 100.0, "4": 200.0, "16": 400.0}}
    found = lines_of(inside, row("streams4-q8_0-ours", 188.0), row("streams16-q8_0-ours", 364.0))
    shares = {what: line for what, line in found.items() if what.startswith("share")}
    assert [(line["value"], line["met"]) for line in shares.values()] == [(0.94, False), (0.91, True)]


def test_without_peers_only_what_is_ours_is_judged() -> None:
    found = lines_of(row("streams1-q8_0-ours", 10.0, server_cpu_us_per_token={"front": 61.0}))
    assert {what.partition(":")[0]: line["met"] for what, line in found.items()} == {
        "the front's CPU a token, us": False, "requests that failed": True,
    }  # fmt: skip


def test_every_request_that_failed_is_counted() -> None:
    assert lines_of(row("streams1-q8_0-ours", 10.0, failed=1, refused=2))["requests that failed"]["value"] == 3


def test_gaps_beside_large_requests_are_judged_by_those_alone() -> None:
    (found, _) = interference([row("alone", 10.0), row("bodies", 8.0)])
    assert (found["value"], found["met"]) == (1.25, False)


def test_every_mark_has_streams_that_are_measured() -> None:
    from bench.campaigns.serving_against_peers import FORMATS, STREAMS

    assert set(AT_LEAST) == {(fmt, count) for fmt in FORMATS for count in STREAMS}


def streamed(submitted: float, times: Sequence[float], counts: Sequence[int]) -> Streamed:
    return Streamed(
        submitted, submitted, times=list(times), counts=list(counts), completion_tokens=sum(one or 1 for one in counts)
    )


def test_an_event_is_as_late_as_the_step_of_its_last_token() -> None:
    # Request 7 began first; of request 8 two tokens came in one event. Number 3 was before.
    steps = [(3, 0.5), (7, 1.0), (8, 2.0), (7, 2.0), (8, 3.0), (8, 4.0)]
    load = Load([streamed(0.9, [2.5, 4.25], [1, 2]), streamed(0.8, [1.125, 2.0625], [1, 1])])
    assert delays_s(load, steps) == [0.125, 0.0625, 0.5, 0.25]


def test_tokens_that_nobody_computed_are_no_measurement() -> None:
    with pytest.raises(SystemExit, match="1 requests of the engine are not the 1"):
        delays_s(Load([streamed(0.9, [2.5], [1])]), [(7, 1.0), (7, 2.0)])


@pytest.mark.parametrize("fmt", ["bf16", "q8_0"])
def test_every_token_has_a_text(fmt: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    path = served_model_path(tmp_path, TINY, fmt)
    from dflash_moe.integrations.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    assert tokenizer.decode([ord("a"), 300, TINY.vocab_size - 1]) == f"a[unused300][unused{TINY.vocab_size - 1}]"
    assert served_model_path(tmp_path, TINY, fmt) == path


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers a completion with events, as the prompt asks for."""

    def do_POST(self) -> None:  # noqa: N802 - http.server's name
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))["prompt"]
        self.send_response(429 if asked == "refused" else 200)
        self.end_headers()
        text = json.dumps({"choices": [{"text": "other" if asked == "wrong" else "right"[: 3 if asked == "cut" else None]}]})
        self.wfile.write(f"data: {text}\n\n".encode() + (b"" if asked == "cut" else b"data: [DONE]\n\n"))

    def log_message(self, *_given: object) -> None:
        """Says nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_callers_tell_whole_answers_from_cut_wrong_and_refused_ones(port: int) -> None:
    server: Any = SimpleNamespace(endpoint=SimpleNamespace(port=port))
    callers = Callers(server, dict.fromkeys(("whole", "cut", "wrong", "refused"), "right"), 8, 1)
    for prompt in callers.texts:
        callers._judge(prompt, *(found := callers._ask(prompt))[:2], is_whole=found[2])
    assert (callers.whole, callers.cut, callers.wrong, callers.refused) == (1, 1, 1, 1)
    assert len(callers.surprises) == 2


@pytest.mark.parametrize(("times", "most"), [(ONCE, 2), (ENDLESS, float("inf"))])
def test_company_has_an_answer_and_ends_with_the_block(times: str, most: float, port: int, tmp_path: Path) -> None:
    body = b'{"prompt": "refused"}'
    request = tmp_path / "request"
    request.write_bytes(b"POST / HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    statuses: list[str] = []
    with company(port, times, [request] * 2, statuses):
        pass
    assert set(statuses) == {"429"}
    assert 1 <= len(statuses) <= most


def test_company_that_nobody_answers_is_an_error(tmp_path: Path) -> None:
    request = tmp_path / "request"
    request.write_bytes(b"GET / HTTP/1.0\r\n\r\n")
    with pytest.raises(SystemExit, match="has failed"), company(1, ENDLESS, [request], []):
        pass
