"""`bench streaming` before a scripted server: schedules, what prompts are, what rows count, and the
command.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import socket
import threading

import pytest

pytest.importorskip("httptools")

from dflash_moe.bench.compare import compare_files
from dflash_moe.bench.harness import Recorder, Silent
from dflash_moe.bench.results import read_result
from dflash_moe.bench.streaming.endpoint import endpoint_of
from dflash_moe.bench.streaming.load import RELATIVE, Schedule, run_load
from dflash_moe.bench.streaming.prompts import Prompts
from dflash_moe.bench.streaming.streaming import StreamingParams, run_streaming
from dflash_moe.cli.main import run
from dflash_moe.errors import ConfigError, DflashError
from tests.unit.bench.streaming.scripted_server import answer, event, refusal, scripted, tokens, usage

PROMISED = {
    "name", "concurrency", "requests", "prompt_tokens", "new_tokens", "samples_s", "samples_per_round",
    "measured_per_round", "median_s", "p95_s", "tokens_per_s", "requests_per_s", "ttft_s", "tpot_s", "itl_s", "latency_s",
    "submit_lag_s", "queue_s", "completed", "refused", "failed", "first_error", "retry_after_s", "tokens",
    "tokens_per_event", "itl_weights", "counted_prompt_tokens", "cached_tokens", "client_cpu_us_per_token",
    "server_cpu_us_per_token",
}  # fmt: skip
WAIT_S = 60.0


def measured(url, recorder=None, **changes):
    fields = {"requests": 4, "concurrency": (2,), "new_tokens": 3, "repeat": 2, "is_pretok": True, "timeout_s": WAIT_S}
    return run_streaming(StreamingParams(url=url, **fields | changes), recorder=recorder or Recorder())


def words(prompt):
    return len(prompt.split())


class Said(Silent):
    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)


# -- schedules -------------------------------------------------------------------------------------
def load(script, count, schedule):
    with scripted(script) as server:
        endpoint = endpoint_of(server.url)
        return run_load(endpoint, [endpoint.request("completions", b"{}")] * count, schedule, WAIT_S), server


def slow(_body, send):
    """Ends 50 ms after it was asked."""
    threading.Event().wait(0.05)
    send(tokens(2))


def test_no_more_requests_are_open_than_may_be():
    found, server = load(slow, 7, Schedule(concurrency=3))
    assert (len(found.completed), server.most_open) == (7, 3)
    # The last ones are due once others have ended.
    ends = sorted(one.times[-1] for one in found.streamed)
    assert found.streamed[3].due >= ends[0]
    assert found.streamed[6].due >= ends[3]


def test_an_absolute_schedule_keeps_its_times_when_there_is_no_place():
    found, _ = load(slow, 4, Schedule(0.01, concurrency=1))
    first, *others = found.streamed
    assert [one.due - first.due for one in others] == pytest.approx([0.01, 0.02, 0.03])
    assert others[0].submitted >= first.times[-1]
    assert others[2].submitted >= others[1].times[-1]


def test_a_relative_schedule_counts_from_the_one_before():
    first, second, third = load(slow, 3, Schedule(0.01, RELATIVE, concurrency=1))[0].streamed
    assert second.due >= first.due + 0.01
    assert second.submitted >= first.times[-1]
    assert third.due >= first.times[-1] + 0.01


def test_without_a_limit_nobody_waits_for_another():
    together = threading.Barrier(4)

    def joined(_body, send):
        together.wait(WAIT_S)
        send(tokens(1))

    assert len(load(joined, 4, Schedule(0.001))[0].completed) == 4


# -- prompts ---------------------------------------------------------------------------------------
def test_texts_have_the_length_that_the_server_counts():
    """This server has three tokens a word, and five more of its own."""

    def script(body, send):
        send(tokens(body["max_tokens"], prompt=5 + 3 * words(body["messages"][0]["content"])))

    with scripted(script) as server:
        row = measured(server.url, is_pretok=False, endpoint="chat", prompt_tokens=95).rows[0]
        assert row["counted_prompt_tokens"] == 95
        assert server.heads[-1].startswith("POST /v1/chat/completions ")
        asked = [body["messages"][0]["content"] for body in server.bodies]
    # Two probes, then three rounds of four, and no prompt comes twice.
    assert len(asked) == 14
    assert len({" ".join(prompt.split()[:8]) for prompt in asked}) == 14


def test_the_same_seed_gives_the_same_prompts_and_ids_are_exact():
    with scripted(tokens(3)) as server:
        bodies = []
        for seed in (1, 1, 2):
            server.bodies.clear()
            measured(server.url, prompt_tokens=20, seed=seed, concurrency=(1,), temperature=0.5)
            bodies.append(list(server.bodies))
    assert bodies[0] == bodies[1] != bodies[2]
    last = bodies[0][-1]
    assert len(last["prompt"]) == 20
    assert (last["max_tokens"], last["temperature"], last["stream"], last["model"]) == (3, 0.5, True, "scripted")
    assert last["stream_options"] == {"include_usage": True}


def test_fields_that_a_server_does_not_know_are_left_out_and_said():
    def strict(body, send):
        for name in ("ignore_eos", "stream_interval"):
            if name in body:
                send(refusal(400, f"unknown field {name}"))
                return
        send(answer(event("abc", usage=usage(3)), event(usage=usage(3))))

    said = Said()
    with scripted(strict) as server:
        result = measured(server.url, Recorder(reporter=said), stream_interval=3)
    assert result.params["left_out"] == ["ignore_eos", "stream_interval"]
    assert server.bodies[-1]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert (result.rows[0]["failed"], result.rows[0]["tokens_per_event"], result.rows[0]["itl_s"]) == (0, 3.0, None)
    assert any("does not know ignore_eos" in line for line in said.lines)


def test_probes_fail_with_the_words_of_the_server():
    for raw, kind in ((refusal(404, "no such model"), ConfigError), (refusal(503, "loading"), DflashError)):
        with scripted(raw) as server:
            prompts = Prompts(endpoint_of(server.url), "m", "completions", 8, 2, 0.0, 0)
            with pytest.raises(kind, match="no such model|loading"):
                prompts.fit(WAIT_S, lambda _line: None)


# -- rows ------------------------------------------------------------------------------------------
def test_every_row_has_the_promised_fields():
    with scripted(tokens(3, queue_time=0.5)) as server:
        result = measured(server.url, concurrency=(1, 2), warmup=0)
    assert result.complete
    assert [row["name"] for row in result.rows] == ["concurrency-1", "concurrency-2"]
    for row in result.rows:
        assert row.keys() == PROMISED
        assert (row["completed"], row["tokens"], row["tokens_per_event"], row["itl_weights"]) == (8, 24, 1.0, "tokens")
        assert len(row["samples_s"]) == 2
        assert row["tokens_per_s"] > 0
        assert 0 < row["ttft_s"]["p50"] <= row["latency_s"]["p99"]
        assert row["queue_s"]["p50"] == 0.5
        assert row["client_cpu_us_per_token"] > 0
        assert row["server_cpu_us_per_token"] == {}


def test_refusals_and_failures_are_counted_apart_and_have_no_times():
    left = [refusal(429, "9 wait", "retry-after: 7"), answer(event("a"), b'data: {"error": {"message": "lost"}}\n\n')]

    def script(body, send):
        send(left.pop() if body["max_tokens"] > 1 and left else tokens(3))

    with scripted(script) as server:
        row = measured(server.url, warmup=0, repeat=1, concurrency=(1,)).rows[0]
    assert (row["completed"], row["refused"], row["failed"], row["retry_after_s"]) == (2, 1, 1, 7.0)
    assert (row["first_error"], row["tokens"]) == ("an event says: lost", 6)


def test_a_round_without_an_answer_ends_the_bench():
    def script(body, send):
        send(tokens(1) if body["max_tokens"] == 1 else refusal(500, "boom"))

    with scripted(script) as server, pytest.raises(DflashError, match="none of 4 requests was completed: status 500: boom"):
        measured(server.url)


def test_events_of_unknown_tokens_and_short_answers_are_said():
    said = Said()
    with scripted(answer(event("ab"), event("c"), event(usage=usage(3)))) as server:
        row = measured(server.url, Recorder(reporter=said), new_tokens=4).rows[0]
    assert (row["itl_weights"], row["tokens_per_event"]) == ("events", 1.5)
    assert any("1.50 tokens an event" in line for line in said.lines)
    assert any("24 tokens came of 32" in line for line in said.lines)


# -- the command -----------------------------------------------------------------------------------
def test_the_command_prints_writes_draws_and_is_compared(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out, picture, key = tmp_path / "s.json", tmp_path / "s.svg", tmp_path / "key"
    key.write_text("# a comment\nthe-key\n")
    with scripted(tokens(2)) as server:
        arguments = [
            "--requests",
            "2",
            "--concurrency",
            "1,2",
            "--new-tokens",
            "2",
            "--repeat",
            "5",
            "--api-key-file",
            str(key),
        ]
        arguments += ["--json", str(out), "--plot", str(picture)]
        code = run(["bench", "streaming", "--url", server.url, *arguments])
        assert "authorization: Bearer the-key" in server.heads[-1]
    shown = capsys.readouterr()
    assert code == 0, shown.err
    for text in ("TTFT ms", "submit lag ms", "concurrency-2", "client us/token"):
        assert text in shown.out
    assert picture.read_text().startswith("<?xml")
    found = read_result(out, case="streaming")
    assert "the-key" not in out.read_text()
    other = {**found, "params": {**found["params"], "url": "http://another"}}
    assert len(compare_files(found, other, names=("a", "b"), min_effect=0.02).verdicts) == 2


def test_failed_requests_exit_with_1_and_refused_ones_with_0(capsys):
    for raw, code in ((refusal(500, "boom"), 1), (refusal(429, "full"), 0)):
        left = [raw]

        def script(body, send, left=left):
            send(left.pop() if body["max_tokens"] > 1 and left else tokens(2))

        with scripted(script) as server:
            few = ["--requests", "3", "--concurrency", "1", "--new-tokens", "2", "--repeat", "1", "--warmup", "0"]
            assert run(["bench", "streaming", "--url", server.url, *few]) == code
        assert "concurrency-1: first error: status" in capsys.readouterr().err


def test_nobody_listening_is_one_sentence(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    for more in ([], ["--served-model", "m"]):
        assert run(["bench", "streaming", "--url", url, *more]) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last == f"{url}: Connection refused; is an OpenAI-compatible server listening there?"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--url URL"),
        (["--url", "http://x", "--model", "demo"], "--url URL"),
        (["--url", "http://x", "--topology", "x.yaml"], "--topology is for --model"),
        (["--url", "http://x", "--pretok", "--endpoint", "chat"], "--pretok"),
        (["--url", "nowhere"], "expected http"),
        (["--url", "http://x", "--api-key-file", "no_such_file"], "No such file"),
        (["--url", "http://x", "--api-key-file", "/dev/null"], "is no key"),
        (["--url", "http://x", "--concurrency", "0"], "1..4096"),
        (["--url", "http://x", "--interval", "nan"], "--interval"),
        (["--url", "http://x", "--endpoint", "other"], "--endpoint"),
        (["--model", "no_such_model"], "no_such_model"),
        (["--url", "http://x", "--plot", "out.gif"], ".png or .svg"),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_code_2(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["bench", "streaming", *arguments]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
