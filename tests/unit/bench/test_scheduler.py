"""`bench scheduler` over a tiny model: every field of a row, counts by hand, the same tokens for
whoever computes them, and refusals before anything is measured.

SPDX-License-Identifier: Apache-2.0
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from dflash_moe.bench.compare import compare_rows
from dflash_moe.bench.engine_runs import Arrivals, RunSample
from dflash_moe.bench.harness import Recorder, Silent
from dflash_moe.bench.results import read_result
from dflash_moe.bench.scheduler import SchedulerCase, SchedulerParams, run_scheduler, summarise
from dflash_moe.cli.main import run
from dflash_moe.config import BLOCK_TOKENS
from dflash_moe.errors import ConfigError
from tests.host_models import checkpoint, topology

PROMPT, NEW, REPEAT = 20, 6, 2
PROMISED = {
    "name", "batch", "prompt_tokens", "new_tokens", "samples_s", "samples_per_round", "median_s", "p95_s",
    "prefill_tokens_per_s", "decode_tokens_per_s", "total_tokens_per_s", "decode_tokens", "prefill_s", "decode_s", "total_s",
    "ttft_s", "tpot_s", "latency_s", "calls", "request_bytes", "reply_bytes", "floor_bytes", "wire_efficiency",
    "tokens_digests",
}  # fmt: skip
OF_ENGINE = {
    "batch_sizes", "steps", "preemptions", "recomputed_tokens", "cached_tokens", "per_step_s", "engine_share",
}  # fmt: skip
EVERY_STEP = {"plan_s", "sample_s", "commit_s", "deliver_s", "forward_s"}


def measured(recorder=None, **changes):
    fields = {
        "batch": (1, 3),
        "prompt_tokens": PROMPT,
        "new_tokens": NEW,
        "repeat": REPEAT,
        "with_loop": True,
    } | changes
    overrides = {"kv_memory": fields.pop("kv_memory", "16MiB")}
    overrides |= {key: fields.pop(key) for key in ("max_batch_tokens", "max_requests") if key in fields}
    params = SchedulerParams(checkpoint("qwen3_moe", "bf16"), **fields)
    return run_scheduler(params, topology("loopback"), recorder=recorder or Recorder(), overrides=overrides)


@pytest.fixture(scope="module")
def result():
    return measured()


def test_every_row_has_the_promised_fields_and_times_that_fit_each_other(result):
    assert result.complete
    assert [row["name"] for row in result.rows] == ["loop", "batch-1", "batch-3"]
    for row in result.rows:
        assert row.keys() >= PROMISED
        assert (row.keys() >= OF_ENGINE) is (row["name"] != "loop")
        assert len(row["samples_s"]) == REPEAT
        assert row["decode_s"]["p50"] == row["median_s"]
        # The first token lies within the prefill, and a request within the run.
        assert 0 < row["ttft_s"]["p50"] <= row["prefill_s"]["mean"] * REPEAT
        assert row["latency_s"]["mean"] <= row["total_s"]["mean"]
        assert row["total_s"]["mean"] == pytest.approx(row["prefill_s"]["mean"] + row["decode_s"]["mean"])


def test_a_batch_runs_as_one_from_its_first_step_on_and_finds_no_prefix(result):
    for row in result.rows[1:]:
        batch = row["batch"]
        assert row["batch_sizes"] == {str(batch): NEW}
        assert (row["steps"], row["preemptions"], row["cached_tokens"], row["recomputed_tokens"]) == (NEW, 0, 0, 0)
        assert row["per_step_s"].keys() == EVERY_STEP
        own = sum(row["per_step_s"][key] for key in EVERY_STEP - {"forward_s"})
        assert row["engine_share"] == pytest.approx(own / (own + row["per_step_s"]["forward_s"]))
        assert row["decode_tokens"] == batch * (NEW - 1)
    loop, alone, _ = result.rows
    # One request moves the same, with an engine and without.
    for key in ("calls", "request_bytes", "reply_bytes", "floor_bytes"):
        assert loop[key] == alone[key] > 0


def test_a_request_has_the_same_tokens_in_every_round_and_company(result):
    assert [len(row["tokens_digests"]) for row in result.rows] == [1, 1, 1]
    loop, alone, three = (row["tokens_digests"][0].split() for row in result.rows)
    assert loop == alone == three[:1]
    assert len(set(three)) == 3
    assert [entry["same_tokens"] for entry in result.summary] == [True] * 3
    assert [entry["against"] for entry in result.summary] == ["batch-1"] * 3
    assert result.summary[1]["tpot_ratio"] == result.summary[1]["throughput_ratio"] == 1


def test_chunks_of_prompts_are_counted_as_they_were_planned():
    row = measured(batch=(2,), with_loop=False, repeat=1, warmup=0, max_batch_tokens=PROMPT).rows[0]
    # The first prompt fills a step. In the next two the first request has a row, and the second the
    # rest of its prompt: 19 tokens and one. Then both decode, and the second ends alone.
    assert row["batch_sizes"] == {"1": 3, "2": 5}
    assert row["steps"] == NEW + 2
    # The first request had three tokens when the second had its first.
    assert row["decode_tokens"] == 2 * NEW - 4


def test_a_batch_beyond_the_kv_memory_is_preempted_with_a_warning_and_keeps_its_tokens(result):
    said = []

    class Said(Silent):
        def say(self, line):
            said.append(line)

    block_bytes = (16 << 20) // (result.params["kv_tokens"] // BLOCK_TOKENS)
    found = measured(
        recorder=Recorder(None, Said()), prompt_tokens=40, new_tokens=40, with_loop=False, repeat=1, warmup=0,
        kv_memory=str(8 * block_bytes),
    )  # fmt: skip
    # Two prompts of three blocks each fit beside each other, and two whole requests of five do not.
    assert found.rows[1]["preemptions"] > 0
    assert found.rows[1]["recomputed_tokens"] > 0
    assert [entry["same_tokens"] for entry in found.summary] == [True, True]
    assert any("need 15 blocks of the KV cache, and it has 8" in line for line in said)


def sample(seconds, *tokens):
    """A run whose requests have their first token at 1 s and the others later, `seconds` apart."""
    times = [1.0 + place * seconds for place in range(len(tokens[0]))]
    return RunSample([Arrivals(0.0, list(one), times) for one in tokens], {})


def test_decode_begins_with_the_last_first_token():
    late = RunSample([Arrivals(0.0, [1, 2, 3], [1.0, 2.0, 3.0]), Arrivals(0.5, [4, 5, 6], [2.0, 3.0, 4.5])], {})
    assert (late.prefill_s, late.decode_s, late.decode_tokens) == (2.0, 2.5, 3)
    assert [one.tpot_s for one in late.arrivals] == [1.0, 1.25]


def test_other_tokens_are_told_and_ratios_are_taken_round_by_round():
    one, other = [1, 2, 3], [4, 5, 6]
    alone = SchedulerCase("batch-1", 1, 4, 3, lambda: None, samples=[sample(1.0, one), sample(2.0, one)])
    pair = SchedulerCase("batch-2", 2, 4, 3, lambda: None, samples=[sample(3.0, one, other), sample(6.0, one, other)])
    found = {entry["name"]: entry for entry in summarise([alone, pair])}
    assert found["batch-2"] == {
        "name": "batch-2", "against": "batch-1", "tpot_ratio": 3.0, "throughput_ratio": pytest.approx(2 / 3),
        "same_tokens": True,
    }  # fmt: skip
    alone.samples[1] = sample(2.0, [1, 2, 7])
    assert [entry["same_tokens"] for entry in summarise([alone, pair])] == [False, True]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"new_tokens": 1}, "new_tokens=1 is not allowed"),
        ({"batch": (2,)}, "has no 1, with which the plain loop is compared"),
        ({"prompt_tokens": 1 << 19}, "max_position_embeddings"),
        ({"kv_memory": "16KiB", "prompt_tokens": 100}, "engine.kv_memory"),
        ({"max_requests": 2}, "a batch of 3 requests was asked for, and engine.max_requests is 2"),
    ],
)
def test_what_has_no_room_is_refused_before_anything_is_measured(changes, said):
    with pytest.raises(ConfigError) as found:
        measured(**changes)
    assert said in str(found.value)


def test_the_command_prints_writes_draws_and_is_compared(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "s.json", tmp_path / "s.svg"
    arguments = ["--batch", "1,2", "--prompt-tokens", "8", "--new-tokens", "3", "--repeat", "5", "--with-loop"]
    model = str(checkpoint("qwen3_moe", "bf16"))
    code = run(["bench", "scheduler", "--model", model, *arguments, "--json", str(out), "--plot", str(picture)])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    for text in ("TTFT ms", "deliver us", "batch-2", "equal"):
        assert text in shown.out
    assert "round 5 of 5" in shown.err
    assert picture.read_text().startswith("<?xml")
    found = read_result(out, case="scheduler")
    # The loop is the same work as one request, and two requests are not.
    assert compare_rows(found, "s", "loop", "batch-1", min_effect=0.02).verdicts[0].rounds == 5
    with pytest.raises(ConfigError, match="no row 'batch-1' has the dtype and sizes of a row 'batch-2'"):
        compare_rows(found, "s", "batch-1", "batch-2", min_effect=0.02)
    assert run(["bench", "plot", str(out), "--out", str(tmp_path / "again.png")]) == 0
    del found["rows"][1]["per_step_s"]["plan_s"]
    out.write_text(json.dumps(found))
    assert run(["bench", "plot", str(out), "--out", str(tmp_path / "again.png")]) == 2
    assert "row 'batch-1 per_step_s' lacks the field 'plan_s'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch", "1,x"], "--batch '1,x'"),
        (["--batch", "0"], "1..4096"),
        (["--batch", "5000"], "1..4096"),
        (["--new-tokens", "1"], "--new-tokens"),
        (["--plot", "out.gif"], ".png or .svg"),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_code_2(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["bench", "scheduler", "--model", str(checkpoint("qwen3_moe", "bf16")), *arguments]) == 2
    assert said in capsys.readouterr().err
