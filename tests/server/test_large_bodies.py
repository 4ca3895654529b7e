"""Large bodies are read by a process of their own, which answers what the front itself would, and
nothing that it meets is more than an error to its caller.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from dflash_moe.integrations import limited_process
from dflash_moe.server.front.api_error import ApiError
from dflash_moe.server.front.body_process import NICENESS
from dflash_moe.server.front.large_bodies import LARGE_BYTES, LargeBodies
from dflash_moe.server.front.request_fields import parsed
from tests.server.scripted_engine import MAX_MODEL_LEN
from tests.server.served import served

MAX_BODY = 8 << 20
PADDED = " " * LARGE_BYTES


@pytest.fixture
def bodies():
    made = LargeBodies(MAX_BODY)
    yield made
    made._end()


def read(bodies: LargeBodies, raw: bytes, most: int = 1 << 20) -> object:
    return bodies.parsed(raw, most, 0)


@pytest.mark.parametrize(
    "value",
    [
        "\ud800", "\0é漢", 2**80, -0.0, 1e308, True, None, [], {}, [[{}]], list(range(70_000)),
        {str(at): [at] for at in range(9000)},
    ],
    ids=lambda value: repr(value)[:30],
)  # fmt: skip
def test_what_is_read_is_what_the_front_reads_of_it(bodies, value):
    raw = json.dumps({"a": value, "padding": PADDED}).encode()
    found = read(bodies, raw)
    assert (found, found.size, repr(found)) == (parsed(raw), len(raw), repr(parsed(raw)))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"a": \xff' + PADDED.encode(), "no UTF-8"),
        (b'{"a": 1,}' + PADDED.encode(), "no JSON"),
        (b"[1]" + PADDED.encode(), "expected a JSON object"),
        (b'{"a": ' + b"[" * LARGE_BYTES + b"]" * LARGE_BYTES + b"}", "nested too deeply"),
    ],
    ids=["utf-8", "json", "list", "deep"],
)
def test_what_is_no_body_is_refused_in_the_same_words(bodies, raw, words):
    with pytest.raises(ApiError, match=words) as there:
        read(bodies, raw)
    with pytest.raises(ApiError) as here:
        parsed(raw)
    assert (there.value.status, str(there.value)) == (here.value.status, str(here.value))


def test_more_values_than_a_model_reads_are_refused_with_both_numbers(bodies):
    raw = json.dumps({"prompt": [1] * 300_000}).encode()
    with pytest.raises(ApiError, match=r"has 300,002 values .* at most 12,000 are taken") as found:
        read(bodies, raw, 2000)
    assert (found.value.status, found.value.code) == (400, "context_length_exceeded")
    # The object, the list and its numbers.
    assert len(read(bodies, raw, 290_002)["prompt"]) == 300_000


def test_what_takes_all_memory_is_refused_and_the_process_goes_on(bodies):
    assert read(bodies, b'{"a": 1}') == {"a": 1}
    pid = bodies._process._process.pid
    # An object with a field for each ten bytes.
    raw = b'{"a": [' + b",".join([b'{"":[{}]}'] * (MAX_BODY // 10 - 10)) + b"]}"
    with pytest.raises(ApiError) as found:
        read(bodies, raw)
    # A busy machine does not give it its second of processor time soon enough.
    assert found.value.status in (400, 503)
    assert read(bodies, b'{"a": 1}') == {"a": 1}
    assert (bodies._process._process.pid == pid) == (found.value.status == 400)


def test_a_process_that_ends_or_stands_still_costs_a_request(bodies, monkeypatch):
    for number in (signal.SIGKILL, signal.SIGSTOP):
        assert read(bodies, b"{}") == {}
        os.kill(bodies._process._process.pid, number)
        with monkeypatch.context() as patched:
            patched.setattr(limited_process, "PATIENCE_S", 0.5)
            with pytest.raises(ApiError) as found:
                read(bodies, b"{}")
        assert (found.value.status, found.value.code) == (503, "busy")
    assert read(bodies, b"{}") == {}


def test_it_has_limits_and_gives_way(bodies):
    read(bodies, b"{}")
    place = Path(f"/proc/{bodies._process._process.pid}")
    limits = {line[:26].strip(): line[26:].split()[0] for line in (place / "limits").read_text().splitlines()}
    assert limits["Max processes"] == limits["Max file size"] == "0"
    assert int(limits["Max address space"]) < 512 << 20
    # The niceness is field 19.
    assert int((place / "stat").read_text().rpartition(")")[2].split()[16]) == NICENESS


def test_a_large_request_is_answered_as_a_small_one():
    with served() as front:
        small = {"prompt": "def", "max_tokens": 4, "temperature": 0}
        expected = front.post("/v1/completions", small)[1]["choices"]
        status, found = front.post("/v1/completions", {**small, "user": PADDED})
        assert (status, found["choices"]) == (200, expected)
        # Far more ids than the model reads, and far more than it has words.
        status, found = front.post("/v1/completions", {"prompt": [1] * 200_000})
        assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
        assert "200,002 values" in found["error"]["message"]


def test_many_ids_are_written_in_pieces_that_are_one_object():
    with served() as front:
        text = "import os\n" * 8000
        status, found = front.post("/tokenize", {"prompt": text, "add_special_tokens": False})
        assert status == 200
        assert (found["count"], found["max_model_len"], found["token_strs"]) == (len(found["tokens"]), MAX_MODEL_LEN, None)
        assert found["count"] > 10_000
        assert front.post("/detokenize", {"tokens": found["tokens"]})[1]["prompt"] == text
